"""Several processes that train one run together: gradients, the curve, and the loss of one."""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import worker.ranks
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import validate
from tests.attempts import Attempt, held, make_run
from tests.forked import forked
from tests.tiny import make_tiny_model, make_tokenizer
from tests.waiting import WAIT_S
from tests.watch import listening_ports
from tests.worker.test_grpo import MAX_COMPLETION, SIZE, make_policy, make_rollouts, settings_of
from worker.heartbeat import Cancelled, Heartbeat
from worker.ranks import Ranks, check_devices, variables
from worker.rollouts.scheduler import PlayedRollout
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion
from worker.training.grpo import Trainer
from worker.training.packing import Way
from worker.training.sft import make_sft_trainer

CASES: dict[str, dict[str, Any]] = {
    "dr_grpo": {}, "grpo": {"kl_penalty_coef": 0.1}, "bnpo": {}, "dapo": {}, "sft": {},
    "paths": {"loss_type": "dr_grpo", "importance_sampling": "sequence_truncate"},
}  # fmt: skip
"""Loss types, sft, and a tree that only one rank has -> further fields of the run."""
GROUPS = 3
LABELS = [[-100] * 4 + [*range(44, 50 + 3 * row)] for row in range(5)]


class Step:
    """One step of GROUPS groups, or of an sft batch of five rows: the policy, and what was logged."""

    def __init__(self, model: Path, out: Path, ranks: Ranks, case: str) -> None:
        self.policy = make_policy(model)
        if ranks.rank:  # as cards of two kinds would round
            next(p for p in self.policy.parameters() if p.requires_grad).data[0] += 1e-9
        self.policy.train()
        common = {"output_dir": str(out), "callbacks": [], "way": Way.PACKED, "ranks": ranks}
        made = self._sft if case == "sft" else self._grpo
        trainer, arguments = made(AutoTokenizer.from_pretrained(model), case, common)
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.training_step(self.policy, *arguments)
        shown = ("entropy", "kl", "is_ratio/mean", "sampling_kl")
        metrics = trainer._metrics["train"].items()
        self.told = {name: sum(each) / len(each) for name, each in metrics if name in shown}
        self.told["loss"] = float(loss)

    def _sft(self, tokenizer: Any, case: str, common: Any) -> tuple[Any, Any]:
        rows = [[{"input_ids": [40, 41, 42, 43, *row[4:]], "labels": row}] for row in LABELS]
        spec = validate({"environment": "e", "algorithm": "sft", "batch_size": len(rows)})
        nobody: Any = None
        trainer = make_sft_trainer(self.policy, tokenizer, spec, {"train": rows}, nobody, max_length=256, **common)
        batch = trainer.data_collator(list(trainer.train_dataset))
        return trainer, (batch, (batch["labels"] != -100).sum())

    def _grpo(self, tokenizer: Any, case: str, common: Any) -> tuple[Any, Any]:
        rollouts = make_rollouts(tokenizer, 1, groups=GROUPS)
        if case == "paths":
            common["way"] = Way.ROWS
            tree = max((rollout.transcript for rollout in rollouts[-SIZE:] if rollout.transcript), key=len)
            start = len(tree.prompt_ids)
            tree.forks = [(start + 3, start + 1)]
        own = common["ranks"].mine([rollouts[at : at + SIZE] for at in range(0, GROUPS * SIZE, SIZE)])
        trainer = Trainer(
            self.policy, tokenizer, settings_of(**{"loss_type": case, "batch_size": GROUPS, **CASES[case]}),
            rollouts_of=lambda step: list(itertools.chain.from_iterable(own)), max_completion=MAX_COMPLETION, **common,
        )  # fmt: skip
        return trainer, ([], None)

    def trained(self, *, gradients: bool) -> dict[str, torch.Tensor]:
        parts = [each for each in self.policy.named_parameters() if each[1].requires_grad]
        return {name: (p.grad if gradients else p.data).clone() for name, p in parts}

    def numbers(self) -> list[Any]:
        """Gradients and weights; JSON keeps every bit of them."""
        both = [*self.trained(gradients=True).values(), *self.trained(gradients=False).values()]
        return [each.tolist() for each in both]


