"""What a run will need is known before it starts, and when memory runs out the run says so."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from flash_mcp.protocol.errors import FlashError
from tests.attempts import Attempt, make_run, vowels
from tests.waiting import WAIT_S
from tests.watch import watch
from worker.capacity import GIB, MIB, _control_group_rooms, kv_cache_bytes
from worker.model_files import ModelFiles
from worker.process import memory_state
from worker.training import memory, packing
from worker.training.memory import Workload, estimate
from worker.training.policy import load_policy


def make_llama(folder: Path, tokenizer: Path) -> Path:
    """327 million random parameters in few wide layers."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    vocabulary = AutoTokenizer.from_pretrained(tokenizer)
    vocabulary.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=1536, intermediate_size=4096, num_hidden_layers=10,
        num_attention_heads=24, num_key_value_heads=8, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=vocabulary.bos_token_id, eos_token_id=vocabulary.eos_token_id,
        pad_token_id=vocabulary.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.timeout(1800)
# Nearly all that the tiny model's run holds are libraries, and those differ between machines.
@pytest.mark.cpu
@pytest.mark.parametrize(("size", "margin"), [("tiny", 0.35), ("135M", 0.2), ("327M", 0.2)])
@pytest.mark.long
def test_the_estimate_is_near_the_measured_peak(size: str, margin: float, tiny_model: Path, tmp_path: Path) -> None:
    fields = {"steps": 2, "save_every": 2}
    model = tiny_model
    if size != "tiny":
        if not os.environ.get("FLASH_SLOW"):
            pytest.skip("minutes; set FLASH_SLOW=1")
        from worker.engine.fetch import ensure  # noqa: PLC0415

        question = "Write a very long story about the sea and its many animals, chapter"
        fields |= {"batch_size": 2, "max_tokens": 96, "lora_rank": 32, "lora_alpha": 64, "learning_rate": 1e-5,
                   "environment_args": {"question": question}}  # fmt: skip
        smollm2 = ensure("smollm2-135m-instruct")
        model = smollm2 if size == "135M" else make_llama(tmp_path / "llama", smollm2)
    run = make_run(tmp_path / "run", model, **fields)
    with Attempt(run, fresh=True) as attempt:
        _, peak_mib = watch(run, attempt, timeout_s=1700)
        assert attempt.wait() == 0, attempt.log_path.read_text()
    (said,) = (event for name in run.event_names() if (event := run.event(name)) and event["kind"] == "memory")
    tokens = {"tiny": 200, "135M": 30 + 8 * 192, "327M": 30 + 8 * 192}[size]
    needed = [said[name] for name in ("process", "weights", "engine_weights", "kv_cache", "adapter")]
    estimated_mib = (sum(needed) + tokens * said["token_bytes"]) / MIB
    assert estimated_mib == pytest.approx(peak_mib, rel=margin), said["message"]


@pytest.mark.parametrize("way", packing.Way)
def test_a_few_tokens_tell_what_a_long_pass_keeps(tiny_model: Path, way: packing.Way) -> None:
    policy = load_policy(ModelFiles(tiny_model), rank=8, alpha=16, seed=0, dtype=torch.bfloat16)
    before = torch.random.get_rng_state()
    causal_lm: Any = policy.get_base_model()
    pack = packing.probe(causal_lm, [200] * 5, way)
    a_token = memory.token_bytes(causal_lm, way) - memory.LOGIT_BYTES * causal_lm.config.vocab_size
    kept = (1 + memory.HEAP_OVERHEAD) * memory.pass_bytes(causal_lm, pack)
    # The adapter's copies in half precision are kept once, and count for the few tokens.
    assert kept == pytest.approx(a_token * pack.tokens, rel=0.25) and before.equal(torch.random.get_rng_state())


def test_activations_that_are_kept_are_those_of_autograd(tiny_model: Path) -> None:
    """A linear layer keeps its input for the gradient of its weights; the weights do not count."""
    layer = torch.nn.Linear(64, 8, bias=False)
    layer.dtype, layer.device = torch.float32, torch.device("cpu")  # type: ignore[assignment]
    pack: Any = SimpleNamespace(hidden=lambda model: model(torch.ones(100, 64)))
    assert memory.pass_bytes(layer, pack) == 100 * 64 * 4


def test_a_model_that_fits_only_with_a_shorter_cache_names_the_length(tiny_model: Path) -> None:
    work = Workload(max_length=2**20, sequences=32, lora_rank=8)
    base = ModelFiles(tiny_model)
    capacity = estimate(base, replace(work, sequences=1, max_length=2**18), torch.bfloat16, GIB).total
    with pytest.raises(FlashError, match=r"set max_length=262144 \(it is 1048576\)") as caught:
        memory.check_model(base, work, torch.bfloat16, capacity)
    error = caught.value
    assert error.code == "out_of_memory" and error.values["largest"] == "process"
    assert error.values["available_gib"] == round(capacity / GIB, 2) < error.values["needed_gib"]
    with pytest.raises(FlashError, match="set max_length=131072 "):
        memory.check_model(base, work, torch.bfloat16, capacity - 1)
    with pytest.raises(FlashError, match="use a smaller model, or a machine with more memory"):
        memory.check_model(base, replace(work, sequences=0), torch.bfloat16, GIB)


