"""The gate's suite (tests/gate_suite.txt): bad environments fail the check that is named, good ones pass."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.checks.gate import check
from environments.checks.report import Report
from tests.folders import environment_folder
from tests.gate_suite import BAD, GOOD, MISSED, ROWS

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


OF_PROCESSES = re.compile(r"\b(eval|exec|import|os|random|sys|time|self\.\w+ [+]?=|global)\b")
"""What needs a process of its own: foreign code that is run, and state that others must not see."""


async def judged(folder: Path, source: str, request: pytest.FixtureRequest) -> Report:
    """The others are checked in this process, but for the long tests."""
    if not (OF_PROCESSES.search(source) or request.config.getoption("long")):
        request.getfixturevalue("in_this_process")
    environment = environment_folder(folder, ROWS + textwrap.dedent(source))
    # However busy the machine is, every check ends.
    return await check(environment, deadline_s=600)


def bad_cases() -> Iterator[Any]:
    """The first of each check, and the others for the long tests."""
    for probe, sources in BAD.items():
        for place, name in enumerate(sources):
            yield pytest.param(probe, name, marks=pytest.mark.long if place else ())


@pytest.mark.parametrize(("probe", "name"), [*bad_cases()])
async def test_a_bad_environment_is_refused_by_the_check_for_it(tmp_path: Path, probe: str, name: str, request) -> None:
    report = await judged(tmp_path, BAD[probe][name], request)
    failed = {each.name: each for each in report.probes if each.passed is False}
    assert probe in failed, [(each.name, each.passed, each.evidence) for each in report.probes]
    assert failed[probe].fix


def good_cases() -> Iterator[Any]:
    """Every fourth one, and the others for the long tests."""
    for place, name in enumerate(GOOD):
        yield pytest.param(name, marks=pytest.mark.long if place % 4 else ())


@pytest.mark.parametrize("name", [*good_cases()])
async def test_a_good_environment_passes(tmp_path: Path, name: str, request) -> None:
    report = await judged(tmp_path, GOOD[name], request)
    assert report.passed, [each for each in report.probes if each.passed is False]


@pytest.mark.parametrize("name", MISSED)
async def test_what_the_docs_call_missed_passes(tmp_path: Path, name: str, request) -> None:
    assert (await judged(tmp_path, MISSED[name], request)).passed


def test_the_docs_state_how_much_of_the_suite_the_gate_finds() -> None:
    refused = sum(map(len, BAD.values()))
    assert refused + len(MISSED) >= 40 and len(GOOD) >= 20 and len(MISSED) <= 2
    text = " ".join(DOCS.read_text().split())
    claim = f"refuses {refused} of {refused + len(MISSED)} bad environments"
    assert f"{claim} and passes {len(GOOD)} of {len(GOOD)} good ones" in text and all(name in text for name in MISSED)