class Nccl(torch.distributed.ProcessGroupGloo):
    """In place of NCCL, which no processor has."""

    @staticmethod
    def Options() -> Any:
        options = torch.distributed.ProcessGroupGloo._Options()
        options._devices = [torch.distributed.ProcessGroupGloo.create_device(interface="lo")]
        return options


def ranks_of_cases(rank: int, out: Path) -> Iterator[tuple[str, Ranks]]:
    """Every case, and the ranks for it: the last ones sum over NCCL."""
    ranks = Ranks(rank, 2)
    ranks.connect(out)
    for case in CASES:
        if case == "dapo":
            torch.distributed.ProcessGroupNCCL = Nccl
            ranks.use_cards()
        yield case, ranks


def as_second_rank(model: Path, out: Path) -> None:
    """The other process of the test of gradients."""
    for case, ranks in ranks_of_cases(1, out):
        ranks.gather(Step(model, out / "second", ranks, case).numbers())


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in fp32, in which runs then compute."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_two_ranks_compute_the_gradients_of_one_and_keep_equal_adapters(exact_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", None, raising=False)
    code = f"""
from pathlib import Path
from tests.worker.test_ranks import as_second_rank
as_second_rank(Path({str(exact_model)!r}), Path({str(tmp_path)!r}))
"""
    with forked(code, tmp_path / "log"):
        for case, ranks in ranks_of_cases(0, tmp_path):
            alone = Step(exact_model, tmp_path / "alone", Ranks(), case)
            first = Step(exact_model, tmp_path / "first", ranks, case)
            assert first.told == pytest.approx(alone.told, rel=1e-5), case
            expected = alone.trained(gradients=True)
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            assert largest > 1e-4
            for name, gradient in first.trained(gradients=True).items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6 * largest)
            own, others = ranks.gather(first.numbers())
            assert own == others, case


FIELDS = {"group_size": 4, "max_tokens": 8, "steps": 4, "eval_before": True, "eval_after": True}
CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def adapter(run: RunFolder, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path(run.checkpoints.verify(step)["path"]) / "adapter_model.safetensors")


def curve(run: RunFolder, step: int) -> dict[str, Any]:
    """What of a step's metrics does not tell the time."""
    found = run.metrics(step)
    assert found
    timed = ("time/", "engine/", "system/")
    return {name: value for name, value in found["metrics"].items() if not name.startswith(timed)}


def said(run: RunFolder, step: int) -> list[Any]:
    return [(row["index"], row["messages"], row["advantage"]) for row in run.rollouts(step)]


def second_rank(attempt: Attempt) -> psutil.Process:
    children = psutil.Process(attempt.process.pid).children()
    (found,) = [child for child in children if "--rank" in child.cmdline()]
    return found


@pytest.mark.long
@pytest.mark.cpu
def test_a_run_of_two_ranks_is_that_of_one_though_a_rank_is_killed_and_one_goes_on(exact_model: Path, tmp_path: Path):
    alone = make_run(tmp_path / "alone", exact_model, **FIELDS)
    Attempt(alone, one_by_one=True, **CPU).ended()
    environment, flag = held(tmp_path / "held", saved=tmp_path / "run" / "checkpoints" / "2")
    asked = {**FIELDS, "environment": environment, "env_timeout_s": 600}
    run = make_run(tmp_path / "run", exact_model, gpus=2, **asked)
    with Attempt(run, one_by_one=True, **CPU) as attempt:
        attempt.wait_until(lambda: 2 in run.checkpoints.steps())
        lost = second_rank(attempt)
        assert listening_ports(attempt.process.pid) == listening_ports(lost.pid) == []
        environments = lost.children(recursive=True)
        lost.kill()
        assert attempt.wait() == 0, attempt.log_path.read_text()
    result = run.result()
    assert result and result["retryable"] and result["state"] == "failed"
    assert result["error"]["code"] == "worker_failed" and "SIGKILL" in result["error"]["what"]
    psutil.wait_procs(environments, timeout=WAIT_S)
    assert not any(each.is_running() for each in environments)

    flag.unlink()
    job = run.job()
    job["spec"]["gpus"] = 1
    run.create(job)
    final = Attempt(run, 2, one_by_one=True, **CPU).ended()
    assert final and final["state"] == "succeeded", final
    for step in (1, 2, 3, 4):
        assert said(run, step) == said(alone, step)
        assert curve(run, step) == pytest.approx(curve(alone, step), rel=1e-3, abs=1e-6)
        for name, weight in adapter(alone, step).items():
            torch.testing.assert_close(adapter(run, step)[name], weight, rtol=1e-3, atol=1e-5)
    first, second = run.evaluation(0), alone.evaluation(0)
    assert first and second
    assert [row["messages"] for row in first["rollouts"]] == [row["messages"] for row in second["rollouts"]]


