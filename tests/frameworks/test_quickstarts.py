"""Short programs after the quickstarts of agent frameworks, in the sandbox. They need what
`scripts/frameworks` installs."""

from __future__ import annotations

import pytest

from environments.process import requirements
from tests import hubs
from tests.frameworks import scripted

pytestmark = pytest.mark.linux


@pytest.mark.slow
@pytest.mark.parametrize("framework", scripted.FRAMEWORKS)
async def test_quickstarts_work(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not scripted.is_installed(framework):
        pytest.skip("scripts/frameworks installs what this test needs")
    monkeypatch.setattr(requirements, "interpreters_dir", lambda: hubs.HOME / "interpreters")
    outcomes = await scripted.play_all(framework)
    assert outcomes and all(outcome.calls for outcome in outcomes)
    assert [(outcome.name, outcome.failure) for outcome in outcomes if outcome.failure] == []


def test_there_are_quickstarts_of_every_framework() -> None:
    names = [scripted.names(framework) for framework in scripted.FRAMEWORKS]
    assert all(names)
    assert sum(map(len, names)) >= 60


def test_the_scripted_model_fills_in_a_schema() -> None:
    schema = {
        "$defs": {"Word": {"enum": ["a", "b"]}},
        "properties": {
            "word": {"$ref": "#/$defs/Word"},
            "more": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        },
    }
    assert scripted.sample(schema) == {"word": "a", "more": [12]}
