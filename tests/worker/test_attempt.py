"""Attempts of real runs: the tiny model, the real engine, the real trainer, real processes and signals."""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tensorboardX.proto.event_pb2 import Event

from environments.process.host import EnvironmentHost
from flash_mcp.protocol.errors import FlashError, first_of
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.launch.base import Launch
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.tools.environments import env_push
from tests.attempts import Attempt, held, make_run, messages_of, vowels
from tests.folders import environment_folder, generated_files
from tests.places import CALCULATOR
from tests.tiny import make_tokenizer
from tests.waiting import wait_for
from tests.watch import is_running, listening_ports
from worker.heartbeat import Cancelled, Heartbeat
from worker.model import Model
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.task_choice import Source, examples_of
from worker.rollouts.transcript import ChatTemplate
from worker.session import OPEN_AT_ONCE
from worker.survey import preflight
from worker.train import rollouts_at_once
from worker.training.sft import gold_rows
from worker.training_session import TrainingSession, last_begun


def finished(run: Any, state: str = "succeeded") -> dict[str, Any]:
    result = run.result()
    assert result is not None and result["state"] == state, (result, run.log_tail(run.newest_epoch()))
    return result


@pytest.fixture(scope="module")
def whole_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of five steps that nothing disturbed."""
    fields: dict[str, Any] = {"eval_before": True, "eval_after": True, "report_to": ["mlflow", "tensorboard"]}
    run = make_run(tmp_path_factory.mktemp("whole") / "run", tiny_model, **fields)
    Attempt(run).ended()
    return run


LONG = partial(pytest.param, marks=pytest.mark.long)
SHORT: dict[str, Any] = {"group_size": 4, "max_tokens": 8, "eval_before": True, "eval_after": True}


@pytest.fixture(scope="module", params=["tiny_model", pytest.param("fp32_model", marks=pytest.mark.long)])
def exact_model(request: pytest.FixtureRequest) -> Path:
    """One in the precision that is measured to be faster: bf16 where the CPU is made for it. And one in fp32."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def exact_run(exact_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Five steps of SHORT that nothing disturbed, one conversation at a time."""
    run = make_run(tmp_path_factory.mktemp("exact") / "run", exact_model, **SHORT)
    Attempt(run, one_by_one=True).ended()
    return run


@pytest.mark.long  # two processes import torch and vLLM anew
def test_a_run_from_a_worker_that_waited_is_the_same_run(tiny_model: Path, tmp_path: Path, unforked: None) -> None:
    launcher = LocalLauncher(tmp_path / "attempts", gpus=[])
    told: list[Any] = []
    waiting = 0
    for name in ("fresh", "warm"):
        fields = {"algorithm": "sft", "steps": 2, "max_length": 1024, "group_size": None, "max_tokens": None}
        run = make_run(tmp_path / name, tiny_model, environment=CALCULATOR, **fields)
        command = [sys.executable, "-P", "-m", "worker.main", run.url, "--attempt", "1"]
        log = Path(run.path("log.1"))
        handle = launcher.submit(Launch(name, 1, command, dict(os.environ), log))
        wait_for(lambda it=handle: launcher.poll([it])[it.key].state == "gone")
        metrics = finished(run) and [cast(Any, run.metrics(step))["metrics"] for step in (1, 2)]
        same = [{key: value for key, value in each.items() if not re.match("time/|system/", key)} for each in metrics]
        told.append((same, re.findall(r"INFO worker: (step \d+: \w+)", log.read_text())))
        if name == "fresh":
            assert launcher.rest()
            wait_for(lambda: launcher.capacity)
            waiting = cast(Any, launcher)._warm._process.pid
        else:
            assert int(handle.id) == waiting
    assert told[0] == told[1] and told[0][1]


