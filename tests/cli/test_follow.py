import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash_mcp.cli import follow, main
from flash_mcp.protocol.run_files import Beat
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.run_view import report_on
from tests.places import ROOT
from tests.samples import (
    evaluate,
    finished_run,
    learn,
    learning_run,
    push_echo,
    queued_run,
    read_in,
    started_run,
    supervised,
)
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

FLASH = [sys.executable, "-m", "flash_mcp.cli"]


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 3), ("cancelled", 4)])
def test_wait_ends_with_the_runs_own_exit_code(state: str, code: int, tmp_path: Path, capsys):
    with supervised():
        run, _ = learning_run(tmp_path, [1])
        queue.finish(open_store(), run.id, run.attempt, state)
        assert main.main(["wait", run.id, "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["run"]["state"] == state and captured.err == ""


def test_follow_of_seeds_follows_each_and_ends_with_the_worst_exit_code(tmp_path: Path, capsys):
    push_echo(tmp_path)
    seeds = ["train", "--environment", "echo", "--seeds", "[1, 2]", "--idempotency-key", "seeds"]
    with supervised():
        assert main.main(seeds) == 0
        for state in ("succeeded", "failed"):
            run = queue.claim(open_store())
            queue.finish(open_store(), run.id, run.attempt, state)
        capsys.readouterr()
        assert main.main([*seeds, "--follow"]) == 3
    captured = capsys.readouterr()
    assert [line.partition(":")[0] for line in captured.err.splitlines() if "seed" in line] == ["seed 1", "seed 2"]
    assert "succeeded" in captured.out and "failed" in captured.out


def test_logs_print_what_comes_after_what_was_printed_until_the_run_has_ended(tmp_path: Path, capsys, monkeypatch):
    run, writer = started_run(tmp_path)
    printed = [f"step {number}: {'loss' * 100}\n" for number in range(9)]
    tails = [printed[:5], printed[2:8], printed[5:]]  # as a node stores them: the end alone

    def next_tail(_: float) -> None:
        writer.folder.put_log(run.attempt, "".join(tails.pop(0)).encode())
        if not tails:
            queue.finish(open_store(), run.id, run.attempt, "succeeded")

    next_tail(0)
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=next_tail))
    assert main.main(["logs", run.id, "--follow"]) == 0
    assert capsys.readouterr().out == "".join(printed)
    waits = queued_run(tmp_path)
    assert main.main(["logs", waits.id]) == 0
    says = f"{waits.id}, which is queued, has no log: see why with `flash-mcp status {waits.id}`\n"
    assert capsys.readouterr() == ("", says)


def test_ctrl_c_while_a_deployment_starts_says_that_it_goes_on(tmp_path: Path):
    with supervised():
        run, store = finished_run(tmp_path), open_store()
        command = [*FLASH, "deploy", run.id]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as waiting:
            wait_for(store.deployments)
            waiting.send_signal(signal.SIGINT)
            assert "goes on" in waiting.communicate(timeout=WAIT_S)[1] and waiting.returncode == 130
        assert store.deployments()[0].state == "starting"


def test_wait_gives_up_after_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with supervised():
        assert main.main(["wait", queued_run(tmp_path).id, "--timeout-s", "0.3"]) == 5
    assert "queued, 0 of 20 steps" in capsys.readouterr().out


def test_wait_returns_when_the_run_ends(tmp_path: Path):
    with supervised():
        run, _ = started_run(tmp_path)
        with subprocess.Popen([*FLASH, "wait", run.id], cwd=ROOT, stdout=subprocess.PIPE, text=True) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(2)
            queue.finish(open_store(), run.id, run.attempt, "succeeded")
            assert waiting.wait(WAIT_S) == 0


def test_a_fine_tuning_run_is_followed_by_its_losses_and_its_held_out_success(tmp_path: Path, html: Any):
    with supervised():
        run, writer = started_run(tmp_path, algorithm="sft")
        writer.metrics(5, {"loss": 0.5, "eval_loss": 0.75})
        evaluate(writer, 5, 40)
        read_in(open_store(), run.id)
        beat: Beat = {"epoch": 1, "step": 5, "phase": "eval 40/200, 90 s left"}
        queue.record_beat(open_store(), run.id, 1, beat, progressed=True)
        view = report_on(open_store(), run.id).view.model_dump(mode="json")
        line = follow.progress_line(view)
        for part in ("loss 0.5", "held-out loss 0.75", "held-out success 40 %", "eval 40/200, 90 s left"):
            assert part in line
        assert "\u2581" not in follow.progress_line(view, has_bars=False)
        assert "\u2581" in line
        assert "Success: held out" in html(open_store(), run.id)


def test_errors_are_json_where_results_are(capsys: pytest.CaptureFixture[str]):
    assert main.main(["wait", "run-none", "--json"]) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "unknown_run" and error["fix"]


def test_a_terminal_shows_the_curve_and_ctrl_c_only_detaches(tmp_path: Path):
    with supervised():
        run, writer = learning_run(tmp_path, range(1, 6))
        ours, theirs = pty.openpty()
        command = [*FLASH, "status", run.id, "--follow"]
        with subprocess.Popen(command, cwd=ROOT, stderr=theirs, stdout=subprocess.DEVNULL) as process:
            os.close(theirs)
            assert b"reward" in _read_until(ours, b"step 5/20")
            learn(writer, [6])
            read_in(open_store(), run.id)
            assert b"F\x1b[J" in _read_until(ours, b"step 6/20")
            process.send_signal(signal.SIGINT)
            rest = _read_until(ours, b"flash-mcp cancel")
            assert process.wait(WAIT_S) == 130
        os.close(ours)
        assert f"flash-mcp status {run.id} --follow".encode() in rest
        assert open_store().run(run.id).state == "running"


def _read_until(terminal: int, wanted: bytes) -> bytes:
    found, deadline = b"", time.monotonic() + WAIT_S
    while wanted not in found:
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 0.1)[0]:
            found += os.read(terminal, 65536)
    return found


def test_ctrl_c_in_the_moment_in_which_a_loop_starts_is_ctrl_c():
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(KeyboardInterrupt):
        follow.run(cancelled)
