"""A run as one HTML page that needs nothing else: no script, no network, no second file.

Figures are those of `status` (RunView). What a model or an environment wrote is hostile text: the
page is built as a tree of elements, so that it is escaped wherever it stands, and a content
security policy allows this page's own style sheet and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from flash_mcp.cli.output import visible
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, failure_counts, failure_modes
from flash_mcp.protocol.records import Json, Rollout, Run
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.fitting import shorten, utc
from flash_mcp.tools.shared.run_view import HeldOut, RunView, view_of

POINTS = 200
TRAIN_STEPS = 5
"""Steps of which rollouts are shown: the first, the newest and some between."""
SHOWN_ROLLOUTS = 3
MESSAGE_CHARACTERS = 4000
MESSAGES = 12

CHARTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Loss", {"loss": "training", "eval_loss": "held out"}),
    ("Tokens the model writes in a rollout", {"tokens/completion_mean": "mean"}),
    (
        "Groups: rollouts of one prompt",
        {
            "groups/uniform_share": "all score the same",
            "groups/solved_share": "all succeed",
            "groups/unsolved_share": "none succeeds",
        },
    ),
    (
        "Rollouts in trouble",
        {
            "rollouts/truncated_share": "cut off",
            "rollouts/error_share": "environment failed",
            "rollouts/repeated_share": "repeat another",
        },
    ),
    ("Entropy of the policy", {"entropy": "mean, nats"}),
    ("Divergence", {"kl": "from the starting policy", "sampling_kl": "engine from trainer"}),
    ("Gradient norm", {"grad_norm": "before clipping"}),
    ("Seconds", {"time/step_s": "step", "time/rollout_s": "rollouts", "time/train_s": "training"}),
)
PARTS = 6
"""Parts of the reward that are drawn."""

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --panel: #f6f8fa;
  --good: #116329; --bad: #b3261e; --warn: #8a4600;
  --c1: #0a58ca; --c2: #b04a00; --c3: #1a7f37; --c4: #8250df; --c5: #bf3989; --c6: #57606a; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --dim: #9aa4af; --line: #30363d;
  --panel: #161b22; --good: #56d364; --bad: #ff8078; --warn: #e3b341;
  --c1: #6cb0ff; --c2: #ffa657; --c3: #56d364; --c4: #c297ff; --c5: #ff8bc8; --c6: #9aa4af; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } code, pre, .mono { font-family: ui-monospace, monospace; font-size: .86rem; }
.dim, figcaption, th, .tick, .role { color: var(--dim); }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.wide { overflow-x: auto; } pre, .break { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } caption { text-align: left; color: var(--dim); }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
figure { min-width: 0; margin: 0; padding: .5rem .75rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; }
figcaption { font-size: .85rem; } figcaption b { display: block; color: var(--ink); font-size: .95rem; }
.key { margin-right: .75rem; } svg { display: block; width: 100%; height: auto; }
.key svg, td svg { display: inline-block; vertical-align: middle; width: auto; }
.tick { fill: var(--dim); font: 11px system-ui, sans-serif; } .grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .whisker { stroke-width: 2; }
.s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); stroke-dasharray: 6 3; } .s3 { stroke: var(--c3); }
.s4 { stroke: var(--c4); stroke-dasharray: 2 3; } .s5 { stroke: var(--c5); } .s6 { stroke: var(--c6); }
.d1 { fill: var(--c1); } .d2 { fill: var(--c2); } .d3 { fill: var(--c3); } .d4 { fill: var(--c4); }
.d5 { fill: var(--c5); } .d6 { fill: var(--c6); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .4rem .75rem; }
summary { cursor: pointer; } article { border-top: 1px solid var(--line); margin-top: .5rem; padding-top: .5rem; }
pre { margin: .1rem 0 .5rem; padding: .5rem; background: var(--panel); border-radius: 4px; white-space: pre-wrap;
  unicode-bidi: isolate; max-height: 24rem; overflow: auto; }
"""
POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'"
)

Child = Element | str | None