def test_an_evaluation_within_a_run_has_a_bounded_number_of_open_episodes(tmp_path: Path) -> None:
    of = 2 * OPEN_AT_ONCE + 3
    run = make_run(tmp_path / "run", tmp_path, steps=1, eval_examples=of)
    bounds: list[int | None] = []

    async def collecting(tasks: list[RolloutTask], limits: Any, on_done: Any, *, open_at_once: int | None = None):
        bounds.append(open_at_once)
        assert heartbeat.shown == f"eval 0/{of}"
        for task in reversed(tasks):
            heartbeat.advance()
            on_done(PlayedRollout(task, f"v{task.index}"))

    heartbeat, host = Heartbeat(RunWriter(run, 1)), SimpleNamespace(splits={"eval": 5000})
    nothing: Any = None
    model = Model(nothing, nothing, torch.float32, 256, None)
    spec = RunSpec(**run.job()["spec"])
    session: Any = TrainingSession(spec, heartbeat.writer, heartbeat, model, {"": host}, nothing, 4)
    session.sync, session.collecting, session.wait = lambda step: 0.0, collecting, asyncio.run
    session.constant_level = lambda *_: {}  # it would ask the environment
    session.evaluate(0)
    assert bounds == [OPEN_AT_ONCE] and re.fullmatch(rf"eval {of}/{of}, 0 s left", heartbeat.shown)
    heartbeat.enter("train")
    assert heartbeat.shown == "train" and [row["index"] for row in run.evaluation(0)["rollouts"]] == list(range(of))


def test_a_run_reports_every_step_and_leaves_an_adapter(whole_run: Any) -> None:
    assert finished(whole_run)["step"] == 5
    assert list(whole_run.metric_steps()) == list(whole_run.rollout_steps()) == [1, 2, 3, 4, 5]
    assert list(whole_run.eval_steps()) == [0, 5]
    assert whole_run.checkpoints.steps() == [1, 2, 3, 4, 5] and whole_run.checkpoints.newest_good() == 5
    rows = list(whole_run.rollouts(5))
    assert [row["index"] for row in rows] == list(range(32)) and {row["group"] for row in rows} == {0, 1, 2, 3}
    assert all(len(row["messages"]) == 4 and row["turns"] == 2 and not row["error"] for row in rows)
    metrics = [whole_run.metrics(step)["metrics"] for step in (1, 5)]
    assert metrics[1]["reward/mean"] > metrics[0]["reward/mean"]
    assert metrics[1]["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 32)
    for name in ("loss", "grad_norm", "entropy", "is_ratio/mean", "time/step_s", "time/sync_s", "success/rate"):
        assert all(step[name] is not None for step in metrics), name


def test_a_tracker_gets_every_metric_and_one_that_is_not_installed_is_an_event(whole_run: Any) -> None:
    (path,) = Path(whole_run.root, "tensorboard").iterdir()
    sent = scalars(path)
    for step in range(1, 6):
        metrics = whole_run.metrics(step)["metrics"]
        assert sent[step, "train/reward/mean"] == pytest.approx(metrics["reward/mean"])
        assert sent[step, "train/loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert sent[5, "eval/success"] == pytest.approx(whole_run.evaluation(5)["summary"]["success"])
    warnings = messages_of(whole_run, "warning")
    assert [text.partition(":")[0] for text in warnings] == ["mlflow gets no more metrics"]


def scalars(path: Path) -> dict[tuple[int, str], float]:
    """{(step, tag): value} of a file that tensorboard reads: records of length, check sums and an Event."""
    found: dict[tuple[int, str], float] = {}
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event: Any = cast(Any, Event)()
        event.ParseFromString(data[12 : 12 + length])
        data = data[12 + length + 4 :]
        for value in event.summary.value:
            found[event.step, value.tag] = value.simple_value
    return found


def test_the_engine_samples_from_the_policy_that_is_trained(whole_run: Any) -> None:
    for step in range(1, 6):
        metrics = whole_run.metrics(step)["metrics"]
        assert metrics["sampling_logp_difference/mean"] < 0.02 and abs(metrics["is_ratio/mean"] - 1) < 0.02


def test_the_final_adapter_loads_in_peft_and_was_trained(whole_run: Any, tiny_model: Path) -> None:
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    folder = Path(whole_run.checkpoints.verify(5)["path"])
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder)
    weights = load_file(folder / "adapter_model.safetensors")
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)


