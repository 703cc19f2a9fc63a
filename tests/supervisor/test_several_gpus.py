"""Runs of two processes from `train`'s row to their end, with a real supervisor and real workers."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.store import Store
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.launch.local import LocalLauncher, ProcessRecord
from flash_mcp.supervisor.loop import Supervisor
from tests.places import CALCULATOR, VOWELS
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.cpu]
TIMEOUT_S = 600.0
COMMON = {"gpus": 2, "max_length": 256, "lora_rank": 4, "lora_alpha": 8, "learning_rate": 0.01}
SFT = {"steps": 6, "batch_size": 5, "max_length": 512, "eval_examples": 8, "eval_after": True}


class Place:
    """A state directory whose supervisor is ticked by hand."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        self.model = model
        self.store = Store(home)
        launcher = LocalLauncher(home / "attempts", gpus=[])
        timeouts = Timeouts(poll_s=0.05, retry_delay_s=0.01)
        self.supervisor = Supervisor(home, launcher=launcher, timeouts=timeouts)

    def train(self, environment: Path, **fields: object) -> Run:
        version = self.store.add_environment(
            name=environment.name, digest="abcdef123456", path=str(environment), size_bytes=1
        )
        named = {"environment": environment.name, "model": str(self.model)}
        spec = RunSpec.model_validate({**COMMON, **named, **fields})
        return queue.enqueue(self.store, resolve(spec), version)[0]

    def now(self, run: Run) -> Run:
        return self.store.run(run.id)

    def until(self, run: Run, condition: Callable[[], object]) -> Run:
        tick = self.supervisor.tick
        wait_for(condition, TIMEOUT_S, tick=tick, evidence=lambda: (vars(self.now(run)), self.store.log(run.id)))
        return self.now(run)

    def finish(self, run: Run) -> Run:
        return self.until(run, lambda: self.now(run).ended)

    def second_process(self, run: Run) -> psutil.Process:
        record = ProcessRecord.read(self.home / "attempts" / f"{run.id}-1")
        assert record
        children = psutil.Process(record.pid).children()
        (found,) = [child for child in children if "--rank" in child.cmdline()]
        return found


@pytest.fixture
def place(flash_home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Place(flash_home, tiny_model)


@pytest.mark.long
@pytest.mark.usefixtures("unforked")  # the second process is a child of the first
def test_a_run_of_two_processes_goes_on_after_one_is_killed(place: Place) -> None:
    run = place.train(VOWELS, steps=3, batch_size=2, group_size=4, max_tokens=8, save_every=1)
    folder = RunFolder(place.now(run).folder)
    place.until(run, lambda: folder.checkpoints.steps())
    place.second_process(run).kill()
    ended = place.finish(run)
    assert (ended.state, ended.attempt) == ("succeeded", 2), (ended.error, place.store.log(run.id))
    assert list(folder.metric_steps()) == [1, 2, 3]
    assert all(len(list(folder.rollouts(step))) == 8 for step in (1, 2, 3))
    told = [event.message for event in place.store.events(run.id)]
    assert any("SIGKILL" in each for each in told), told
    assert any("going on from checkpoint" in each for each in told), told


def test_sft_of_two_processes_learns_from_start_to_end(place: Place) -> None:
    run = place.train(CALCULATOR, algorithm="sft", **SFT)
    ended = place.finish(run)
    assert ended.state == "succeeded", (ended.error, place.store.log(run.id))
    folder = RunFolder(ended.folder)
    found = [folder.metrics(step) for step in (1, 6)]
    first, last = [each["metrics"] for each in found if each]
    assert 0 < last["loss"] < first["loss"]
    assert last["eval_loss"] > 0 and list(folder.checkpoints.steps()) == [6]
