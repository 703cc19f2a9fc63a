"""Training in environments of verifiers: the tiny model and the real engine. The tests need what
`scripts/hubs --only PACKAGE` installs."""

from pathlib import Path

import pytest

from tests import hubs
from tests.attempts import Attempt, make_run

QUICK = {"steps": 2, "batch_size": 1, "group_size": 4, "max_tokens": 4, "max_length": 1500}


@pytest.mark.parametrize(("hub", "name"), [("verifiers", "one agent")])
def test_an_environment_of_verifiers_is_trained_in(tiny_model: Path, tmp_path: Path, hub: str, name: str) -> None:
    folder = hubs.FOLDERS / hub
    if not hubs.is_installed(folder):
        pytest.skip(f"scripts/hubs --only {hub} installs what this test needs")
    fields = {**QUICK, "environment_args": {"name": name}}
    run = make_run(tmp_path / "run", tiny_model, environment=folder, **fields)
    Attempt(run, fresh=True, FLASH_HOME=str(hubs.HOME)).ended()
    for step in (1, 2):
        rows = list(run.rollouts(step))
        assert len(rows) == 4 and not any(row["error"] for row in rows), rows
        assert all(row["completion_tokens"] for row in rows)
