"""A supervisor in a thread whose workers follow a script (tests/scripted_worker.py)."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from flash_mcp.state.store import open_store
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.supervisor.loop import Supervisor
from tests.places import TESTS
from tests.samples import supervised
from tests.waiting import wait_for

WORKER = (sys.executable, str(TESTS / "scripted_worker.py"))


@contextmanager
def scripted(home: Path) -> Generator[None]:
    with supervised():
        timeouts = Timeouts(poll_s=0.05, leave_s=0.5, retry_delay_s=0.01)
        launcher = LocalLauncher(home / "attempts", gpus=[])
        made = Supervisor(home, launcher=launcher, worker=WORKER, timeouts=timeouts)
        done = threading.Event()

        def work() -> None:
            while not done.wait(timeouts.poll_s):
                made.tick()

        thread = threading.Thread(target=work)
        thread.start()
        yield
        for run in open_store().active_runs():
            let_go(run.id)
        wait_for(lambda: not open_store().active_runs())
        done.set()
        thread.join()


def let_go(run_id: str) -> None:
    """Have a worker that holds go on."""
    folder = Path(open_store().run(run_id).folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go").touch()
