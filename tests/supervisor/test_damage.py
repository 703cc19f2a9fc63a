"""Damaged files of a run folder: they count as absent, and no run waits for ever because of one."""

import os
import signal
from pathlib import Path

import pytest

from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import queue
from tests.damage import DAMAGES
from tests.grids import thinned
from tests.supervisor.test_loop import Bench, bench
from tests.waiting import wait_for
from tests.watch import is_running

pytestmark = pytest.mark.slow

__all__ = ["bench"]
FILES = {
    "beat.json": "beat.json",
    "job.json": "job.json",
    "metrics": "metrics/1.1.json",
    "rollouts": "rollouts/1.1.jsonl",
    "events": "events/0001-000000.json",
    "manifest": "checkpoints/2/1-2/MANIFEST.json",
}


def warnings_of(bench: Bench, run: Run) -> list[str]:
    return [event.message for event in bench.store.events(run.id, 99, ["warning"])]


@pytest.mark.parametrize(("file", "damage"), thinned([*FILES], [*DAMAGES]))
def test_a_damaged_file_counts_as_absent_and_the_next_attempt_ends_the_run(bench: Bench, file: str, damage: str):
    name = FILES[file]
    run = bench.train({"steps": 4, "1": {"at": 3, "do": "hold"}})
    bench.supervisor.tick()
    wait_for(lambda: bench.step(run) == 3)
    bench.kill(run)
    DAMAGES[damage](Path(run.folder, name))
    Path(run.folder, "go").touch()
    ended = bench.finish(run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 4)
    steps = [row.step for row in bench.store.metrics(run.id)]
    assert steps == ([2, 3, 4] if name == FILES["metrics"] else [1, 2, 3, 4])
    saved = [row.step for row in bench.store.checkpoints(run.id)]
    assert saved == [1, 2, 3, 4]
    is_written_again = name in ("job.json", FILES["manifest"])
    told = any(name in warning for warning in warnings_of(bench, run))
    assert told or is_written_again or (name, damage) == (FILES["rollouts"], "empty")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_written_anew_by_another_attempt(bench: Bench, damage: str) -> None:
    run = bench.train({"steps": 2})
    bench.supervisor.tick()
    wait_for(lambda: RunFolder(run.folder).result())
    wait_for(lambda: not is_running(bench.pid(run)))
    DAMAGES[damage](Path(run.folder, "result.1.json"))
    ended = bench.finish(run)
    assert (ended.state, ended.attempt, ended.step) == ("succeeded", 2, 2)
    assert any("result.1.json is damaged" in warning for warning in warnings_of(bench, run))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cancelled_run_with_a_damaged_beat_ends(bench: Bench, damage: str) -> None:
    run = bench.train({"1": {"at": 2, "do": "hold"}})
    bench.until(lambda: bench.step(run) == 2)
    os.kill(bench.worker(run), signal.SIGSTOP)
    DAMAGES[damage](Path(run.folder, "beat.json"))
    queue.request_cancel(bench.store, run.id)
    ended = bench.finish(run)
    assert (ended.state, ended.attempt) == ("cancelled", 1)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_run_whose_folder_cannot_be_made_fails_with_the_evidence_and_lets_others_pass(
    bench: Bench, is_cancelled: bool
) -> None:
    supervisor = bench.new_supervisor(trouble_s=0.2)
    run, other = bench.train(max_attempts=2), bench.train({"steps": 1})
    Path(run.folder).parent.mkdir()
    Path(run.folder).write_text("a file in its place")
    supervisor.tick()
    if is_cancelled:
        queue.request_cancel(bench.store, run.id)
    ended = bench.finish(run, supervisor=supervisor)
    if is_cancelled:
        assert (ended.state, ended.attempt, ended.error) == ("cancelled", 1, None)
    else:
        assert (ended.state, ended.attempt) == ("failed", 2)
        assert ended.error and "trouble with attempt 2 that did not pass" in ended.error["what"]
        assert run.folder in ended.error["what"]
    assert bench.finish(other, supervisor=supervisor).state == "succeeded"


def test_trouble_that_does_not_pass_replaces_the_attempt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = bench.new_supervisor(trouble_s=0.2)
    run = bench.train({"steps": 3, "1": {"at": 2, "do": "hold"}})
    bench.until(lambda: bench.step(run) == 2, supervisor=supervisor)
    first = supervisor._attempts[run.id]
    monkeypatch.setattr(first.folder, "beat", lambda: 1 / 0)
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt) == ("succeeded", 2)
    lost = bench.store.events(run.id, 99, ["attempt"])[1]
    assert lost.name == "0001-lost" and "ZeroDivisionError" in lost.message


def test_a_full_disk_is_no_trouble_of_an_attempt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = bench.new_supervisor(trouble_s=0.0)
    run = bench.train({"steps": 1})
    full = OSError(28, "No space left on device")

    def no_space(_: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(supervisor.launcher, "submit", no_space)
        for _ in range(5):
            supervisor.tick()
    ended = bench.finish(run, supervisor=supervisor)
    assert (ended.state, ended.attempt) == ("succeeded", 1)
