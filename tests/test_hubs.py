"""The command that plays environments of other packages."""

from pathlib import Path

import pytest

from tests import hub_checks, hubs
from tests.folders import environment_folder

SHARED = """
class Sample(Echo):
    drawn = []
    def step_episode(self, example, messages, assistant_response):
        self.drawn.append(assistant_response)
        said = f"{len(self.drawn)} drawn"
        return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": said}])
"""
BROKEN = """
class Sample(Echo):
    def start_episode(self, example):
        raise AssertionError("The number of players has to be 2, received 1")
"""


@pytest.mark.slow
async def test_what_runs_is_told_from_what_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "FOLDERS", tmp_path)
    environment_folder(tmp_path / "sound", "", returns="Echo()")
    environment_folder(tmp_path / "shared", SHARED)
    environment_folder(tmp_path / "broken", BROKEN)
    found = []
    for name in ("sound", "shared", "broken"):
        hub = hubs.Hub(name, "games", [name], "1.0")
        hub.tried = [await hubs.try_one(hub, name, tmp_path)]
        found.append(hub)
    (joined,) = hubs.joined(found)
    sound, shared, broken = joined.tried
    assert (sound.refused, sound.unequal, sound.turns) == ("", "", 24) and shared.unequal.startswith("episode 0: ")
    assert broken.refused.startswith("[environment_error] start_episode raised AssertionError")
    row = hubs.table([joined]).splitlines()[-1]
    assert row == "| games | 1.0 | 3 | 2 | 1 needs more players | 1 of 2 |"


def test_rows_of_packages_that_were_not_played_stay(tmp_path: Path) -> None:
    document = tmp_path / "environments.md"
    document.write_text("before\n<!-- hubs -->\n<!-- /hubs -->\nafter\n")
    for package, version in (("a", "1"), ("b", "1"), ("a", "2")):
        hubs.write(hubs.table([hubs.Hub(package, package, [], version)]), document, "hubs")
    lines = document.read_text().splitlines()
    assert [line.split("|")[1:3] for line in lines[4:6]] == [[" a ", " 2 "], [" b ", " 1 "]]
    assert (lines[:2], lines[6:]) == (["before", "<!-- hubs -->"], ["<!-- /hubs -->", "after"])


@pytest.mark.slow
def test_certificates_are_rows_that_say_why_an_answer_is_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "FOLDERS", tmp_path)
    environment_folder(tmp_path / "games", BROKEN)
    monkeypatch.setattr(hub_checks, "sample", lambda: [(hubs.Hub("games", "games"), "chess")])
    head, _, row = hub_checks.certify([], tmp_path).splitlines()
    assert head.startswith("| package | environment | learnable | not hackable | secure ")
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:2] == ["games", "chess"] and "no" in cells[2:7] and "number of players has to be 2" in cells[-1]
