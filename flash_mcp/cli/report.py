"""A run as one HTML page that needs nothing else: no script, no network, no second file.

The figures are those of `status` (RunView), laid out by report.html.j2. What a model or an
environment wrote is hostile text: the template engine escapes every value, and a content security
policy allows only the page's own style sheet. That policy forbids style attributes, so the charts
are plain SVG elements with classes, which also follow a dark colour scheme; matplotlib's SVG
carries its colours in style attributes."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from flash_mcp.cli.output import visible
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, failure_counts, failure_modes
from flash_mcp.judgement.statistics import Interval
from flash_mcp.protocol.records import Rollout, Run
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.fitting import shorten, utc
from flash_mcp.tools.shared.run_view import RunView, report_on

POINTS = 200
TRAIN_STEPS = 5
"""Training steps whose rollouts are shown: the first, the newest and some between."""
EVAL_STEPS = 2
SHOWN_ROLLOUTS = 3
MESSAGE_CHARACTERS = 4000
MESSAGES = 12

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
    "Divergence": {"kl": "from the starting policy", "sampling_kl": "engine from trainer"},
    "Gradient norm": {"grad_norm": "before clipping"},
    "Seconds": {"time/step_s": "step", "time/rollout_s": "rollouts", "time/train_s": "training"},
}
PARTS = 6
"""Parts of the reward that are drawn."""


def html(store: Store, run_id: str) -> str:
    """The page. FlashError(unknown_run)."""
    run = store.run(run_id)
    report = report_on(store, run_id, detailed=True)
    view = report.view
    page = _template().render(
        run=run,
        view=view,
        next_step=report.next_step,
        now=time.time(),
        across=Axis(0.0, 1.0, 4.0, 156.0),
        as_json=_as_json,
        clock=_clock,
        policy=_policy,
        shorten=_shorten,
        utc=utc,
        scores=view.scores and view.scores.model_dump(mode="json", exclude_none=True),
        charts=_charts(store, view),
        steps=_steps(store, run_id),
        most_messages=MESSAGES,
        facts=_lineage(run, view),
        values=run.spec.model_dump(),
        events=store.events(run_id, limit=30),
    )
    return f"{page}\n"


def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(
        Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    )


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(moment))


def _policy(style: str) -> str:
    """The content security policy: this style sheet, known by its hash, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _shorten(text: str) -> str:
    return shorten(text, MESSAGE_CHARACTERS)


def _shown(value: object) -> object:
    """A value on its way to the page: Markup is the template's own, all else becomes text."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else visible(str(value))


# -- charts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A line over steps; with `intervals`, single points with whiskers."""

    name: str
    points: list[tuple[int, float]]
    intervals: list[Interval] = field(default_factory=list[Interval])

    @property
    def reach(self) -> list[float]:
        """Every value that the chart has to show, whisker ends included."""
        ends = [end for each in self.intervals for end in (each.low, each.high)]
        return [value for _, value in self.points] + ends


@dataclass(frozen=True)
class Line:
    """A series in the picture's coordinates: `points` are joined, `whiskers` are not."""

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
    lines: list[Line]
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
        share = (value - self.low) / span if span else 0.5
        return round(self.start + (self.end - self.start) * share, 1)


def _charts(store: Store, view: RunView) -> list[Chart]:
    def series(name: str, label: str) -> Series:
        return Series(label, store.series(view.run_id, name, POINTS))

    held_out = view.held_out or []
    points = [(point.step, point.success) for point in held_out]
    intervals = [Interval(point.low, point.high) for point in held_out]
    given = {
        "Reward and success": [
            series("reward/mean", "reward, training"),
            series("success/rate", "success, training"),
            Series("success, held out (95 %)", points, intervals),
        ]
    }
    for title, names in CHARTS.items():
        given[title] = [series(name, label) for name, label in names.items()]
    others = [name for name in view.metrics or {} if name.startswith("reward/")]
    parts = [name for name in others if name not in ("reward/mean", "reward/std")]
    given["Parts of the reward"] = [
        series(name, name.removeprefix("reward/")) for name in parts[:PARTS]
    ]
    charts = [_chart(title, several) for title, several in given.items()]
    return [chart for chart in charts if chart.lines]


