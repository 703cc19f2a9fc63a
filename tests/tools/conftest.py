from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from mcp import Client

from flash_mcp.server.mcp_server import server
from tests.samples import ECHO, push_echo, supervised
from tests.scripted_supervisor import scripted


@pytest.fixture(autouse=True)
def estimated_previews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are shown by an estimate: a process that renders them takes 5 s (tests/worker/test_preview.py)."""
    monkeypatch.setattr("flash_mcp.tools.shared.rows.models_dir", lambda: tmp_path / "no models")


@pytest.fixture
def no_supervisor(flash_home: Path) -> Iterator[None]:
    """Queued runs stay queued: this test is the supervisor."""
    with supervised():
        yield


@pytest.fixture
def supervisor(flash_home: Path) -> Iterator[None]:
    with scripted(flash_home):
        yield


@pytest.fixture
async def client(supervisor: None, tmp_path: Path) -> AsyncGenerator[Client]:
    """A client of a server with an environment whose arguments say how its runs end."""
    push_echo(tmp_path / "echo", ECHO)
    async with Client(server) as connected:
        yield connected