def trained(run: RunFolder) -> str:
    """The digest of the last adapter's weights."""
    return run.checkpoints.manifest(5)["files"]["adapter_model.safetensors"]


@pytest.mark.cpu
def test_an_attempt_killed_in_mid_run_is_followed_by_one_that_ends_where_an_undisturbed_run_ends(
    exact_run: RunFolder, exact_model: Path, tmp_path: Path
) -> None:
    # It looks at 12 tasks, evaluates 5, makes three steps (all of the examples were seen once) and
    # half of the fourth.
    environment, flag = held(tmp_path / "held", after=12 + 5 + 3 * 16 + 8)
    run = make_run(tmp_path / "run", exact_model, environment=environment, env_timeout_s=600, **SHORT)
    with Attempt(run, one_by_one=True) as first:
        first.wait_until(lambda: 3 in run.checkpoints.steps())
        children = psutil.Process(first.process.pid).children(recursive=True)
        first.process.send_signal(signal.SIGKILL)
    assert children
    wait_for(lambda: not any(is_running(child.pid) for child in children))
    assert run.result() is None
    flag.unlink()
    Attempt(run, 2, one_by_one=True).ended()
    assert finished(run)["epoch"] == 2
    assert "measured on" in messages_of(run, "handshake")[-1], "the first attempt's is kept"
    assert list(run.metric_steps()) == [1, 2, 3, 4, 5] and run.metrics(1)["epoch"] == 1 and run.metrics(5)["epoch"] == 2
    for step in range(1, 6):
        assert run.metrics(step)["metrics"]["reward/mean"] == exact_run.metrics(step)["metrics"]["reward/mean"]
    assert trained(run) == trained(exact_run)


@pytest.mark.cpu
@pytest.mark.long
def test_a_cancelled_run_that_is_resumed_to_more_steps_ends_where_an_undisturbed_run_ends(
    exact_run: RunFolder, exact_model: Path, tmp_path: Path
) -> None:
    environment, flag = held(tmp_path / "held", after=12 + 5 + 3 * 16 + 8)
    asked = {**SHORT, "environment": environment, "env_timeout_s": 600}
    run = make_run(tmp_path / "run", exact_model, steps=4, **asked)
    with Attempt(run, one_by_one=True) as first:
        first.wait_until(lambda: 3 in run.checkpoints.steps())
        run.request_cancel()
        assert first.wait() == 0, first.log_path.read_text()
    assert finished(run, "cancelled")["step"] == 3
    flag.unlink()
    before = run.reopen()
    assert run.result() is None and run.checkpoints.has_optimizer(3)
    make_run(tmp_path / "run", exact_model, **asked)
    Attempt(run, before + 1, one_by_one=True).ended()
    assert finished(run)["step"] == 5

    def curve(of: RunFolder) -> list[Any]:
        metrics = [of.metrics(step)["metrics"] for step in range(1, 6)]
        return [(each["reward/mean"], each["loss"]) for each in metrics]

    assert (curve(run), trained(run)) == (curve(exact_run), trained(exact_run))


RANKED = """
def same_prompt(self, example):
    return [{"role": "user", "content": "Write."}]
def score_group(self, example, episodes):
    counts = [sum(each in "aeiou" for each in episode.response_text) for episode in episodes]
    return [RewardResult(sorted(counts).index(count) / len(counts)) for count in counts]
reasoning_gym.ReasoningGym.build_prompt_messages = same_prompt
reasoning_gym.ReasoningGym.score_group = score_group
"""


