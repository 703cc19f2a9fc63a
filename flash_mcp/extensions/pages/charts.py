"""Charts as plain SVG, in the coordinates of the picture: the templates only write them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_mcp.judgement.statistics import Interval
from flash_mcp.protocol.numbers import number
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.run_view import RunView

POINTS = 200
CHARTS: dict[str, dict[str, str]] = {
    "Loss": {"loss": "training", "eval_loss": "held out"},
    "Tokens the model writes in a rollout": {"tokens/completion_mean": "mean"},
    "Groups: rollouts of one prompt": {
        "groups/uniform_share": "all score the same",
        "groups/solved_share": "all succeed",
        "groups/unsolved_share": "none succeeds",
    },
    "Rollouts in trouble": {
        "rollouts/truncated_share": "cut off",
        "rollouts/error_share": "environment failed",
        "rollouts/repeated_share": "repeat another",
    },
    "Entropy of the policy": {"entropy": "mean, nats"},
    "Divergence": {
        "teacher_kl": "from the teacher",
        "kl": "from the starting policy",
        "sampling_kl": "engine from trainer",
    },
    "Gradient norm": {"grad_norm": "before clipping"},
    "Tokens a second": {"engine/tokens_per_s": "written by the engine"},
    "Memory, GiB": {
        "system/memory_gib": "used on the machine",
        "system/process_gib": "by the worker",
        "system/card_gib": "on the card",
    },
    "Utilization of the card": {"system/card_share": "share of the time"},
    "Seconds": {"time/step_s": "step", "time/rollout_s": "rollouts", "time/train_s": "training"},
}
PARTS = 6
"""Parts of the reward that are drawn."""
COLOURS = 6
"""Lines of one chart."""


@dataclass(frozen=True)
class Series:
    """A line over steps; with `intervals`, single points with whiskers."""

    name: str
    points: list[tuple[int, float]]
    intervals: list[Interval] = field(default_factory=list[Interval])

    @property
    def reach(self) -> list[float]:
        values = [value for _, value in self.points]
        for interval in self.intervals:
            values += (interval.low, interval.high)
        return values


@dataclass(frozen=True)
class ChartLine:
    """A series in the picture's coordinates: `points` are joined, `whiskers` stand alone."""

    name: str
    colour: int
    summary: str
    points: list[tuple[float, float]]
    whiskers: list[tuple[float, float, float, float]]
    """x, top, middle and bottom of each."""


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn, in the coordinates of the picture."""

    title: str
    lines: list[ChartLine]
    value_ticks: list[tuple[float, str]]
    step_ticks: list[tuple[float, int, str]]
    width: int = 400
    height: int = 200
    left: int = 44
    right: int = 390
    top: int = 8
    bottom: int = 178


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` onto places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = 0.5
        if span:
            share = (value - self.low) / span
        return round(self.start + (self.end - self.start) * share, 1)


def series_of(store: Store, view: RunView) -> dict[str, list[Series]]:
    """What is drawn of a run, by the title of its chart; the most telling first."""

    def series(name: str, label: str) -> Series:
        return Series(label, store.series(view.run_id, name, POINTS))

    evaluated: dict[str, list[Series]] = {}
    if view.algorithm in ("grpo", "distill"):
        evaluated["Reward and success"] = [
            series("reward/mean", "reward, training"),
            series("success/rate", "success, training"),
            held_out("success, held out (95 %)", view),
        ]
    for title, names in CHARTS.items():
        evaluated[title] = [series(name, label) for name, label in names.items()]
    if view.algorithm == "sft":
        loss = evaluated.pop("Loss")
        success = [held_out("held out (95 %)", view)]
        evaluated = {"Loss": loss, "Success": success, **evaluated}
    parts: list[Series] = []
    for name in view.metrics or {}:
        if name.startswith("reward/") and name not in ("reward/mean", "reward/std"):
            parts.append(series(name, name.removeprefix("reward/")))
    evaluated["Parts of the reward"] = parts[:PARTS]
    return drawn(evaluated)


def held_out(name: str, view: RunView) -> Series:
    points: list[tuple[int, float]] = []
    intervals: list[Interval] = []
    for point in view.held_out or []:
        points.append((point.step, point.success))
        intervals.append(Interval(point.low, point.high))
    return Series(name, points, intervals)


def drawn(charts: Mapping[str, Sequence[Series]]) -> dict[str, list[Series]]:
    """The charts without lines that have no points, and without charts that have no lines."""
    results: dict[str, list[Series]] = {}
    for title, lines in charts.items():
        if filled := [line for line in lines if line.points]:
            results[title] = filled
    return results


def as_data(charts: Mapping[str, Sequence[Series]]) -> list[dict[str, Any]]:
    """The charts for the browser, which draws them large: for each the steps, and of each line the
    value at each step; `points` if nobody measured between them.
    """
    results: list[dict[str, Any]] = []
    for title, lines in charts.items():
        steps = sorted({step for line in lines for step, _ in line.points})
        shown: list[dict[str, Any]] = []
        for line in lines:
            values = dict(line.points)
            shown.append({"name": line.name, "values": [values.get(step) for step in steps]})
            if line.intervals:
                shown[-1]["points"] = True
        results.append({"title": title, "steps": steps, "lines": shown})
    return results


def chart(title: str, lines: Sequence[Series]) -> Chart:
    steps: list[int] = []
    values: list[float] = []
    for series in lines:
        steps += (step for step, _ in series.points)
        values += series.reach
    low = min(values)
    # An axis from zero is honest; where it would flatten the line, it is not used.
    if low < 0.5 * max(values) or low == max(values):
        low = min(0.0, low)
    # At least two round values around low to high, a step of 1, 2 or 5 apart
    high = max(values)
    span = max(high - low, abs(high) * 0.1) or 1.0
    exponent = 10.0 ** int(f"{span / 4:e}".partition("e")[2])
    step = next(size * exponent for size in (1, 2, 5, 10) if span / 4 <= size * exponent)
    start = int(low // step)
    end = max(int(-(-high // step)), start + 1)
    ticks = [round(number * step, 12) for number in range(start, end + 1)]
    x = Axis(min(steps), max(steps), Chart.left, Chart.right)
    y = Axis(ticks[0], ticks[-1], Chart.bottom, Chart.top)
    return Chart(
        title,
        [_line(colour, series, x, y) for colour, series in enumerate(lines, 1)],
        [(y(tick), f"{tick:,.10g}") for tick in ticks],
        [(x(step), step, anchor) for step, anchor in _step_ticks(min(steps), max(steps))],
    )


def spark(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """The points of a curve without axes, in a picture of 100 by 24; none of a single point."""
    if len(points) < 2:
        return []
    values = [value for _, value in points]
    x = Axis(points[0][0], points[-1][0], 2.0, 98.0)
    y = Axis(min(values), max(values), 22.0, 2.0)
    return [(x(step), y(value)) for step, value in points]


def _line(colour: int, series: Series, x: Axis, y: Axis) -> ChartLine:
    first = series.points[0][1]
    last = series.points[-1][1]
    summary = f"{series.name} from {number(first)} to {number(last)}"
    points = [(x(step), y(value)) for step, value in series.points]
    if not series.intervals:
        return ChartLine(series.name, colour, summary, points, [])
    whiskers: list[tuple[float, float, float, float]] = []
    for (step, value), interval in zip(series.points, series.intervals, strict=True):
        inside = min(max(x(step), Chart.left + 4), Chart.right - 4)
        whiskers.append((inside, y(interval.high), y(value), y(interval.low)))
    return ChartLine(series.name, colour, summary, [], whiskers)


def _step_ticks(first: int, last: int) -> list[tuple[int, str]]:
    if last - first < 2:
        return [(step, "middle") for step in sorted({first, last})]
    return [(first, "start"), ((first + last) // 2, "middle"), (last, "end")]
