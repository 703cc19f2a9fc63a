"""Runs as a worker leaves them: written through RunWriter, read into the store by the supervisor's own reader."""

import json
import math
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flash_mcp.protocol.checkpoints import OPTIMIZER
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import EnvironmentVersion, Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import resolve, validate
from flash_mcp.state import queue
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.attempt import Reader
from flash_mcp.supervisor.process import take_lock
from flash_mcp.supervisor.secrets import Vault

ROLLOUTS = 8
HEALTHY = {
    "groups/uniform_share": 0.1, "rollouts/truncated_share": 0.0, "rollouts/error_share": 0.0,
    "tokens/completion_mean": 20.0, "loss": 0.01, "grad_norm": 0.5, "entropy": 1.0, "time/step_s": 2.0,
    "engine/tokens_per_s": 500.0,
}  # fmt: skip
"""Metrics of a step that are no reason to worry."""
EVAL_EXAMPLES = 100

ENVIRONMENT = """
from environments.base import EnvironmentSingleTurn, RewardResult, TaskExample


class Echo(EnvironmentSingleTurn):
    def __init__(self, fail=False):
        if fail:
            raise RuntimeError("asked to fail")
        self.dataset = [TaskExample(record={}, input=f"say {n}", id=f"train-{n}", output=str(n)) for n in range(40)]
        self.eval_dataset = [TaskExample(record={}, input=f"go {n}", id=f"eval-{n}", output=str(n)) for n in range(60)]

    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]

    def score_response(self, example, response_text):
        return RewardResult(score=float(response_text.strip() == example.output))


def load_environment(**kwargs):
    return Echo(**kwargs)
"""
ECHO = ENVIRONMENT.replace("self, fail=False", "self, fail=False, **script")
"""Its arguments may say how its runs end (tests/scripted_worker.py)."""


@contextmanager
def supervised() -> Generator[None, None, None]:
    """Be the supervisor, as far as others can see: none is started, and queued runs stay queued."""
    lock = take_lock(home())
    assert lock is not None
    vault = Vault(home())
    with lock, closing(vault):
        vault.open()
        yield


def push_echo(folder: Path, code: str = ENVIRONMENT, name: str = "echo") -> EnvironmentVersion:
    """A published environment with 40 train and 60 eval rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.py").write_text(code)
    return open_store().add_environment(name=name, digest="0123456789abcdef", path=str(folder), size_bytes=len(code))


def queued_run(folder: Path, **fields: Any) -> Run:
    """A run in state queued."""
    store, environment = open_store(), push_echo(folder)
    resolved = resolve(validate({"environment": "echo", "steps": 20, **fields}))
    return queue.enqueue(store, resolved, environment)[0]


def started_run(folder: Path, **fields: Any) -> tuple[Run, RunWriter]:
    """A run in state running, and its worker's side of the folder."""
    store = open_store()
    with store.transaction():  # a supervisor of the test's would claim it first
        run = queued_run(folder, **fields)
        writer = start(run.id)
    return store.run(run.id), writer


def learning_run(folder: Path, steps: Iterable[int], **metrics: float) -> tuple[Run, RunWriter]:
    """A run in state running that reported these steps."""
    run, writer = started_run(folder)
    learn(writer, steps, **metrics)
    read_in(open_store(), run.id)
    return run, writer


