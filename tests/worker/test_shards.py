"""Ranks that share the base weights of a model that one card cannot hold."""

import ast
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder
from tests.attempts import Attempt, held, make_run
from tests.forked import forked
from tests.places import ROOT
from tests.tiny import change_adapter
from tests.watch import listening_ports
from tests.worker import test_ranks
from tests.worker.test_evaluation_attempt import make_evaluation
from tests.worker.test_ranks import CASES, CPU, Step, exact_model, second_rank
from worker.adapter import save_adapter
from worker.model import meet, share_layers
from worker.model_files import ModelFiles
from worker.ranks import Ranks
from worker.rollouts.transcript import ChatTemplate
from worker.training import memory

__all__ = ["exact_model"]
pytestmark = pytest.mark.slow


def compare(rank: int, model: Path, out: Path) -> None:
    """A process of the test of gradients."""
    alone = {case: Step(model, out / "alone", Ranks(), case) for case in CASES if rank == 0}
    ranks = Ranks(rank, 2)
    ranks.connect(out)
    mesh = meet(ranks)
    whole = test_ranks.make_policy

    def shared_policy(path: Path) -> Any:
        policy = whole(path)
        share_layers(policy, mesh)
        return policy

    test_ranks.make_policy = shared_policy
    for case in CASES:
        step = Step(model, out / f"rank-{rank}", ranks, case)
        weight = step.policy.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
        assert 2 * weight.to_local().numel() == weight.numel()
        mine, others = ranks.gather(step.numbers())
        assert mine == others, case
        if rank:
            continue
        expected = alone[case].trained(gradients=True)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        assert largest > 1e-4
        assert step.told == pytest.approx(alone[case].told, rel=1e-5), case
        for name, gradient in step.trained(gradients=True).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6 * largest)


def test_ranks_with_a_part_of_each_layer_compute_the_gradients_of_one_with_all(exact_model: Path, tmp_path: Path):
    imports = "from pathlib import Path; from tests.worker.test_shards import compare"
    first, second = (
        f"{imports}; compare({rank}, Path({str(exact_model)!r}), Path({str(tmp_path)!r}))" for rank in (0, 1)
    )
    with forked(second, tmp_path / "log-1", **CPU), forked(first, tmp_path / "log-0", **CPU):
        pass


class SharedAttempt(Attempt):
    """An attempt whose cards cannot hold the model."""

    program = """
from worker import main
main.prepare_process()
from worker.training import memory
memory.check_model = lambda *arguments: arguments[-1]
if __name__ == "__main__":
    main.main()
"""


FIELDS = {"group_size": 4, "max_tokens": 8, "steps": 3, "eval_before": True, "gpus": 2}


def check_greedy(rows: list[dict[str, Any]], path: Path, model: Any) -> None:
    """The first answer of each conversation is what the model of one process says."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    template = ChatTemplate(tokenizer)
    answers: list[str] = []
    for row in rows:
        ids = template.prompt_ids(row["messages"][:1])
        answer: list[int] = []
        while len(answer) < FIELDS["max_tokens"] and not set(answer) & template.end_ids:
            with torch.no_grad():
                logits = model(torch.tensor([ids + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
        answers.append(template.text(answer))
    assert [row["messages"][1]["content"] for row in rows] == answers


@pytest.mark.cpu
@pytest.mark.long
def test_a_run_on_a_shared_model_goes_on_where_one_card_holds_it_after_a_kill(exact_model: Path, tmp_path: Path):
    saved = tmp_path / "run" / "checkpoints" / "1"
    environment, flag = held(tmp_path / "held", saved=saved)
    asked = {**FIELDS, "environment": environment, "env_timeout_s": 600}
    run = make_run(tmp_path / "run", exact_model, **asked)
    with SharedAttempt(run, **CPU) as attempt:
        attempt.wait_until(lambda: run.checkpoints.steps())
        lost = second_rank(attempt)
        assert listening_ports(attempt.process.pid) == listening_ports(lost.pid) == []
        lost.kill()
        assert attempt.wait() == 0, attempt.log_path.read_text()
    result = run.result()
    assert result and result["retryable"] and "SIGKILL" in result["error"]["what"], result
    flag.unlink()
    job = run.job()
    run.create({**job, "spec": {**job["spec"], "gpus": 1}})
    final = Attempt(run, 2, **CPU).ended()
    assert final and final["state"] == "succeeded", final
    check_steps(run)
    first = run.evaluation(0)
    assert first
    model = AutoModelForCausalLM.from_pretrained(exact_model, dtype=torch.float32)
    check_greedy(first["rollouts"][:8], exact_model, model)


@pytest.mark.long
@pytest.mark.cpu
def test_an_evaluation_on_several_cards_goes_on_after_a_process_of_its_engine_is_killed(exact_model: Path, tmp_path):
    policy = change_adapter(test_ranks.make_policy(exact_model), 0.1, seed=0, part="lora_")
    save_adapter(policy, tmp_path / "adapter")
    fields: dict[str, Any] = {"attempts": 64, "temperature": 0.0, "max_tokens": 8, "gpus": 2}
    adapter = tmp_path / "adapter"
    run = make_evaluation(tmp_path / "run", exact_model, adapter=adapter, **fields)
    with Attempt(run, **CPU) as attempt:
        attempt.wait_until(lambda: "sampling" in kinds(run))
        children = psutil.Process(attempt.process.pid).children(recursive=True)
        next(child for child in children if child.name() == "VLLM::Worker_TP1").kill()
        attempt.wait()
    result = run.result()
    assert result and result["retryable"], result
    assert "of the engine ended with signal SIGKILL" in result["error"]["what"]
    result, found = Attempt(run, 2, **CPU).ended(), run.evaluation(7)
    assert result and result["state"] == "succeeded" and found, result
    rows = found["rollouts"][::64]
    check_greedy(rows, exact_model, policy)
    with pytest.raises(AssertionError), policy.disable_adapter():
        check_greedy(rows, exact_model, policy)


PROBE = """
import sys
from pathlib import Path
from worker.main import prepare_process
prepare_process()
from worker.engine.vllm import VllmEngine
from worker.model_files import ModelFiles
from worker.rollouts.turns import Grammar, Sampling
if __name__ == "__main__":
    cards = sys.argv[2].split(",")
    base = ModelFiles(Path(sys.argv[1]))
    engine = VllmEngine(base, max_length=128, max_num_seqs=4, dtype="float32", sync="adapter", cards=cards)
    grammar = Grammar(json_schema='{"type": "string", "minLength": 3, "maxLength": 9}')
    for number in range(3):
        engine.submit(str(number), range(40 + number, 72), Sampling(40, 0.0, grammar=grammar))
    engine.abort(["2"])
    done = {}
    while engine.unfinished():
        done.update(engine.step())
    engine.close()
    print(repr([(done[name].token_ids, done[name].allowed) for name in "01"]))
