import struct
from pathlib import Path

from flash_mcp.judgement import curve, statistics
from flash_mcp.state.store import open_store
from tests.samples import finished_run, queued_run, started_run


def test_a_curve_shows_all_three_series_and_the_intervals_of_held_out_points(tmp_path: Path):
    found = open_store().curve(finished_run(tmp_path, solved=50).id)
    assert [(point.step, point.success) for point in found.held_out] == [(0, 0.2), (20, 0.5)]
    assert found.held_out[1].interval == statistics.wilson(50, 100)
    text = curve.terminal(found, width=80, height=16)
    assert all(label in text for label in ("reward", "success", "held-out success", "step"))
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    picture = curve.png(found)
    assert picture.startswith(b"\x89PNG\r\n") and struct.unpack(">II", picture[16:24]) == (960, 540)


def test_a_fine_tuning_run_has_a_curve_of_its_losses(tmp_path: Path):
    run, _ = started_run(tmp_path, algorithm="sft", steps=8)
    for step in range(1, 9):
        held_out = {"eval_loss": 2.0} if step % 4 == 0 else {}
        metrics = {"loss": 2.0 - step / 10, **held_out}
        open_store().put_metrics(run.id, {"step": step, "epoch": 1, "time": 1.0, "metrics": metrics})
    found = open_store().curve(run.id)
    assert len(found.lines["loss"]) == 8 and found.lines["held-out loss"] == [(4, 2.0), (8, 2.0)]
    text = curve.terminal(found, width=80, height=16)
    assert "loss" in text and "held-out loss" in text and curve.png(found).startswith(b"\x89PNG")


def test_the_success_of_a_fine_tuning_run_has_an_axis_of_its_own(tmp_path: Path):
    points = [curve.Point(0, 0.0, statistics.wilson(0, 9)), curve.Point(8, 0.5, statistics.wilson(4, 8))]
    found = curve.Curve("sft", {"loss": [(1, 40.0), (8, 20.0)]}, points)
    text = curve.terminal(found, width=80, height=16)
    assert "├1.00" in text and "40.0" in text and text.splitlines()[-1].split() == ["loss", "step", "success"]
    assert curve.png(found).startswith(b"\x89PNG")


def test_a_run_without_steps_has_a_curve_that_says_so(tmp_path: Path):
    empty = open_store().curve(queued_run(tmp_path).id)
    assert "no steps yet" in curve.terminal(empty) and curve.png(empty).startswith(b"\x89PNG")


def test_an_evaluation_whose_attempts_all_failed_is_no_point(tmp_path: Path):
    run_id, summary = (finished_run(tmp_path).id, {"n": 0, "success": None, "reward_mean": None, "error_share": 1.0})
    failed = {"step": 10, "epoch": 1, "time": 1.0, "summary": summary, "rollouts": []}
    open_store().put_evaluation(run_id, failed)
    points = open_store().curve(run_id)
    assert [point.step for point in points.held_out] == [0, 20]
    assert "held-out" in curve.terminal(points) and curve.png(points).startswith(b"\x89PNG")