def html(store: Store, run_id: str) -> str:
    """The page. FlashError(unknown_run)."""
    run, (view, next_step) = store.run(run_id), view_of(store, run_id, detailed=True)
    body = el(
        "body",
        *_head(run, view, next_step),
        *_judgement(view),
        *_scores(view),
        *_health(view),
        *_curves(store, view),
        *_rollouts(store, run_id),
        *_lineage(run, view),
        *_config(run),
        *_events(store, run_id, view),
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="referrer", content="no-referrer"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{run_id}: {view.model} on {view.environment}"),
    )
    style = Element(
        "style"
    )  # written as it stands, unlike every other text; nothing of the run goes in here
    style.text = STYLE
    head.append(style)
    page = ElementTree.tostring(
        el("html", head, body, lang="en"), encoding="unicode", method="html"
    )
    return f"<!doctype html>\n{page}\n"


def el(tag: str, *children: Child, **attributes: object) -> Element:
    """An element. Text is escaped when the page is written, and control characters are made
    visible.

    Attributes that are None are left out; `class_` is class and `http_equiv` http-equiv.
    """
    node = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            node.set(name.rstrip("_").replace("_", "-"), visible(str(value)))
    for child in children:
        _append(node, child)
    return node


def _append(node: Element, child: Child) -> None:
    if isinstance(child, Element):
        node.append(child)
    elif child:
        last = node[-1] if len(node) else None
        if last is None:
            node.text = (node.text or "") + visible(child)
        else:
            last.tail = (last.tail or "") + visible(child)


# -- what stands above the curves ------------------------------------------------------------------


def _head(run: Run, view: RunView, next_step: str) -> list[Child]:
    steps = f"{view.step} of {view.steps} steps" if view.steps else f"{view.step} steps"
    took = f", {view.elapsed_s} s" if view.elapsed_s is not None else ""
    return [
        el("h1", view.run_id),
        el(
            "p",
            f"{view.algorithm} of {view.model} on {view.environment}: ",
            el("b", view.state),
            f", {steps}{took}",
        ),
        el("p", "Worth continuing? ", view.outlook, class_="outlook") if view.outlook else None,
        el(
            "p",
            f"Created {utc(run.created)} UTC; this page shows it as of {utc(time.time())} UTC. Next: {next_step}",
            class_="dim",
        ),
        *_failure(view),
    ]


def _failure(view: RunView) -> list[Child]:
    error = view.error
    if error is None:
        return []
    log = el("pre", error.log_tail) if error.log_tail else None
    return [el("p", f"[{error.code}] {error.what}", class_="bad"), el("p", error.fix), log]


def _judgement(view: RunView) -> list[Child]:
    if not view.held_out and not view.verdict:
        return []
    rows = [
        [
            "before training" if point.step == 0 else f"after step {point.step}",
            _number(point.n),
            _number(f"{point.success:.3f} ± {point.band:.3f}"),
            el("td", _interval(point)),
            _number(point.reward),
            _number(point.truncated or 0),
            _number(point.errors or 0),
        ]
        for point in view.held_out or []
    ]
    columns = ("held out", "#n", "#success, 95 %", "0 to 1", "#reward", "#cut off", "#errors")
    kind = {"improved": "good", "no_change": "dim"}
    verdict = view.verdict
    return [
        el("h2", "Before and after"),
        el(
            "p",
            el("b", verdict.outcome, class_=kind.get(verdict.outcome, "bad")),
            f": {verdict.explanation}",
        )
        if verdict
        else None,
        _table(columns, rows),
    ]


def _scores(view: RunView) -> list[Child]:
    """What a run made by evaluate found."""
    found: Json = view.scores.model_dump(mode="json", exclude_none=True) if view.scores else {}
    rows = [
        [name, value if isinstance(value, str) else json.dumps(value)]
        for name, value in found.items()
    ]
    return [el("h2", "Scores"), _table(("", ""), rows)] if rows else []