def test_the_kv_cache_holds_all_sequences_but_leaves_most_of_the_memory_alone(tiny_model: Path) -> None:
    base = ModelFiles(tiny_model)
    token = 2 * 2 * 2 * 1 * 32  # keys and values, bf16, layers, heads, head size
    assert kv_cache_bytes(base, 256, 32, GIB) == token * 32 * (32 * 8 + 1)
    assert kv_cache_bytes(base, 256, 32, 4 * MIB) == token * 32 * (MIB // (token * 32))
    assert kv_cache_bytes(base, 4096, 32, 0) == token * 32 * 129


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_any_control_group_above_is_heeded(version: int, tmp_path: Path) -> None:
    top = tmp_path / ("memory" if version == 1 else "")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for folder, limit in (("", "9223372036854771712" if version == 1 else "max"), ("a", "1000"), ("a/b", "5000")):
        (top / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip((*names, "memory.stat"), (limit, "700", "anon 5\ninactive_file 100\n"), strict=True):
            (top / folder / name).write_text(value)
    membership = tmp_path / "membership"
    membership.write_text("5:memory:/a/b\n4:cpu:/x\n" if version == 1 else "0::/a/b\n")
    assert min(_control_group_rooms(membership, tmp_path)) == 400
    assert 4400 in list(_control_group_rooms(membership, tmp_path))


class SmallAttempt(Attempt):
    """An attempt on a machine with little memory."""

    program = """
from worker import main
main.prepare_process()
from worker import model
model.capacity_bytes = lambda: 2**29
main.main()
"""


@pytest.mark.cpu
def test_an_attempt_that_cannot_fit_is_refused_before_its_engine_starts(tiny_model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model)
    with SmallAttempt(run) as attempt:
        attempt.wait()
    result = run.result()
    assert result and result["state"] == "failed", attempt.log_path.read_text()
    error = result["error"]
    assert error["code"] == "out_of_memory" and error["values"]["largest"] == "process"
    assert error["values"]["available_gib"] == 0.5 < error["values"]["needed_gib"] and "smaller model" in error["fix"]
    assert ": engine" not in attempt.log_path.read_text() and not run.metric_steps()


def test_an_error_of_the_card_says_what_the_card_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 75 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    card = memory_state(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert card == {"held_gib": 70, "peak_gib": 75, "available_gib": 1}
    assert memory_state(MemoryError())["held_gib"] < 70, "the host's"


LONG_ANSWERS = """
import pathlib
class Growing(Vowels):
    def step_episode(self, example, messages, assistant_response):
        text = "more " * (600 if pathlib.Path({flag!r}).exists() else 1)
        return EnvironmentStepResult(done=len(messages) >= 4, messages=[{{"role": "user", "content": text}}])
def load_environment(train=12, held_out=5, question="Write"):
    return Growing(train, held_out, question)
"""


@pytest.mark.cpu
def test_memory_that_runs_out_in_mid_run_is_said_with_the_evidence(tiny_model: Path, tmp_path: Path) -> None:
    """The address space is closed once the run trains; then conversations get long."""
    flag = tmp_path / "growing" / "flag"
    folder = vowels(flag.parent, more=LONG_ANSWERS.format(flag=str(flag)))
    run = make_run(tmp_path / "run", tiny_model, environment=folder, steps=1000, save_every=1000, max_length=4096)
    with Attempt(run) as attempt:
        attempt.wait_until(lambda: 2 in run.metric_steps(), timeout_s=240)
        process = psutil.Process(attempt.process.pid)
        limit = process.memory_info().vms + 64 * MIB
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        flag.touch()
        assert attempt.wait(240) == 0, attempt.log_path.read_text()
    result = run.result()
    assert result and result["state"] == "failed", attempt.log_path.read_text()
    error = SimpleNamespace(**result["error"])
    assert error.code == "out_of_memory", error
    assert "memory" in error.what and "event `memory`" in error.fix
    assert error.values["peak_gib"] >= error.values["held_gib"] > 0.5 and error.values["available_gib"] > 0


@pytest.mark.cpu
@pytest.mark.parametrize(("limit", "code"), [("resource.RLIM_INFINITY", "worker_failed"), ("2**34", "out_of_memory")])
def test_a_thread_without_memory_for_its_stack_is_a_lack_of_memory(limit: str, code: str) -> None:
    """A stack larger than the address space; without a limit of it, only the number of threads can be at its end."""
    start = f"""if True:
        import resource, threading
        from worker.main import _explain
        resource.setrlimit(resource.RLIMIT_AS, ({limit}, resource.RLIM_INFINITY))
        threading.stack_size(2**47)
        try:
            threading.Thread(target=print).start()
        except RuntimeError as error:
            print(_explain(error, "train").code)
    """
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.strip() == code, done.stderr
