from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.samples import supervised
from tests.teams import Team, team_server


@pytest.fixture
def team(flash_home: Path) -> Iterator[Team]:
    """A server for several owners, whose queued runs stay queued."""
    with supervised(), team_server() as started:
        yield started
