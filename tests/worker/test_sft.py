import hashlib
import json
import random
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTTrainer

from environments.process.host import EnvironmentHost
from flash_mcp.judgement import health
from flash_mcp.protocol.base_models import with_tools
from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.schedules import is_measured, rate_factor
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.tools.training.plan import estimate_of
from flash_mcp.tools.training.probe import Probed
from tests.attempts import Attempt, make_run
from tests.places import CALCULATOR
from tests.tiny import CHATML, change_adapter, make_tokenizer
from worker.heartbeat import Heartbeat
from worker.model_files import ModelFiles
from worker.ranks import ALONE
from worker.rollouts.gold import IGNORED, dataset_rows
from worker.rollouts.transcript import ChatTemplate
from worker.train import _resume_point, _steps
from worker.training import packing
from worker.training.checkpoints import Reporter
from worker.training.policy import load_policy
from worker.training.sft import Tuner, gold_rows, make_sft_trainer

SPEC = resolve(RunSpec(environment="e", algorithm="sft", steps=1, batch_size=5)).spec


async def test_every_assistant_token_of_a_gold_conversation_is_learnt_and_no_other() -> None:
    template = ChatTemplate(make_tokenizer())
    decode = template.tokenizer.decode
    async with await EnvironmentHost.start(CALCULATOR) as host:
        rows = await gold_rows(host, template, "eval", 4000, max_error_share=0.0, advance=lambda: None)
        for index, (row,) in enumerate(rows):
            opening = await host.open("eval", index)
            await host.close(opening.episode)
            gold = await host.gold("eval", index)
            whole = template.tokenizer.apply_chat_template([*opening.messages, *gold], tokenize=False)
            assert decode(row["input_ids"]) + "\n" == whole
            learnt = [token for token in row["labels"] if token != IGNORED]
            said = [message["content"] for message in gold if message["role"] == "assistant"]
            assert decode(learnt) == "".join(f"{text}<|im_end|>" for text in said)
            assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
        first = await gold_rows(host, template, "eval", 4000, 3, max_error_share=0.0, advance=lambda: None)
    assert len(rows) == 200 and first == rows[:3]


@pytest.mark.parametrize(
    ("name", "digests"),
    [
        ("calculator", ["761629fef2da", "1095547d8aec"]),
        ("sort_words", ["c1f4e2a8d719", "8152e890bb01"]),
        ("tool_calculator", ["a91b58190cf3", "0fb05b8d357c"]),
        ("agent_calculator", ["bd9fabc890e7", "3e22bb4a4169"]),
        ("mcp_server", ["d2797eb0f555", "cc3ea8d45cfd"]),
    ],
)
async def test_the_rows_of_the_examples_stay_the_same_token_for_token(name: str, digests: list[str]) -> None:
    tokenizer = make_tokenizer()
    if name not in ("calculator", "sort_words"):
        tokenizer.chat_template = with_tools(CHATML)
    template = ChatTemplate(tokenizer)
    async with await EnvironmentHost.start(CALCULATOR.parent / name) as host:
        for split, digest in zip(("train", "eval"), digests, strict=True):
            rows = await gold_rows(host, template, split, 4000, 20, max_error_share=0.0, advance=lambda: None)
            ids = [[row["input_ids"], row["labels"]] for row in chain(*rows)]
            assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12] == digest


ANSWER = {"role": "assistant", "content": "a"}
CALLING = {**ANSWER, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ([{"role": "user", "content": "u"}, ANSWER], "begins with a user message"),
        ([CALLING, {"role": "tool", "content": "3"}, ANSWER], "tool_calls"),
        ([{"role": "assistant", "content": None}], "content is None"),
    ],
)
def test_gold_that_no_rollout_could_hold_is_refused_with_its_row(tmp_path: Path, gold: Any, reason: str) -> None:
    lines = [[ANSWER], gold]
    content = "".join(
        json.dumps({"messages": [{"role": "user", "content": "?"}, *line], "prompt_messages": 1}) + "\n"
        for line in lines
    )
    (tmp_path / "train.jsonl").write_text(content)
    files = {"train.jsonl": hashlib.sha256(content.encode()).hexdigest()}
    with pytest.raises(FlashError, match=rf"dataset_invalid.*train\.jsonl line 2: .*{reason}"):
        dataset_rows({"path": str(tmp_path), "files": files}, ChatTemplate(make_tokenizer()))