def test_a_scorer_of_groups_trains_and_a_second_attempt_has_the_generated_tasks_of_the_first(
    tiny_model: Path, tmp_path: Path, flash_home: Path
) -> None:
    """The tasks differ in each run of this test, their prompts do not: it trains the same each time."""
    pushed = asyncio.run(env_push("numbers", files=generated_files(4, RANKED)))
    environment = Path(open_store().environment(pushed.environment).path)
    run = make_run(tmp_path / "run", tiny_model, environment=environment, steps=2)
    Attempt(run, one_by_one=True).ended()
    second_number = run.reopen() + 1
    make_run(tmp_path / "run", tiny_model, environment=environment, steps=4)
    Attempt(run, second_number, one_by_one=True).ended()
    assert finished(run)["step"] == 4
    rows = {step: list(run.rollouts(step)) for step in run.rollout_steps()}
    tasks = {step: {row["task_id"] for row in rows[step]} for step in rows}
    assert list(rows) == [1, 2, 3, 4] and len(tasks[1]) == 4
    assert all(tasks[step] == tasks[1] for step in rows), "the environment makes others each time"

    def vowels(row: Any) -> int:
        return sum(each in "aeiou" for each in row["messages"][-1]["content"])

    for step in rows:
        for number in range(4):
            group = [row for row in rows[step] if row["group"] == number]
            counts = sorted(map(vowels, group))
            assert [row["reward"] for row in group] == [counts.index(vowels(r)) / 8 for r in group]
    assert all(run.metrics(step)["metrics"]["grad_norm"] > 0 for step in rows)
    assert sum(map(vowels, rows[4])) > 2 * sum(map(vowels, rows[1])), "it learned what ranks high"


@pytest.mark.cpu
def test_an_attempt_that_finds_every_step_made_makes_no_other(exact_run: RunFolder, tmp_path: Path) -> None:
    """The one before was lost while it evaluated what it had trained."""
    run = RunFolder(shutil.copytree(exact_run.root, tmp_path / "run"))
    for path in ("result.1.json", "evals/5.1.json"):
        Path(run.path(*path.split("/"))).unlink()
    Attempt(run, 2, one_by_one=True).ended()
    assert finished(run)["step"] == 5 and list(run.metric_steps()) == [1, 2, 3, 4, 5]
    assert run.checkpoints.steps() == exact_run.checkpoints.steps()
    manifest, before = run.checkpoints.manifest(5), exact_run.checkpoints.manifest(5)
    assert manifest and before and manifest["files"] == before["files"]
    said, before = ([row["messages"] for row in r.evaluation(5)["rollouts"]] for r in (run, exact_run))
    assert said == before


@given(st.integers(1, 40), st.integers(1, 9), st.integers(-5, 5))
def test_steps_go_through_all_examples_again_and_again(total: int, count: int, seed: int) -> None:
    steps = [examples_of(step, count, {"": Source(total)}, seed) for step in range(1, 3 * total + 1)]
    assert not any(example.environment for example in itertools.chain(*steps))
    drawn = [example.number for example in itertools.chain(*steps)]
    passes = [drawn[at : at + total] for at in range(0, len(drawn), total)]
    assert all(sorted(one) == list(range(total)) for one in passes) and {len(step) for step in steps} == {count}
    assert total < 8 or passes[0] != passes[1]


@pytest.mark.parametrize(("max_staleness", "ranks", "expected"), [(0, 1, 24), (1, 1, 48), (4, 1, 120), (1, 2, 32)])
def test_the_engine_has_room_for_the_rollouts_of_steps_that_begin_ahead(max_staleness: int, ranks: int, expected: int):
    spec = resolve(RunSpec(environment="e", batch_size=3, group_size=8, max_staleness=max_staleness)).spec
    assert rollouts_at_once(spec, ranks) == expected