def rolled_out(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> Run:
    """A run in state running that reported these rollouts of step 1."""
    run, writer = started_run(folder, **fields)
    writer.rollouts(1, rows)
    read_in(open_store(), run.id)
    return run


def start(run_id: str) -> RunWriter:
    """Start the oldest queued run, which has to be this one, and return its worker's side of the folder."""
    store = open_store()
    run = queue.claim(store)
    assert run is not None and run.id == run_id
    run_folder = RunFolder(run.folder)
    run_folder.create(queue.job(run))
    writer = RunWriter(run_folder, run.attempt)
    writer.beat(0, "model")
    queue.mark_running(store, run_id, run.attempt)
    return writer


def reported(store: Store, run: Run, scratch: Path) -> RunWriter:
    """Start the queued run, and report something of every kind as its worker."""
    writer = start(run.id)
    writer.event("phase", "hello")
    evaluate(writer, 0, 3)
    learn(writer, range(1, 4))
    save_adapter(writer, 3, scratch / run.id)
    read_in(store, run.id)
    return writer


def end(writer: RunWriter, run_id: str, step: int, state: Any = "succeeded", error: FlashError | None = None) -> Run:
    """The run as it is once its worker and the supervisor have ended it."""
    store = open_store()
    writer.commit_result(state, step, error)
    read_in(store, run_id)
    queue.finish(store, run_id, 1, state, step=step, error=error.to_dict() if error else None)
    return store.run(run_id)


def read_in(store: Store, run_id: str) -> None:
    """What the supervisor does with a run's folder."""
    Reader(store, run_id, RunFolder(store.run(run_id).folder)).read(now=True)


def learn(writer: RunWriter, steps: Iterable[int], of: int = 20, **metrics: float) -> None:
    """Steps of a run that learns: its reward goes from about 0.1 to about 0.9."""
    for step in steps:
        reward = 0.1 + 0.8 * step / of + 0.02 * math.sin(step)
        rollouts = [sample_rollout(step, index, reward) for index in range(ROLLOUTS)]
        writer.rollouts(step, rollouts)
        values = {"reward/mean": reward, "reward/std": 0.2, "success/rate": reward, **HEALTHY, **metrics}
        writer.metrics(step, values)
        writer.beat(step, "train")


def evaluate(writer: RunWriter, step: int, solved: int, of: int = EVAL_EXAMPLES, kinds: int = 0, **more: float) -> None:
    """An evaluation in which the first `solved` of `of` examples succeed. `more` is for its summary; neighbours are
    of one of so many kinds, without them each example is of its own."""
    rollouts = [sample_rollout(step, index, float(index < solved)) for index in range(of)]
    for index, rollout in enumerate(rollouts):
        rollout["kind"] = f"{index * kinds // of}" if kinds else None
    share = solved / of
    summary = {"n": of, "success": share, "reward_mean": share, "error_share": 0.0, **more}
    writer.evaluation(step, summary, rollouts)


def sample_rollout(step: int, index: int, reward: float, text: str = "The answer is 84.") -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Use <calc> to calculate."},
        {"role": "user", "content": f"What is {step} * {index}?"},
        {"role": "assistant", "content": text},
    ]
    return {
        "step": step, "index": index, "group": index // 4, "task_id": f"train-{index // 4}", "messages": messages,
        "reward": reward + index / 1000, "success": reward > 0.5, "advantage": 0.25, "metrics": {"format": 1.0},
        "reason": None, "error": None, "turns": 1, "prompt_tokens": 30, "completion_tokens": 8, "env_tokens": 0,
        "truncated": False, "finish": "done", "seconds": 0.5,
    }  # fmt: skip


def save_adapter(
    writer: RunWriter, step: int, scratch: Path, *, rank: int = 32, alpha: int = 64, optimizer: bool = False
) -> None:
    """A checkpoint with what the control plane looks at: the adapter's configuration, and weights and an optimizer's
    state of no worth."""
    folder = scratch / f"adapter-{step}"
    folder.mkdir(parents=True)
    config = {"r": rank, "lora_alpha": alpha, "base_model_name_or_path": "smollm2-135m-instruct"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    if optimizer:
        (folder / OPTIMIZER).write_bytes(b"moments")
    writer.commit_checkpoint(step, folder, {"reward/mean": 0.5, "success/rate": 0.4})


def finished_run(folder: Path, *, solved: int = 90) -> Run:
    """A run of 20 steps that went from 20 to `solved` percent on held-out examples, with two checkpoints."""
    run, writer = started_run(folder / "environment")
    evaluate(writer, 0, 20)
    learn(writer, range(1, 21))
    for step in (10, 20):
        save_adapter(writer, step, folder)
    evaluate(writer, 20, solved)
    return end(writer, run.id, 20)