"""


@pytest.mark.cpu
@pytest.mark.long
def test_answers_under_a_schema_are_trained_alike_on_several_cards(exact_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(PROBE)
    answers: list[Any] = []
    for cards in ("", ","):
        command = [sys.executable, str(file), str(exact_model), cards]
        paths = {"PYTHONPATH": str(ROOT), **CPU}
        done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-3000:]
        answers.append(ast.literal_eval(done.stdout.splitlines()[-1]))
    for (ids, allowed), (shared_ids, shared_allowed) in zip(*answers, strict=True):
        assert ids == shared_ids and min(allowed) < -0.5 and shared_allowed == pytest.approx(allowed, abs=1e-4)


def kinds(run: RunFolder) -> set[str]:
    found = [run.event(name) for name in run.event_names()]
    return {event["kind"] for event in found if event}


def check_steps(run: RunFolder) -> None:
    assert list(run.metric_steps()) == [1, 2, 3]
    for step in (1, 2, 3):
        found = run.metrics(step)
        assert found and len(list(run.rollouts(step))) == 16
        # The engine's log-probabilities are those of the trainer: both have the whole model.
        assert found["metrics"]["sampling_logp_difference/mean"] < 1e-4 and found["metrics"]["grad_norm"] > 0


def test_cards_that_cannot_share_the_heads_are_refused(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=768, num_attention_heads=12, num_key_value_heads=4).save_pretrained(tmp_path)
    base = ModelFiles(tmp_path)
    for count in (2, 4, 12):
        base.check_shape(count)
    with pytest.raises(FlashError, match=r"invalid_argument.*8 cards cannot share 12 heads"):
        base.check_shape(8)
    with pytest.raises(FlashError, match=r"6 cards cannot share 12 heads, 4 of them"):
        base.check_shape(6)


def test_a_model_that_one_card_cannot_hold_is_shared_by_all_if_they_can(tmp_path: Path) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    LlamaConfig(**shape, num_attention_heads=32, vocab_size=32000).save_pretrained(tmp_path)
    work, base = memory.Workload(256, 1, 8), ModelFiles(tmp_path)

    def with_gib(gib: float, cards: int) -> int:
        return memory.check_model(base, work, torch.bfloat16, int(gib * memory.GIB), cards)

    whole = memory.estimate(base, work, torch.bfloat16, 2**40)
    half = memory.estimate(base, replace(work, shards=2), torch.bfloat16, 2**40)
    assert half.engine_weights == math.ceil(2 * math.ceil(whole.weights / 2))
    assert 0.5 < half.weights / whole.weights < 0.6
    need = whole.total / memory.GIB
    assert with_gib(need + 0.1, 2) == 1 and with_gib(need - 0.1, 2) == 2
    with pytest.raises(FlashError, match="out_of_memory"):
        with_gib(need - 0.1, 1)
    with pytest.raises(FlashError, match="out_of_memory"):
        with_gib(half.total / memory.GIB - 0.1, 2)
