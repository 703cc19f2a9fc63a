"""A seeded handful of what `scripts/crash` does a hundred times."""

from __future__ import annotations

import pytest

from tests.crash import crash_runs

pytestmark = pytest.mark.slow


def test_runs_whose_processes_are_killed_and_stopped_end_as_undisturbed_ones_do() -> None:
    outcomes = crash_runs(7, seed=3, at_once=7)
    assert [outcome.defects for outcome in outcomes] == [[]] * 7
    assert sum(fault.struck for outcome in outcomes for fault in outcome.faults) >= 7