@given(st.integers(1, 60), st.integers(0, 4), st.integers(1, 12), st.integers(0, 12))
def test_no_step_begins_ahead_of_a_save_or_an_evaluation(step: int, ahead: int, save: int, evaluate: int) -> None:
    spec = RunSpec(environment="e", steps=60, max_staleness=ahead, save_every=save, eval_every=evaluate)
    last = last_begun(spec, step)
    assert step <= last <= min(step + ahead, 60)
    drains = [number for number in range(step, last) if not number % save or (evaluate and not number % evaluate)]
    assert not drains
    assert last == step + ahead or last == 60 or not last % save or not last % evaluate


def test_conversations_go_on_in_the_next_step_and_a_killed_run_trains_every_task_once_a_pass(tiny_model, tmp_path):
    """Steps 3 and 4 begin while the ones before are made; the checkpoint of step 3 has none ahead."""
    run = make_run(tmp_path / "run", tiny_model, steps=6, save_every=3, max_staleness=2, learning_rate=0.001)
    with Attempt(run) as first:
        first.wait_until(lambda: 4 in run.metric_steps() or 5 in run.rollout_steps())
    assert run.checkpoints.newest_good() == 3
    Attempt(run, 2).ended()
    assert finished(run)["step"] == 6
    order = {step: [row["task_id"] for row in run.rollouts(step)][::8] for step in range(1, 7)}
    passes = [order[1] + order[2] + order[3], order[4] + order[5] + order[6]]
    assert all(len(set(tasks)) == 12 for tasks in passes), order
    metrics = {step: run.metrics(step)["metrics"] for step in range(1, 7)}
    ages = {step: metrics[step]["staleness/max"] for step in metrics}
    assert ages[1] == 0 and ages[4] == 0, "a save leaves nothing under way"
    assert max(ages.values()) >= 1 and all(age <= min(2, (step - 1) % 3) for step, age in ages.items()), ages
    for step in metrics.values():
        assert 0 <= step["staleness/mean"] <= step["staleness/max"]
        assert 0.3 < step["is_ratio/effective_share"] <= 1.0001 and step["is_ratio/clipped_share"] < 0.2


@pytest.mark.long
def test_a_stopped_attempt_that_wakes_after_its_successor_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    def files() -> dict[Path, bytes]:
        paths = (path for path in Path(run.root).rglob("*") if path.is_file() and "log" not in path.name)
        return {path: path.read_bytes() for path in paths if not path.name.startswith(".")}  # a beat half written

    environment, flag = held(tmp_path / "held", after=12 + 32)
    run = make_run(tmp_path / "run", tiny_model, environment=environment, env_timeout_s=600)
    with Attempt(run) as zombie:
        # Past a whole checkpoint, so that it is not stopped between two writes that belong
        # together.
        zombie.wait_until(lambda: any((run.event(n) or {})["kind"] == "checkpoint" for n in run.event_names()))
        zombie.process.send_signal(signal.SIGSTOP)
        flag.unlink()
        Attempt(run, 2).ended()
        before = files()
        zombie.process.send_signal(signal.SIGCONT)
        assert zombie.wait() == 3
    assert files() == before


def test_a_cancel_in_mid_rollout_saves_what_was_trained_and_ends_as_cancelled(tiny_model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model, steps=1000, save_every=1000)
    with Attempt(run) as attempt:
        attempt.wait_until(lambda: 2 in run.metric_steps())
        assert listening_ports(attempt.process.pid) == [], "nobody can reach it"
        run.request_cancel()
        assert attempt.wait() == 0, attempt.log_path.read_text()
    step = finished(run, "cancelled")["step"]
    assert step >= 2 and run.checkpoints.newest_good() == step


def test_a_cancel_between_two_steps_counts_the_step_that_was_made(tmp_path: Path) -> None:
    heartbeat = Heartbeat(RunWriter(make_run(tmp_path / "run", tmp_path), 1))
    heartbeat.step = 5
    heartbeat.cancelled.set()
    with pytest.raises(Cancelled):
        heartbeat.enter("train", 6)
    assert heartbeat.step == 6