def _chart(title: str, given: Sequence[Series]) -> Chart:
    drawn = [(colour, series) for colour, series in enumerate(given, 1) if series.points]
    if not drawn:
        return Chart(title, [], [], [])
    steps = [step for _, series in drawn for step, _ in series.points]
    values = [value for _, series in drawn for value in series.reach]
    low = min(values)
    if low < 0.5 * max(values):
        low = min(0.0, low)
    ticks = _ticks(low, max(values))
    x = Axis(min(steps), max(steps), Chart.left, Chart.right)
    y = Axis(ticks[0], ticks[-1], Chart.bottom, Chart.top)
    return Chart(
        title,
        [_line(colour, series, x, y) for colour, series in drawn],
        [(y(tick), f"{tick:.4g}") for tick in ticks],
        [(x(step), step, anchor) for step, anchor in _step_ticks(min(steps), max(steps))],
    )


def _line(colour: int, series: Series, x: Axis, y: Axis) -> Line:
    first = series.points[0][1]
    last = series.points[-1][1]
    summary = f"{series.name} from {first:.3g} to {last:.3g}"
    points = [(x(step), y(value)) for step, value in series.points]
    if not series.intervals:
        return Line(series.name, colour, summary, points, [])
    whiskers: list[tuple[float, float, float, float]] = []
    for (step, value), interval in zip(series.points, series.intervals, strict=True):
        inside = min(max(x(step), Chart.left + 4), Chart.right - 4)
        whiskers.append((inside, y(interval.high), y(value), y(interval.low)))
    return Line(series.name, colour, summary, [], whiskers)


def _ticks(low: float, high: float) -> list[float]:
    """At least two round values around low to high, a step of 1, 2 or 5 apart."""
    span = max(high - low, abs(high) * 0.1) or 1.0
    exponent = 10.0 ** int(f"{span / 4:e}".partition("e")[2])
    step = next(size * exponent for size in (1, 2, 5, 10) if span / 4 <= size * exponent)
    start = int(low // step)
    end = max(int(-(-high // step)), start + 1)
    return [round(number * step, 12) for number in range(start, end + 1)]


def _step_ticks(first: int, last: int) -> list[tuple[int, str]]:
    if last - first < 2:
        return [(step, "middle") for step in sorted({first, last})]
    return [(first, "start"), ((first + last) // 2, "middle"), (last, "end")]


# -- rollouts and lineage --------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Rollouts of one step, each with its failure mode where it has one."""

    summary: str
    rollouts: list[tuple[Rollout, str | None]]


def _steps(store: Store, run_id: str) -> list[Step]:
    train = _spread(store.rollout_steps(run_id, "train"), TRAIN_STEPS)
    held_out = _spread(store.rollout_steps(run_id, "eval"), EVAL_STEPS)
    return [
        *(_step(store, run_id, "train", step) for step in train),
        *(_step(store, run_id, "eval", step) for step in held_out),
    ]


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of `steps`, evenly from the first to the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _step(store: Store, run_id: str, split: str, step: int) -> Step:
    total = store.rollout_count(run_id, split, step)
    solved = store.rollout_count(run_id, split, step, success=True)
    name = f"Step {step}" if split == "train" else f"Held out, step {step}"
    summary = f"{name}: {total} rollouts, success {solved / total:.0%}"
    sample = store.rollouts(run_id, split, step, "random", limit=SAMPLE_ROLLOUTS)
    if counts := failure_counts(sample):
        failed = ", ".join(f"{mode} {count}" for mode, count in counts.items())
        of = f" of {len(sample)} drawn at random" if len(sample) < total else ""
        summary += f"; failures{of}: {failed}"
    shown = [
        store.rollouts(run_id, split, step, "best", limit=1, offset=place)[0]
        for place in _spread(range(total), SHOWN_ROLLOUTS)
    ]
    return Step(summary, list(zip(shown, failure_modes(shown, sample), strict=True)))


def _lineage(run: Run, view: RunView) -> dict[str, str | None]:
    lineage = view.lineage
    if lineage is None:
        return {}
    gold = "the environment's gold answers" if view.algorithm == "sft" else None
    parent = f"{lineage.parent} (digest {lineage.parent_digest})"
    saved = (lineage.checkpoints or {}).items()
    return {
        "code": f"flash-mcp {lineage.code}" if lineage.code else "not recorded",
        "base model": lineage.model,
        "environment": lineage.environment,
        "env_test": lineage.gate,
        "parent adapter": parent if lineage.parent else "none: from scratch",
        "dataset": lineage.dataset or gold,
        "checkpoints": ", ".join(f"step {step}: {digest}" for step, digest in saved),
        "run folder": run.folder,
    }
