from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from mcp import Client

from flash_mcp.server.mcp_server import server
from tests.samples import ECHO, push_echo, supervised
from tests.scripted_supervisor import scripted


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