def _interval(point: HeldOut) -> Element:
    low, high = (
        min(max(x, 0.0), 1.0) for x in (point.success - point.band, point.success + point.band)
    )
    at = [f"{4 + 152 * x:.1f}" for x in (low, point.success, high)]
    return el(
        "svg",
        el("line", x1=4, x2=156, y1=8, y2=8, class_="grid"),
        el("line", x1=at[0], x2=at[2], y1=8, y2=8, class_="whisker s1"),
        el("circle", cx=at[1], cy=8, r=4, class_="d1"),
        viewBox="0 0 160 16", width=160, height=16, role="img",
        aria_label=f"{point.success:.3f}, between {low:.3f} and {high:.3f}",
    )  # fmt: skip


def _health(view: RunView) -> list[Child]:
    flags = [
        [
            el("td", flag.severity, class_="bad" if flag.severity == "problem" else "warn"),
            flag.name,
            flag.evidence,
            flag.remedy,
        ]
        for flag in view.flags or []
    ]
    failures = [[mode, _number(count)] for mode, count in (view.failures or {}).items()]
    found = (
        _table(("", "sign", "evidence", "what usually helps"), flags)
        if flags
        else el("p", "No warning signs.")
    )
    return [
        el("h2", "Health"),
        found,
        *(el("p", warning, class_="warn") for warning in view.warnings or []),
        _table(("failure mode", "#newest rollouts"), failures) if failures else None,
    ]


