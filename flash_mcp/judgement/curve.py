"""A run's reward curve, for the terminal and as a picture. Plotting is imported when needed."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flash_mcp.judgement import attempts, statistics
from flash_mcp.judgement.statistics import Interval
from flash_mcp.protocol.packages import check_pictures
from flash_mcp.protocol.records import Evaluation, Run, Try

Line = list[tuple[int, float]]
"""(step, value) in order of steps."""
METRICS = {
    "grpo": {"reward": "reward/mean", "success": "success/rate"},
    "sft": {"loss": "loss", "held-out loss": "eval_loss"},
    "distill": {"reward": "reward/mean", "success": "success/rate"},
    "eval": {},
}
"""Metrics of each algorithm's runs that are drawn, and whose trend is shown."""


@dataclass(frozen=True)
class Point:
    """A held-out evaluation with the 95 % interval of its success."""

    step: int
    success: float
    interval: Interval


@dataclass(frozen=True)
class Curve:
    title: str
    lines: dict[str, Line]
    """Means over the rollouts of a training step, or the losses of sft."""
    held_out: list[Point]

    @property
    def has_losses(self) -> bool:
        """Whether success needs an axis of its own."""
        return "loss" in self.lines

    def measured(self) -> tuple[list[int], list[float]]:
        points = self.held_out
        return [point.step for point in points], [point.success for point in points]


def drawn(
    run: Run,
    lines: Mapping[str, Line],
    evaluations: Sequence[Evaluation],
    tries: Mapping[int, Sequence[Try]],
) -> Curve:
    """`tries`: {step: all attempts of its evaluation}; without them, they count as independent."""
    held_out: list[Point] = []
    for row in evaluations:
        count = int(row.summary["n"])
        if count:  # else environment code failed every attempt, and there is no rate
            success = row.summary["success"]
            interval = statistics.wilson(success * count, count)
            if tasks := attempts.by_task(tries.get(row.step, ())):
                interval = statistics.success_interval(attempts.successes(tasks))
            held_out.append(Point(row.step, success, interval))
    title = f"{run.id}: {run.model} on {run.environment}"
    return Curve(title, {name: line for name, line in lines.items() if line}, held_out)


def terminal(curve: Curve, width: int = 90, height: int = 18) -> str:
    """The curve in characters, without colour codes; one line if nothing can be drawn yet."""
    if not curve.lines and not curve.held_out:
        return f"{curve.title}: no steps yet"
    plot: Any = importlib.import_module("plotext")  # untyped
    plot.clear_figure()
    plot.plot_size(width, height)
    plot.title(curve.title)
    plot.xlabel("step")
    steps, _ = curve.measured()
    for line in curve.lines.values():
        steps.extend(step for step, _ in line)
    # Whole numbers: nobody trains half a step.
    first, span = min(steps), max(steps) - min(steps)
    plot.xticks(sorted({first + span * part // 4 for part in range(5)}))
    for (name, line), marker in zip(curve.lines.items(), ("braille", "dot"), strict=False):
        plot.plot(*zip(*line, strict=True), label=name, marker=marker)
    if curve.held_out:
        side = "left"
        if curve.has_losses:
            side = "right"
            plot.ylim(0, 1, yside="right")
            plot.ylabel("loss")
            plot.ylabel("success", yside="right")
        plot.scatter(*curve.measured(), label="held-out success", marker="x", yside=side)
    return str(plot.uncolorize(plot.build())).rstrip()


def png(curve: Curve) -> bytes:
    """The curve as a PNG picture, held-out success with its interval.

    FlashError without matplotlib.
    """
    check_pictures()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for (name, line), colour in zip(curve.lines.items(), ("tab:blue", "tab:green"), strict=False):
        axes.plot(*zip(*line, strict=True), label=name, color=colour, linewidth=1.8)
    axes.set(title=curve.title, xlabel="step", ylabel="loss" if curve.has_losses else "mean")
    axes.grid(alpha=0.25)
    if curve.held_out:
        right: Any = axes
        if curve.has_losses:
            right = axes.twinx()
            right.set(ylabel="success", ylim=(0, 1))
        below = [point.success - point.interval.low for point in curve.held_out]
        above = [point.interval.high - point.success for point in curve.held_out]
        right.errorbar(
            *curve.measured(),
            yerr=[below, above],
            label="success, held out (95 %)",
            color="tab:red",
            marker="o",
            capsize=4,
            linestyle="none",
        )
    if curve.lines or curve.held_out:
        cast(Any, figure).legend(loc="outside lower center", ncols=3)
    buffer = io.BytesIO()
    cast(Any, figure).savefig(buffer, format="png")
    return buffer.getvalue()
