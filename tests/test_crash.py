"""A seeded handful of what `scripts/crash` does a hundred times."""

import pytest

from tests.crash import crash_runs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("first", "runs"), [(1, 1), pytest.param(2, 6, marks=pytest.mark.long)])
def test_runs_whose_processes_are_killed_and_stopped_end_as_undisturbed_ones_do(first: int, runs: int) -> None:
    """The supervisor always, the other kinds with the long tests."""
    outcomes = crash_runs(runs, seed=3, at_once=runs, first=first)
    assert [outcome.defects for outcome in outcomes] == [[]] * runs
    assert sum(fault.struck for outcome in outcomes for fault in outcome.faults) >= runs