# -- curves ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A line; with `bands`, half-widths of the points' noise, separate points with whiskers
    instead.
    """

    name: str
    points: list[tuple[int, float]]
    bands: list[float] = field(default_factory=list[float])


def _curves(store: Store, view: RunView) -> list[Child]:
    def series(name: str, label: str) -> Series:
        return Series(label, store.series(view.run_id, name, POINTS))

    held_out = view.held_out or []
    first = [series("reward/mean", "reward, training"), series("success/rate", "success, training")]
    points = [(point.step, point.success) for point in held_out]
    first.append(Series("success, held out (95 %)", points, [point.band for point in held_out]))
    known = {"reward/mean", "reward/std"}
    parts = [
        name for name in view.metrics or {} if name.startswith("reward/") and name not in known
    ][:PARTS]
    charts = [
        _chart("Reward and success", first),
        *(
            _chart(title, [series(name, label) for name, label in names.items()])
            for title, names in CHARTS
        ),
        _chart("Parts of the reward", [series(name, name.partition("/")[2]) for name in parts]),
    ]
    drawn = [chart for chart in charts if chart is not None]
    numbers = [[name, el("td", text, class_="mono")] for name, text in (view.metrics or {}).items()]
    return [
        el("h2", "Curves"),
        el("div", *drawn, class_="charts") if drawn else el("p", "No steps yet."),
        el("details", el("summary", "Every metric"), _table(("metric", "first -> last"), numbers))
        if numbers
        else None,
    ]


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 200, 44, 10, 8, 22


def _chart(title: str, given: Sequence[Series]) -> Element | None:
    """None where no series has a point."""
    drawn = [(number, series) for number, series in enumerate(given, 1) if series.points]
    if not drawn:
        return None
    steps = [step for _, series in drawn for step, _ in series.points]
    ends = [
        value + sign * band
        for _, series in drawn
        for (_, value), band in zip(
            series.points, series.bands or [0.0] * len(series.points), strict=True
        )
        for sign in (-1, 1)
    ]
    first, last = min(steps), max(steps)
    ticks = _ticks(min(0.0, *ends) if min(ends) < 0.5 * max(ends) else min(ends), max(ends))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (
            (step - first) / (last - first) if last > first else 0.5
        )

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (ticks[-1] - value) / (ticks[-1] - ticks[0])

    svg = el(
        "svg",
        el("title", f"{title}: {', '.join(_told(series) for _, series in drawn)}"),
        *(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_at(y(tick)), y2=_at(y(tick)), class_="grid") for tick in ticks),
        *(
            el("text", f"{tick:.4g}", x=LEFT - 6, y=_at(y(tick) + 4), text_anchor="end", class_="tick")
            for tick in ticks
        ),
        *(
            el("text", f"{step}", x=_at(x(step)), y=HEIGHT - 6, text_anchor=anchor, class_="tick")
            for step, anchor in _step_ticks(first, last)
        ),
        *(mark for number, series in drawn for mark in _marks(number, series, x, y)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
    )  # fmt: skip
    keys = (
        el("span", _swatch(number), f" {series.name}", class_="key") for number, series in drawn
    )
    return el("figure", el("figcaption", el("b", title), *keys), svg)


def _marks(number: int, series: Series, x: Any, y: Any) -> list[Child]:
    places = [(x(step), y(value)) for step, value in series.points]
    if not series.bands:
        line = " ".join(f"{_at(across)},{_at(down)}" for across, down in places)
        end = el("circle", cx=_at(places[-1][0]), cy=_at(places[-1][1]), r=3, class_=f"d{number}")
        return [el("polyline", points=line, class_=f"curve s{number}"), end]
    marks: list[Child] = []
    for (across, down), (_, value), band in zip(places, series.points, series.bands, strict=True):
        across = min(max(across, LEFT + 4), WIDTH - RIGHT - 4)
        top, bottom = _at(y(value + band)), _at(y(value - band))
        marks.append(
            el(
                "line",
                x1=_at(across),
                x2=_at(across),
                y1=top,
                y2=bottom,
                class_=f"whisker s{number}",
            )
        )
        marks.append(el("circle", cx=_at(across), cy=_at(down), r=4, class_=f"d{number}"))
    return marks


def _swatch(number: int) -> Element:
    line = el("line", x1=0, x2=22, y1=5, y2=5, class_=f"curve s{number}")
    return el("svg", line, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true")


def _told(series: Series) -> str:
    values = [value for _, value in series.points]
    return f"{series.name} from {values[0]:.3g} to {values[-1]:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """At least two round values around low to high, a step of 1, 2 or 5 apart."""
    span = max(high - low, abs(high) * 0.1) or 1.0
    exponent = 10.0 ** int(f"{span / 4:e}".partition("e")[2])
    step = next(size * exponent for size in (1, 2, 5, 10) if span / 4 <= size * exponent)
    start, end = int(low // step), int(-(-high // step))
    return [round(number * step, 12) for number in range(start, max(end, start + 1) + 1)]


def _step_ticks(first: int, last: int) -> list[tuple[int, str]]:
    if last - first < 2:
        return [(step, "middle") for step in sorted({first, last})]
    return [(first, "start"), ((first + last) // 2, "middle"), (last, "end")]


def _at(place: float) -> str:
    return f"{place:.1f}"


# -- rollouts --------------------------------------------------------------------------------------


def _rollouts(store: Store, run_id: str) -> list[Child]:
    train, held_out = (store.rollout_steps(run_id, split) for split in ("train", "eval"))
    chosen = [("train", step) for step in _spread(train)] + [
        ("eval", step) for step in _spread(held_out, 2)
    ]
    if not chosen:
        return []
    text = "As the model wrote them: best, middle and worst of a step."
    return [
        el("h2", "Rollouts"),
        el("p", text, class_="dim"),
        *(_step(store, run_id, *each) for each in chosen),
    ]


def _spread(steps: Sequence[int], count: int = TRAIN_STEPS) -> list[int]:
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _step(store: Store, run_id: str, split: str, step: int) -> Element:
    total, solved = (
        store.rollout_count(run_id, split, step, success=success) for success in (None, True)
    )
    sample = store.rollouts(run_id, split, step, "random", limit=SAMPLE_ROLLOUTS)
    of = f" of {len(sample)} drawn at random" if len(sample) < total else ""
    failed = ", ".join(f"{mode} {count}" for mode, count in failure_counts(sample).items())
    places = _spread(range(total), SHOWN_ROLLOUTS)
    shown = [
        store.rollouts(run_id, split, step, "best", limit=1, offset=place)[0] for place in places
    ]
    name = f"Step {step}" if split == "train" else f"Held out, step {step}"
    summary = f"{name}: {total} rollouts, success {solved / total:.0%}" + (
        f"; failures{of}: {failed}" if failed else ""
    )
    return el(
        "details", el("summary", summary), *map(_rollout, shown, failure_modes(shown, sample))
    )


def _rollout(row: Rollout, mode: str | None) -> Element:
    said = [
        f"reward {row.reward:.4g}",
        "success" if row.success else f"no success ({mode})",
        row.finish,
    ]
    said += [f"{name} {value:.3g}" for name, value in row.metrics.items()]
    error: Json = row.error or {}
    messages: list[Json] = row.messages
    left_out = max(0, len(messages) - MESSAGES)
    return el(
        "article",
        el("p", el("b", f"{row.task_id} #{row.index}"), f": {', '.join(said)}"),
        el("p", f"The scorer: {row.reason}", class_="dim") if row.reason else None,
        el("p", f"[{error.get('code')}] {error.get('what')}", class_="bad") if error else None,
        el("p", f"{left_out} messages left out", class_="dim") if left_out else None,
        *(item for message in messages[left_out:] for item in _message(message)),
    )


def _message(message: Json) -> list[Child]:
    content = message.get("content")
    text = (
        content
        if isinstance(content, str)
        else json.dumps(content, ensure_ascii=False, default=str)
    )
    role = el("span", str(message.get("role")), class_="role")
    return [role, el("pre", shorten(text, MESSAGE_CHARACTERS), dir="auto")]


# -- what stands below -----------------------------------------------------------------------------


def _lineage(run: Run, view: RunView) -> list[Child]:
    lineage = view.lineage
    if lineage is None:
        return []
    facts = {
        "code": f"flash-mcp {lineage.code}" if lineage.code else "not recorded",
        "base model": view.model,
        "environment": lineage.environment,
        "parent adapter": f"{lineage.parent} (digest {lineage.parent_digest})"
        if lineage.parent
        else "none: from scratch",
        "dataset": lineage.dataset
        or ("the environment's gold answers" if view.algorithm == "sft" else None),
        "checkpoints": ", ".join(
            f"step {step}: {digest}" for step, digest in (lineage.checkpoints or {}).items()
        )
        or None,
        "run folder": run.folder,
    }
    return [
        el("h2", "Lineage"),
        _table(("", ""), [[name, fact] for name, fact in facts.items() if fact]),
    ]


def _config(run: Run) -> list[Child]:
    rows = [
        [
            name,
            el("td", json.dumps(value, ensure_ascii=False, default=str), class_="mono break"),
            run.sources.get(name, "-"),
        ]
        for name, value in run.spec.items()
        if value is not None
    ]
    return [el("h2", "Configuration"), _table(("field", "value", "from"), rows)]


def _events(store: Store, run_id: str, view: RunView) -> list[Child]:
    rows = [
        [
            time.strftime("%H:%M:%S", time.gmtime(event.time)),
            f"{event.epoch}",
            event.kind,
            event.message,
        ]
        for event in store.events(run_id, limit=30)
    ]
    log = (
        [el("summary", "End of the newest attempt's log"), el("pre", view.log_tail)]
        if view.log_tail
        else []
    )
    return [
        *([el("h2", "Events"), _table(("UTC", "attempt", "kind", ""), rows)] if rows else []),
        el("details", *log) if log else None,
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[Child]]) -> Element:
    """`#` before a column's name sets it to the right. A cell is text or its own td."""
    heads = (
        el("th", name.lstrip("#"), class_="number" if name.startswith("#") else None)
        for name in columns
    )
    lines = (
        el(
            "tr",
            *(
                cell if isinstance(cell, Element) and cell.tag == "td" else el("td", cell)
                for cell in row
            ),
        )
        for row in rows
    )
    return el("div", el("table", el("thead", el("tr", *heads)), el("tbody", *lines)), class_="wide")


def _number(value: float | str | None) -> Element:
    text = "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"
    return el("td", text, class_="number")
