"""A look at an exam by real processes: the tiny model, the real queue, a detached supervisor, and SIGKILL."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flash_mcp.exam import exams, looks
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import process
from tests.calls import call, refused
from tests.crash import processes
from tests.exam.test_exams import PASSPHRASE
from tests.places import VOWELS
from tests.samples import end, started_run
from tests.supervisor.test_ensure import end_supervisors
from tests.tiny import make_tiny_adapter
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

MARK = "Sesquipedalian"
SOURCE = (VOWELS / "environment.py").read_text().replace("held_out=5", "held_out=40").replace('"Write"', f'"{MARK}"')
STEP = "    def step_episode(self, example, messages, assistant_response):\n"
LOUD = """        import time, sys
        print(example.input)
        print(example.input, file=sys.stderr)
        time.sleep(0.15 * int(example.id[1:]))
"""


@pytest.fixture
def base(flash_home: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "vowels"
    folder.mkdir()
    (folder / "environment.py").write_text(SOURCE.replace(STEP, STEP + LOUD))
    exams.create(flash_home, "vowels", folder, looks=2, passphrase=PASSPHRASE)
    yield flash_home
    end_supervisors(flash_home)


def places_of(base: Path, word: str) -> list[str]:
    """Every file below the state directory and the temporary folder that holds the word."""
    found: list[str] = []
    folders = [base, *Path(tempfile.gettempdir()).glob("flash-*")]
    # Others end while this looks, and `os.walk` passes over what is gone.
    for folder, _, names in (walked for each in folders for walked in os.walk(each)):
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                if path.is_file() and word.encode() in path.read_bytes():
                    found.append(str(path))
    return found


def files_of(run_id: str, pattern: str) -> list[str]:
    return [path.read_text() for path in Path(open_store().run(run_id).folder).glob(pattern)]


def shown_of(process: psutil.Process) -> str:
    """What any process of the account may read of another: its arguments and variables."""
    with suppress(psutil.Error):
        return f"{process.cmdline()} {process.environ()}"
    return ""


async def test_a_look_survives_its_killed_worker_and_leaves_totals_alone(base: Path, tiny_model: Path, tmp_path: Path):
    store = open_store()
    trained, writer = started_run(tmp_path / "echo", model=str(tiny_model))
    writer.commit_checkpoint(3, make_tiny_adapter(tmp_path / "adapter", tiny_model, favourite="A"), {})
    end(writer, trained.id, 3)
    asked = {"environment": "exam:vowels", "model": f"{trained.id}@3", "max_tokens": 16, "max_length": 256}
    body = await call("evaluate", **asked, wait_s=0)
    run_id = body["run_id"]
    with process.supervised(every_s=0.5):  # as a server does
        locked = await call("status", run_id=run_id)
        assert "exam_locked" in str(locked) and "exam unlock" in str(locked), locked
        exams.unlock(base, "vowels", PASSPHRASE)
        wait_for(lambda: files_of(run_id, "evals/*/0001-*"))
        workers = processes(base)["worker"]
        assert places_of(base, MARK), "the plain files are there while it runs"
        key = exams.find_exam(base, "vowels").key(PASSPHRASE)
        for kind, running in processes(base).items():
            for one in running:
                seen = shown_of(one)
                assert MARK not in seen and (kind == "worker" or key.hex() not in seen), (kind, seen)
        for one in workers:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        wait_for(lambda: store.run(run_id).attempt == 2 or store.run(run_id).ended)
        wait_for(lambda: store.run(run_id).ended is not None)
    assert store.run(run_id).state == "succeeded", store.run(run_id).error
    body = await call("evaluate", **asked)
    found = body["exam"]
    assert body["run_id"] == run_id and not body["created"], "a repeated call spends no look"
    assert found["look"] == "1 of 2" and found["tasks"] == 20 and found["success"] == 1
    assert found["verdict"] == "better" and found["base"] < 0.6 and 0.5 < found["low"] < 1 == found["high"]
    assert set(body) <= {"run_id", "state", "created", "environment", "of", "split", "tasks", "attempts", "done",
                         "values", "exam", "next"}  # fmt: skip
    wait_for(lambda: not places_of(base, MARK))
    assert MARK in str(looks.transcripts(store.run(run_id), key)), "for the operator to read"
    queue.request_cancel(store, (await call("evaluate", **asked, again=True, wait_s=0))["run_id"])
    assert (await refused("evaluate", environment="vowels")).code == "unknown_environment"
