import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_mcp.state.store import Store
from flash_mcp.supervisor.loop import TargetThread
from flash_mcp.supervisor.reconciler import Crew


@pytest.fixture(autouse=True)
def target_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the threads of targets with the test that started them. One that asks for a store that is gone draws its
    delays at random, which Hypothesis takes for a fault of the tests that come after it."""
    crews: list[Crew] = []
    begin = Crew.__init__

    def record(crew: Crew, store: Store, threads: int) -> None:
        begin(crew, store, threads)
        crews.append(crew)

    monkeypatch.setattr(Crew, "__init__", record)
    yield
    threads = [thread for thread in threading.enumerate() if isinstance(thread, TargetThread)]
    for thread in threads:
        thread.stopped.set()
    for thread in threads:
        thread.join(60)
    for crew in crews:
        crew.close()
        crew.wait(60)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of state directories. It is empty on the nodes."""
    return tmp_path_factory.mktemp("hidden")