def test_a_rollout_travels_as_json_and_arrives_whole() -> None:
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    first, second = make_rollouts(tokenizer, 1, groups=1)[:2]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    first.transcript = Transcript(template, [{"role": "user", "content": "what\u2028?"}], tools)
    first.transcript.add_answer(Completion([65, 66, 67], [-0.1, -1 / 3, -2.0], "length"))
    first.transcript.forks = [(40, 3)]
    first.metrics = {"part": 1 / 3}
    second.error = {"code": "environment_error", "what": "it fell"}
    for rollout in (first, second):
        arrived = PlayedRollout.unpacked(json.loads(json.dumps(rollout.packed())), template)
        assert arrived.record(3, 0.5) == rollout.record(3, 0.5)
        assert arrived.task == rollout.task and arrived.error == rollout.error
        assert arrived.transcript and rollout.transcript
        assert arrived.transcript.packed() == rollout.transcript.packed()
        assert arrived.transcript.template.tools == rollout.transcript.template.tools


def test_a_cancel_ends_the_wait_for_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.ranks, "close_listening", lambda keep: None)  # of both, in one process
    heartbeat = Heartbeat(RunWriter(make_run(tmp_path / "run", tmp_path), 1))
    ranks = [Ranks(0, 2, heartbeat), Ranks(1, 2)]
    threads = [threading.Thread(target=each.connect, args=(tmp_path,)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    threading.Timer(0.1, heartbeat.cancelled.set).start()
    with pytest.raises(Cancelled):
        ranks[0].gather("the other rank never comes")


def test_every_rank_gets_a_card_and_its_share_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    threads = {"OMP_NUM_THREADS": "4"}
    cards = [{"CUDA_VISIBLE_DEVICES": card, **threads} for card in ("5", "2")]
    assert variables(2) == cards and variables(1) == [{"CUDA_VISIBLE_DEVICES": "5"}]
    with pytest.raises(FlashError, match=r"sees 2 of the 3 cards.*lower gpus to 2"):
        variables(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables(3)] == ["", "", ""]


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (None, [None], []), (5, [], []), (5, ["0:6:0", "0:7:0"], ["nccl"]), (5, ["0:6:0", "0:5:0"], []),
        (5, [None], None),
    ],
)  # fmt: skip
def test_nccl_sums_where_every_rank_has_a_card_of_its_own(own, others, chosen, monkeypatch):
    at = SimpleNamespace(pci_domain_id=0, pci_bus_id=own, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: own is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: at)
    used: list[str] = []
    ranks: Any = Ranks(count=1 + len(others))
    ranks.gather = lambda value: [value, *others]
    ranks.use_cards = lambda: used.append("nccl")
    if chosen is None:
        with pytest.raises(FlashError, match="1 of the attempt's 2 processes can use no GPU"):
            check_devices(ranks)
    else:
        check_devices(ranks)
        assert used == chosen


def test_a_batch_that_is_smaller_than_the_number_of_gpus_is_refused() -> None:
    with pytest.raises(FlashError, match="gpus=5 cannot share a batch of 4"):
        validate({"environment": "e", "gpus": 5})