def test_two_answers_in_a_row_are_two_turns_as_in_a_rollout(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "?"}, ANSWER, {"role": "assistant", "content": "b"}]
    content = json.dumps({"messages": messages, "prompt_messages": 1})
    (tmp_path / "train.jsonl").write_text(content)
    template = ChatTemplate(make_tokenizer())
    files = {"train.jsonl": hashlib.sha256(content.encode()).hexdigest()}
    ((row,),) = dataset_rows({"path": str(tmp_path), "files": files}, template)["train"]
    whole = template.tokenizer.apply_chat_template(messages, tokenize=False)
    assert template.tokenizer.decode(row["input_ids"]) + "\n" == whole
    learnt = [token for token in row["labels"] if token != IGNORED]
    assert template.tokenizer.decode(learnt) == "a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize("pack_tokens", [packing.PACK_TOKENS, 64])
def test_the_packed_pass_gives_the_loss_and_the_gradients_of_trls_own(fp32_model, tmp_path, monkeypatch, pack_tokens):
    """Rows of one token to 60; some learn nothing at the end, one is cut within its answer."""
    monkeypatch.setattr(packing, "PACK_TOKENS", pack_tokens)
    rng = random.Random(0)
    rows = []
    for length in (60, 8, 33, 2, 47):
        ids = [rng.randrange(33, 126) for _ in range(length)]
        labels = [token if index and rng.random() < 0.6 else IGNORED for index, token in enumerate(ids)]
        rows.append({"input_ids": ids, "labels": [*labels[:-1], ids[-1]]})
    rows[1]["labels"][-1] = IGNORED
    apart = [[row] for row in rows]
    outcomes = []
    for kind in (Tuner, SFTTrainer):
        policy = change_adapter(load_policy(ModelFiles(fp32_model), rank=8, alpha=16, seed=0, dtype=torch.float32))
        events: list[str] = []
        trainer = make_sft_trainer(
            policy, AutoTokenizer.from_pretrained(fp32_model), SPEC,
            {"train": apart, "holdout": apart},
            SimpleNamespace(event=lambda kind, what, said=events: said.append(what)),
            max_length=58, output_dir=str(tmp_path), callbacks=[], way=packing.Way.PACKED,
        )  # fmt: skip
        assert len(events) == 1 and "1 of 5 rows are longer than max_length=58" in events[0]
        batch = next(iter(trainer.get_train_dataloader()))
        loss = kind.compute_loss(trainer, policy, dict(batch), num_items_in_batch=torch.tensor(70))
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        outcomes.append((loss.item(), kind.evaluate(trainer)["eval_loss"], gradients))
    (ours, our_held_out, our_gradients), (theirs, their_held_out, their_gradients) = outcomes
    assert ours == pytest.approx(theirs, rel=1e-5) and our_held_out == pytest.approx(their_held_out, rel=1e-5)
    assert (our_gradients - their_gradients).norm() < 1e-5 * their_gradients.norm()


def tune(
    folder: RunFolder,
    model: Path,
    scratch: Path,
    steps: int,
    schedule: str = "constant",
    *,
    warmup: float = 0.0,
    way: packing.Way = packing.Way.PACKED,
    dtype: torch.dtype = torch.float32,
    experts: bool = False,
) -> RunSpec:
    """The next attempt of a run of `steps` steps, from its newest good checkpoint."""
    rng = random.Random(0)
    texts = [[rng.randrange(33, 126) for _ in range(length)] for length in (9, 20, 5, 30, 12, 7)]
    rows = {"train": [[{"input_ids": ids, "labels": ids}] for ids in texts]}
    folder.create({})
    writer = RunWriter(folder, folder.newest_epoch() + 1)
    fields = {
        "algorithm": "sft", "batch_size": 2, "steps": steps, "save_every": 1, "learning_rate": 1e-2,
        "lr_schedule": schedule, "warmup": warmup,
    }  # fmt: skip
    spec = resolve(RunSpec(environment="e", **fields)).spec
    heartbeat = Heartbeat(writer)
    reporter = Reporter(writer, spec, heartbeat.cancelled)
    trainer = make_sft_trainer(
        load_policy(ModelFiles(model), rank=8, alpha=16, seed=0, dtype=dtype, experts=experts),
        AutoTokenizer.from_pretrained(model), spec, rows, writer, max_length=64,
        output_dir=str(scratch / "out"), callbacks=[reporter], way=way,
    )  # fmt: skip
    session: Any = SimpleNamespace(
        spec=spec, writer=writer, heartbeat=heartbeat, reporter=reporter, ranks=ALONE, try_regression=lambda *_: None,
        end_steps_ahead=lambda: None,
    )  # fmt: skip
    assert _steps(trainer, session, _resume_point(writer, scratch)) == steps
    return spec


