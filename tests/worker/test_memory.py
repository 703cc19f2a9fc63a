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
from tests.attempts import VOWELS, Attempt, make_run
from tests.waiting import WAIT_S
from tests.watch import watch
from worker.capacity import GIB, MIB, _control_group_rooms, kv_cache_bytes
from worker.process import memory_state
from worker.training import attention, memory, packing
from worker.training.memory import Workload, check, estimate
from worker.training.policy import load_policy

WORK = Workload(prompt=30, max_tokens=16, turns=2, max_length=256, group_size=8, sequences=32, lora_rank=8)


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
    estimated_mib = sum(size for size in said.values() if isinstance(size, int) and size > 4096) / MIB
    assert estimated_mib == pytest.approx(peak_mib, rel=margin), said["message"]


@pytest.mark.cpu
def test_the_pass_without_storage_holds_what_a_real_pass_holds(tiny_model: Path) -> None:
    """autograd's own count of what it saves in the real pass, against the estimate's."""
    saved: dict[int, int] = {}
    policy = load_policy(tiny_model, rank=8, alpha=16, seed=0, dtype=torch.bfloat16)
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # alive, so that no address is used twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    long = Workload(prompt=40, max_tokens=200, turns=1, max_length=512, group_size=4, sequences=32, lora_rank=8)
    layout = attention.Layout(40, [200] * 4, policy.dtype, policy.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        ids = torch.zeros(840, dtype=torch.long, device=policy.device)
        packing.hidden_states(policy.get_base_model(), ids, layout)
    held, _ = memory._training_pass(tiny_model, torch.bfloat16, long)
    assert held == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"way": "rows"},
        *(pytest.param(fields, marks=pytest.mark.long) for fields in ({}, {"way": "state"}, {"recomputed": True})),
    ],
    ids=str,
)
def test_what_a_few_layers_hold_tells_what_all_of_them_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    from transformers import Gemma3TextConfig  # noqa: PLC0415

    # Of its 11 layers 9 look at a window, 2 at everything.
    Gemma3TextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=11, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    ).save_pretrained(tmp_path)  # fmt: skip
    work = Workload(40, 50, 1, 512, 4, 32, 8, **fields)
    few = memory._training_pass(tmp_path, torch.bfloat16, work)
    monkeypatch.setattr(memory, "TRACED_LAYERS", 11)
    assert few == pytest.approx(memory._training_pass(tmp_path, torch.bfloat16, work), rel=0.05)


def test_a_pass_that_is_not_packed_needs_the_prompt_once_a_rollout(tiny_model: Path) -> None:
    work = Workload(500, 100, 1, 1024, 8, 32, 8)
    packed, plain = (
        estimate(tiny_model, replace(work, way=way), torch.bfloat16, 64 * GIB) for way in ("packed", "rows")
    )
    assert plain.activations > 2 * packed.activations


def test_more_completions_than_a_pack_holds_need_no_more_memory(tiny_model: Path) -> None:
    def activations(group_size: int) -> int:
        work = Workload(96, 1000, 1, 2048, group_size, 32, 8)
        return estimate(tiny_model, work, torch.bfloat16, 64 * GIB).activations

    assert activations(16) == activations(4) > activations(3)


