"""What tests of the supervisor leave behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from flash_mcp.supervisor.remote import TargetThread


@pytest.fixture(autouse=True)
def target_threads() -> Iterator[None]:
    """End the threads of targets with the test that started them. One that asks for a store that is gone draws its
    delays at random, which Hypothesis takes for a fault of the tests that come after it.
    """
    yield
    threads = [thread for thread in threading.enumerate() if isinstance(thread, TargetThread)]
    for thread in threads:
        thread.stopped.set()
    for thread in (*threads, *threading.enumerate()):
        if thread in threads or thread.name.startswith("crew"):
            thread.join(60)