@pytest.mark.parametrize(
    ("parts", "fields", "conversations", "held_out", "steps", "passes", "sample", "measured_at"),
    [
        (1, {"epochs": 2}, 1, 0, 2, 2, 0, [2]),
        (3, {"epochs": 2}, 180, 40, 46, 2, 16, [10, 20, 30, 40, 46]),
        (1, {"epochs": 0.5, "batch_size": 4}, 10, 9, 2, 0.8, 8, [2]),
        (3, {"steps": 12, "batch_size": 40}, 600, 354, 12, 0.8, 48, [12]),
        (1, {"steps": 200, "batch_size": 40}, 4000, 400, 200, 2, 40, list(range(10, 201, 10))),
        (3, {"steps": 15, "batch_size": 8}, 800, 400, 15, 0.15, 16, [10, 15]),
        (1, {"steps": 3, "batch_size": 8, "eval_every": 1}, 800, 400, 3, 0.03, 8, [1, 2, 3]),
    ],
)
def test_the_estimate_says_the_steps_that_run_and_measures_less_than_it_learns(
    parts: int, fields: dict[str, Any], conversations: int, held_out: int, steps: int, passes: float, sample: int,
    measured_at: list[int], fp32_model: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Also where a conversation is learnt in several rows."""
    spec = resolve(RunSpec(environment="e", algorithm="sft", eval_after=True, **fields)).spec
    said = estimate_of(spec, Probed({"train": conversations, "eval": held_out}, 1, [], 0), None)
    assert (said.steps, said.passes) == (steps, passes)
    assert said.held_out_examples == (sample * len(measured_at) or None)
    assert sample * len(measured_at) <= (said.examples or 0)
    row = {"input_ids": [40, 41], "labels": [40, 41]}
    rows = {"train": [[row] * parts] * conversations, "holdout": [[row] * parts] * held_out}
    nobody: Any = None
    trainer: Any = make_sft_trainer(
        load_policy(ModelFiles(fp32_model), rank=1, alpha=1, seed=0, dtype=torch.float32),
        AutoTokenizer.from_pretrained(fp32_model), spec, rows, nobody,
        max_length=64, output_dir=str(tmp_path), callbacks=[], way=packing.Way.PACKED,
    )  # fmt: skip
    seen: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)

    learnt: list[int] = []

    def step(model: Any, inputs: Any, count: Any = None) -> torch.Tensor:
        learnt.append(len(inputs["input_ids"]))
        return torch.zeros(())

    trainer.training_step = step
    trainer.add_callback(Watch())
    trainer.train()
    assert len(seen) == steps and sum(learnt) == parts * (said.examples or 0)
    assert len(trainer.eval_dataset or ()) == sample
    assert [at for at in seen if is_measured(spec, at, steps)] == measured_at


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_schedule_also_after_a_resume(fp32_model: Path, tmp_path: Path, schedule: str):
    run = RunFolder(tmp_path / "run")
    spec = tune(run, fp32_model, tmp_path, 5, schedule, warmup=0.4)
    assert [rate_factor(spec, step, 5) for step in (0, 1, 2)] == pytest.approx([1 / 3, 2 / 3, 1])
    falls = {"constant": [1, 1], "linear": [2 / 3, 1 / 3], "cosine": [0.75, 0.25]}[schedule]
    assert [rate_factor(spec, step, 5) for step in (3, 4)] == pytest.approx(falls)

    def rate_of(step: int) -> Any:
        metrics = run.metrics(step)
        return metrics and metrics["metrics"]["learning_rate"]

    rates = [rate_of(step) for step in (1, 2, 3, 4, 5)]
    expected = [1e-2 * rate_factor(spec, step, 5) for step in range(5)]
    assert rates == pytest.approx(expected)
    tune(run, fp32_model, tmp_path, 7, schedule, warmup=0.4)
    assert [rate_of(6), rate_of(7)] == pytest.approx([1e-2 * rate_factor(spec, step, 7) for step in (5, 6)])


@pytest.mark.parametrize("stop", [4, 5])
def test_fine_tuning_that_resumes_ends_where_it_would_have(fp32_model: Path, tmp_path: Path, stop: int) -> None:
    """Also where every step was made: five steps end in the midst of the second pass over the rows."""
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    tune(whole, fp32_model, tmp_path, 5)
    tune(cut, fp32_model, tmp_path, stop)
    tune(cut, fp32_model, tmp_path, 5)
    assert list(cut.metric_steps()) == cut.checkpoints.steps() == [1, 2, 3, 4, 5]
    last, expected = (
        run.checkpoints.manifest(5)["files"]["adapter_model.safetensors"]  # pyright: ignore[reportOptionalSubscript]
        for run in (cut, whole)
    )
    assert last == expected


def test_an_attempt_resumes_with_a_fresh_optimizer_if_the_newest_checkpoint_is_damaged(fp32_model: Path, tmp_path):
    run = RunFolder(tmp_path / "run")
    tune(run, fp32_model, tmp_path, 3)
    paths = [Path((run.checkpoints.manifest(step) or {})["path"]) for step in (1, 2, 3)]
    assert [(path / OPTIMIZER).is_file() for path in paths] == [False, False, True]
    (paths[2] / "adapter_model.safetensors").write_bytes(b"damaged")
    spec = tune(run, fp32_model, tmp_path, 4, "linear", warmup=0.5)
    rates = [(run.metrics(step) or {})["metrics"]["learning_rate"] for step in (3, 4)]
    assert rates == pytest.approx([1e-2 * rate_factor(spec, step, 4) for step in (2, 3)])
    said = [(run.event(name) or {})["message"] for name in run.event_names()]
    assert any("checkpoint 2, with a fresh optimizer" in message for message in said)
    assert run.checkpoints.newest_good() == 4
    assert (Path((run.checkpoints.manifest(4) or {})["path"]) / OPTIMIZER).is_file()


def test_a_fine_tuned_adapter_warms_a_grpo_run(tiny_model: Path, tmp_path: Path) -> None:
    calculator: dict[str, Any] = {"environment": CALCULATOR, "max_length": 1024, "eval_examples": 4}
    tuned = make_run(
        tmp_path / "sft", tiny_model, algorithm="sft", group_size=None, steps=None, epochs=0.048, save_every=3,
        eval_after=True, **calculator,
    )  # fmt: skip
    result = Attempt(tuned).ended()
    assert result and result["state"] == "succeeded", result
    assert (tuned.beat() or {})["steps"] == 6  # what the epochs come to
    losses = [tuned.metrics(step)["metrics"]["loss"] for step in range(1, 7)]  # pyright: ignore[reportOptionalSubscript]
    assert losses[-1] < losses[0] - 0.5
    held_out = [tuned.metrics(step)["metrics"].get("eval_loss") for step in (2, 3, 6)]  # pyright: ignore[reportOptionalSubscript]
    assert held_out[0] is None and held_out[2] < held_out[1]
    assert all(tuned.metrics(step)["metrics"]["entropy"] > 0 for step in range(1, 7))  # pyright: ignore[reportOptionalSubscript]
    assert tuned.checkpoints.steps() == [3, 6] and list(tuned.eval_steps()) == [6] and not tuned.rollout_steps()

    start = {"init_adapter": {"path": tuned.checkpoints.verify(6)["path"], "run_id": "sft", "step": 6, "digest": ""}}
    few: dict[str, Any] = {"steps": 1, "batch_size": 2, "group_size": 2, "max_tokens": 8}
    warmed = make_run(tmp_path / "grpo", tiny_model, job=start, **few, **calculator)
    Attempt(warmed).ended()
    assert warmed.checkpoints.steps() == [1]


@pytest.mark.parametrize(
    ("rate", "flags"),
    [pytest.param(0.5, ["destroyed_model"], marks=pytest.mark.long), (0.1, ["destroyed_model"]), (0.01, [])],
)
def test_a_learning_rate_that_destroys_the_model_is_flagged_and_no_other(tiny_model, tmp_path, rate, flags: list[str]):
    run = make_run(
        tmp_path / "sft", tiny_model, environment=CALCULATOR, algorithm="sft", steps=20, batch_size=8, group_size=None,
        learning_rate=rate, lr_schedule="constant", save_every=10, eval_after=False, max_length=1024,
    )  # fmt: skip
    Attempt(run).ended()
    steps = [{"step": step, **(run.metrics(step) or {})["metrics"]} for step in run.metric_steps()]
    found = health.flags(steps)
    assert [flag.name for flag in found] == flags, steps[-3:]
    assert health.outlook(steps, found).startswith("no: destroyed_model" if flags else "yes: loss"), found
    # Nobody is told of a good run that it is destroyed, at any time.
    for count in range(len(steps) if not flags else 0):
        assert health.flags(steps[:count]) == []


def test_memory_that_runs_out_once_halves_the_packs_of_fine_tuning(fp32_model: Path, tmp_path: Path, monkeypatch):
    """In the second step, whose loss stays what it is without that."""
    whole, halved = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "halved")
    tune(whole, fp32_model, tmp_path, 3)
    sizes: list[int] = []
    failing = {2}
    logps = packing.Pack.logps

    def short(pack: packing.Pack, *args: Any, **options: Any) -> Any:
        sizes.append(pack.tokens)
        if len(sizes) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return logps(pack, *args, **options)

    monkeypatch.setattr(packing.Pack, "logps", short)
    tune(halved, fp32_model, tmp_path, 3)
    assert len(sizes) > 4 and max(sizes[2:]) < sizes[1], "a pack of two rows became two of one"
    said = [(halved.event(name) or {})["message"] for name in halved.event_names()]
    assert any(f"memory ran out in a pack of {sizes[1]} tokens" in message for message in said)
    for step in (1, 2, 3):
        losses = [(run.metrics(step) or {})["metrics"]["loss"] for run in (whole, halved)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