def test_a_run_whose_shortest_step_does_not_fit_is_refused_with_the_largest_term_and_the_knob(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have the prompt once for every member of the group."""
    work = Workload(200, 16, 1, 1024, 16, 0, 8, way="rows")
    eight = replace(work, max_tokens=1, group_size=8, recomputed=True)
    capacity = estimate(tiny_model, eight, torch.bfloat16, GIB).total
    monkeypatch.setattr(memory, "capacity_bytes", lambda: capacity)
    with pytest.raises(FlashError) as caught:
        check(tiny_model, work, torch.bfloat16)
    error = caught.value
    assert error.code == "out_of_memory" and error.values["largest"] == "process"
    assert error.values["available_gib"] == round(capacity / GIB, 2) < error.values["needed_gib"]
    turned = int(error.fix.removeprefix("set group_size=").split()[0])
    needed = [
        estimate(
            tiny_model, replace(work, max_tokens=1, group_size=size, recomputed=True), torch.bfloat16, capacity
        ).total
        for size in (turned, 2 * turned)
    ]
    assert needed[0] <= capacity < needed[1]


@pytest.mark.long
def test_a_run_that_fits_only_while_conversations_stay_short_is_warned(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload(100, 1000, 1, 2048, 8, 32, 8, recomputed=True)
    shortest, longest = (
        estimate(tiny_model, replace(work, max_tokens=tokens), torch.bfloat16, GIB).total for tokens in (1, 1000)
    )
    monkeypatch.setattr(memory, "capacity_bytes", lambda: (shortest + longest) // 2)
    needs, _, warning = check(tiny_model, replace(work, recomputed=False), torch.bfloat16)
    assert warning and "max_tokens=" in warning and needs.largest in str(needs)
    monkeypatch.setattr(memory, "capacity_bytes", lambda: 2 * GIB)
    assert check(tiny_model, WORK, torch.bfloat16)[1:] == (None, None)


@pytest.mark.parametrize(
    ("prompt", "way"), [(100, "packed"), pytest.param(1000, "packed", marks=pytest.mark.long), (100, "rows")]
)
def test_a_group_that_fits_only_without_its_activations_is_computed_twice(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, prompt: int, way: str
) -> None:
    work = Workload(prompt, 1000, 1, 4096, 16, 32, 8, way=way)
    capacity = 64 * GIB
    whole, twice = (
        estimate(tiny_model, replace(work, recomputed=recomputed), torch.bfloat16, capacity)
        for recomputed in (False, True)
    )
    assert twice.activations < whole.activations / 2 and twice.kv_cache == whole.kv_cache
    assert twice.total < whole.total
    capacity = (twice.total + whole.total) // 2
    monkeypatch.setattr(memory, "capacity_bytes", lambda: capacity)
    needs, keep_tokens, warning = check(tiny_model, work, torch.bfloat16)
    assert (needs, warning) == (twice, None)
    assert keep_tokens
    # Shorter conversations, the prompt as long: as many tokens as are kept may be computed at once,
    # and hardly more.
    shorter = [replace(work, max_tokens=length) for length in (25, *range(50, 1000, 50))]
    kept = max((group for group in shorter if group.tokens <= keep_tokens), key=lambda group: group.tokens)
    assert 0.7 * capacity < estimate(tiny_model, kept, torch.bfloat16, capacity).total <= capacity


@pytest.mark.long
def test_a_batch_of_rows_that_cannot_fit_names_the_knobs_of_sft(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    rows = Workload(0, 400, 1, 512, 8, 0, 8)
    assert estimate(tiny_model, rows, torch.bfloat16, 64 * GIB).kv_cache == 0
    smaller = estimate(tiny_model, replace(rows, group_size=2, recomputed=True), torch.bfloat16, 64 * GIB).total
    monkeypatch.setattr(memory, "capacity_bytes", lambda: smaller)
    _, keep_tokens, warning = check(tiny_model, rows, torch.bfloat16)
    assert warning and "a batch is of the longest rows" in warning and "set batch_size=2 (it is 8)" in warning
    assert keep_tokens is not None and keep_tokens < rows.tokens


def test_the_kv_cache_holds_all_sequences_but_leaves_most_of_the_memory_alone(tiny_model: Path) -> None:
    from transformers import AutoConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(tiny_model)
    token = 2 * 2 * 2 * 1 * 32  # keys and values, bf16, layers, heads, head size
    assert kv_cache_bytes(config, 256, 32, GIB) == token * 32 * (32 * 8 + 1)
    assert kv_cache_bytes(config, 256, 32, MIB) == token * 32 * (MIB // (token * 32))
    assert kv_cache_bytes(config, 4096, 32, 0) == token * 32 * 129


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
from worker.training import memory
memory.capacity_bytes = lambda: 2**29
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
    folder = tmp_path / "growing"
    flag = folder / "flag"
    folder.mkdir()
    source = (VOWELS / "environment.py").read_text() + LONG_ANSWERS.format(flag=str(flag))
    (folder / "environment.py").write_text(source)
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
    """A stack larger than the address space; without a limit of it, only the number of threads can
    be at its end.
    """
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
