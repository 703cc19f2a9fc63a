"""A run's reward curve, for the terminal and as a picture. Both plotting libraries are imported
when first needed.
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from flash_mcp.judgement import health

if TYPE_CHECKING:
    from flash_mcp.state.store import Store


METRICS = {
    "grpo": {"reward": "reward/mean", "success": "success/rate"},
    "sft": {"loss": "loss", "held-out loss": "eval_loss"},
    "eval": {},
}
"""What is drawn of each algorithm's runs."""


@dataclass(frozen=True)
class Point:
    """A held-out evaluation; `band` is the half-width of its noise."""

    step: int
    success: float
    band: float


@dataclass(frozen=True)
class Curve:
    """`lines` are {name: [(step, value)]}: means over the rollouts of a training step, or the
    losses of sft.
    """

    title: str
    lines: dict[str, list[tuple[int, float]]]
    held_out: list[Point]


def of_run(store: Store, run_id: str, points: int = 400) -> Curve:
    """The curve of a run. FlashError(unknown_run)."""
    run = store.run(run_id)
    measured = {
        name: store.series(run_id, metric, points)
        for name, metric in METRICS[run.algorithm].items()
    }
    held_out = [
        Point(
            row.step,
            row.summary["success"],
            health.noise_band(row.summary["success"], int(row.summary["n"])),
        )
        for row in store.evals(run_id)
        if row.summary["n"]  # none, and no rate, where environment code failed every attempt
    ]
    title = f"{run_id}: {run.model} on {run.environment}"
    return Curve(title, {name: line for name, line in measured.items() if line}, held_out)


def terminal(curve: Curve, width: int = 90, height: int = 18) -> str:
    """The curve in characters, without colour codes; one line where there is nothing to draw yet."""
    if not curve.lines and not curve.held_out:
        return f"{curve.title}: no steps yet"
    plot: Any = importlib.import_module("plotext")  # untyped
    plot.clear_figure()
    plot.plot_size(width, height)
    plot.title(curve.title)
    plot.xlabel("step")
    for (name, line), marker in zip(curve.lines.items(), ("braille", "dot"), strict=False):
        plot.plot(*zip(*line, strict=True), label=name, marker=marker)
    if curve.held_out:
        plot.scatter(
            [point.step for point in curve.held_out],
            [point.success for point in curve.held_out],
            label="held-out success",
            marker="x",
        )
    return str(plot.uncolorize(plot.build())).rstrip()


def png(curve: Curve) -> bytes:
    """The curve as a PNG picture, held-out success with its noise band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for (name, line), colour in zip(curve.lines.items(), ("tab:blue", "tab:green"), strict=False):
        axes.plot(*zip(*line, strict=True), label=name, color=colour, linewidth=1.8)
    if curve.held_out:
        axes.errorbar(
            [point.step for point in curve.held_out],
            [point.success for point in curve.held_out],
            yerr=[point.band for point in curve.held_out],
            label="success, held out (95 %)",
            color="tab:red",
            marker="o",
            capsize=4,
            linestyle="none",
        )
    axes.set(title=curve.title, xlabel="step", ylabel="mean")
    axes.grid(alpha=0.25)
    if curve.lines or curve.held_out:
        axes.legend(loc="best")
    buffer = io.BytesIO()
    cast(Any, figure).savefig(buffer, format="png")
    return buffer.getvalue()