def test_a_warm_start_begins_with_the_other_runs_adapter(whole_run: Any, tiny_model: Path, tmp_path: Path) -> None:
    start = {"path": whole_run.checkpoints.verify(5)["path"], "run_id": "run", "step": 5, "digest": ""}
    fields: dict[str, Any] = {"steps": 1, "kl_penalty_coef": 0.1, "loss_type": "grpo"}
    run = make_run(tmp_path / "run", tiny_model, job={"init_adapter": start}, **fields)
    Attempt(run).ended()
    first, cold = (r.metrics(1)["metrics"] for r in (run, whole_run))
    assert first["reward/mean"] > cold["reward/mean"] and first["kl"] == pytest.approx(0, abs=1e-3)
    group = [row for row in run.rollouts(1) if row["group"] == 0]
    spread = statistics.stdev(row["reward"] for row in group)
    told = statistics.stdev(row["advantage"] for row in group)
    assert told == pytest.approx(spread / (spread + 1e-4), abs=1e-4), "what is told is what is trained"


@pytest.mark.parametrize(
    ("fields", "code", "evidence"),
    [
        ({"environment_args": {"question": "x" * 400}}, "prompt_too_long", "max_length=256"),
        LONG({"environment_args": {"train": 0}}, "dataset_invalid", "empty"),
        LONG({"environment_args": {"nonsense": 1}}, "environment_invalid", "nonsense"),
        LONG({"max_length": 5000}, "invalid_argument", "context=4096"),
        ({"model": "no-such-model"}, "unknown_model", "no-such-model"),
    ],
)
def test_a_run_that_cannot_start_ends_with_a_coded_error(tiny_model, tmp_path, fields, code, evidence) -> None:
    run = make_run(tmp_path / "run", Path(fields.pop("model", tiny_model)), **fields)
    Attempt(run).ended()
    error = finished(run, "failed")["error"]
    values = str(error["values"]).replace("': ", "=").replace("'", "")
    assert error["code"] == code and evidence in json.dumps(error) + values
    assert not run.metric_steps() and not run.checkpoints.steps()


BOOM = "raise KeyError('boom')"
KILLED = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.mark.parametrize(
    ("act", "wrote", "retryable"),
    [(BOOM, "boom", False), (KILLED, "the environment's process ended: killed by SIGKILL", True)],
)
def test_an_environment_that_mostly_fails_ends_the_run_and_one_that_is_killed_the_attempt(
    tiny_model: Path, tmp_path: Path, act: str, wrote: str, retryable: bool
) -> None:
    folder = vowels(tmp_path / "failing", "        share =", f"        {act}\n        share =")
    run = make_run(tmp_path / "run", tiny_model, environment=folder)
    Attempt(run).ended()
    result = finished(run, "failed")
    error = result["error"]
    assert (error["code"], result["retryable"]) == ("environment_error", retryable)
    assert "32 of 32 rollouts" in error["what"] and wrote in error["wrote"]
    assert all(row["error"] and row["reward"] == 0 for row in run.rollouts(1))


SOMETIMES = """
import time
class Sometimes(Vowels):
    def start_episode(self, example):
        time.sleep({seconds})
        if int(example.id[1:]) % {every} == 0:
            raise ConnectionError("the simulator is busy")
        return super().start_episode(example)
    def sft_completion(self, example):
        return [{{"role": "assistant", "content": "a"}}]
def load_environment(train=20, held_out=5, question="Write"):
    return Sometimes(train, held_out, question)
"""


def sometimes(folder: Path, *, every: int, seconds: float = 0.0) -> Path:
    """An environment that fails to open one task of `every`, after `seconds`."""
    return vowels(folder, more=SOMETIMES.format(every=every, seconds=seconds))


