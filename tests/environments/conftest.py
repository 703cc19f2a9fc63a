import pytest

from tests import near_environments


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's environments run in its own process, for what no process decides: it starts ten times as soon."""
    monkeypatch.setattr(near_environments, "is_sample", lambda folder: True)
