"""Many runs at once by the real supervisor: `scripts/scale simulation` in small."""

from pathlib import Path

import pytest

from tests.scale.simulation import Simulation


@pytest.mark.slow
def test_all_runs_are_submitted_and_seen_and_no_attempt_is_ended_while_many_wait(tmp_path: Path) -> None:
    runs, queued = 40, 500
    simulation = Simulation(tmp_path, runs, queued)
    simulation.engine.submit_s = 0.2
    seen = simulation.play(later=20, hold_s=12.0, timeout_s=240)
    assert not seen.ended
    # All but the test's own haste is the product's: each beats every 5 s and is silent after 120.
    assert 0 < seen.gap_s < 120
    queued_now = simulation.store.column("SELECT count(*) FROM runs WHERE state = 'queued'")
    assert queued_now == [queued]
    assert all(simulation.store.column("SELECT step FROM runs WHERE state = 'running'"))
    simulation.store.close()