async def test_a_few_tasks_that_cannot_be_opened_do_not_end_a_run_before_it_begins(tmp_path: Path) -> None:
    template, looks = ChatTemplate(make_tokenizer()), []
    async with await EnvironmentHost.start(sometimes(tmp_path / "e", every=10)) as host:
        watched = {"max_error_share": 0.1, "advance": lambda: looks.append(1)}
        await preflight(host, template, 256, 20, **watched)
        assert len(looks) == 20, "each look is progress"
        assert len(await gold_rows(host, template, "train", 400, **watched)) == 18
        with pytest.raises(FlashError, match=r"2 of 11 train tasks.*number 0: ") as caught:
            await preflight(host, template, 256, 11, **watched)
        assert caught.value.code == "environment_error" and "the simulator is busy" in caught.value.wrote
        with pytest.raises(FlashError, match="1 of 1 train tasks"):
            await preflight(host, template, 256, 1, max_error_share=1.0, advance=lambda: None)


async def test_the_tools_of_a_task_are_part_of_its_prompt(tmp_path: Path) -> None:
    function = {"name": "look", "description": "word " * 50, "parameters": {"type": "object", "properties": {}}}
    source = f"""
class Sample(Addition):
    def episode_tools(self, example):
        return [{{"type": "function", "function": {function!r}}}]
"""
    template = ChatTemplate(make_tokenizer())
    async with await EnvironmentHost.start(environment_folder(tmp_path / "e", source)) as host:
        with pytest.raises(ExceptionGroup) as caught:
            await preflight(host, template, 300, 1, max_error_share=0.0, advance=lambda: None)
    assert "[prompt_too_long " in str(first_of(caught.value))


def test_a_cancel_is_heard_while_tasks_are_looked_at(tiny_model: Path, tmp_path: Path) -> None:
    slow = sometimes(tmp_path / "slow", every=1000, seconds=0.5)
    run = make_run(tmp_path / "run", tiny_model, environment=slow, environment_args={"train": 1000}, env_concurrency=1)
    with Attempt(run) as attempt:
        attempt.wait_until(lambda: (run.beat() or {}).get("progress", 0) > 2)
        run.request_cancel()
        assert attempt.wait() == 0, attempt.log_path.read_text()
    assert finished(run, "cancelled")["step"] == 0


def test_a_student_gets_nearer_to_its_teacher_also_across_a_kill(whole_run: Any, tiny_model: Path, tmp_path: Path):
    taught = {"teacher": {"path": whole_run.checkpoints.verify(5)["path"], "run_id": "run", "step": 5, "digest": ""}}
    run = make_run(
        tmp_path / "run", tiny_model, job=taught, algorithm="distill", teacher="run@5", steps=10, batch_size=12,
        group_size=1, lora_rank=4, lora_alpha=8, save_every=2, eval_after=True,
    )  # fmt: skip
    with Attempt(run) as first:
        first.wait_until(lambda: 4 in run.checkpoints.steps())
    Attempt(run, 2).ended()
    assert finished(run)["step"] == 10 and run.metrics(10)["epoch"] == 2
    metrics = [run.metrics(step)["metrics"] for step in run.metric_steps()]
    apart = [step["teacher_kl"] for step in metrics]
    assert len(apart) == 10 and apart[-1] < 0.5 * apart[0] and min(apart) > -0.05, apart
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"], "what the teacher learned to write"
    assert all(row["advantage"] is None for row in run.rollouts(10))
    adapter = Path(run.checkpoints.verify(10)["path"])
    assert not [path for path in adapter.iterdir() if path.is_dir()], "the teacher is not saved"
    assert not any("teacher" in name for name in load_file(adapter / "adapter_model.safetensors"))


def test_a_teacher_with_another_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(other)
    taught = {"teacher": {"model": "other", "path": str(other)}}
    run = make_run(tmp_path / "run", tiny_model, job=taught, algorithm="distill", teacher="other", group_size=1)
    Attempt(run).ended()
    error = finished(run, "failed")["error"]
    assert error["code"] == "invalid_argument" and error["values"]["teacher"] == "other"
    assert "tokenizer" in error["what"]
