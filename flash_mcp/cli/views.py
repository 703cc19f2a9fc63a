"""Runs, transcripts and checkpoints laid out for people: what decides comes first, a line fits the
terminal, and colours are only on a terminal."""

from __future__ import annotations

import calendar
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from flash_mcp.cli.output import render, say, to_json, visible
from flash_mcp.protocol.numbers import duration, number, percent
from flash_mcp.state.disk import in_words
from flash_mcp.tools.checkpoints import CheckpointList
from flash_mcp.tools.environments import EnvTest
from flash_mcp.tools.rollouts import Rollouts, RolloutView
from flash_mcp.tools.shared.run_view import headline
from flash_mcp.tools.shared.scores import Scores
from flash_mcp.tools.status import RunLine, Status

if TYPE_CHECKING:
    from pydantic import BaseModel

    from flash_mcp.judgement.health import Trend
    from flash_mcp.tools.shared.run_view import HeldOut, RunView


Style = Literal["bold", "dim", "good", "bad", "warn"]
Cell = str | tuple[str, Style | None]
CODES: dict[Style, int] = {"bold": 1, "dim": 2, "good": 32, "bad": 31, "warn": 33}
STATES: dict[str, Style] = {"succeeded": "good", "failed": "bad", "running": "warn"}
OUTCOMES: dict[str, Style] = {
    "improved": "good",
    "regressed": "bad",
    "constant": "bad",
    "contaminated": "bad",
    "destroyed": "bad",
}
WIDTH = 80
WIDEST = 110
"""Longer lines are hard to read."""
ROLE = 11
"""Columns of a message's role."""
CHECK = 13
"""Columns of a check's name."""
CHECK_MARKS: dict[str | None, tuple[str, Style | None]] = {
    None: ("✓", None),
    "failed": ("✗", "bad"),
    "open": ("-", "warn"),
}
DETAILS = ("failures", "metrics", "lineage", "values", "sources", "log_tail")
"""Fields of a detailed report, which follow the report as they are."""
COLUMNS = ("SUCCESS", "95 % INTERVAL", "REWARD", "CONSTANT", "CUT OFF", "ERRORS")
CHECKPOINT_COLUMNS = (
    *("STEP", "HELD OUT", "HELD-OUT LOSS", "SUCCESS", "REWARD", "LOSS"),
    *("SIZE", "DIGEST", "SAVED (UTC)"),
)


class Page:
    """Lines for a terminal."""

    def __init__(self) -> None:
        self.is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        columns = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
        self.width = min(columns, WIDEST)
        self.lines: list[str] = []

    def styled(self, text: str, style: Style | None = None) -> str:
        text = visible(text)
        if style and self.is_coloured:
            return f"\033[{CODES[style]}m{text}\033[0m"
        return text

    def line(self, text: str = "", style: Style | None = None) -> None:
        self.lines.append(self.styled(text, style))

    def prose(self, text: str | None, style: Style | None = None, label: str = "") -> None:
        """Sentences, if there are any, folded at the width; the first line begins with `label`, and
        the others are indented as far.
        """
        rest = " " * len(label)
        first = label
        width = max(20, self.width - len(label))
        for paragraph in visible(text).split("\n") if text else ():
            for line in textwrap.wrap(paragraph, width, break_on_hyphens=False) or [""]:
                start = self.styled(first, "dim") if first.strip() else first
                self.lines.append(f"{start}{self.styled(line.rstrip(), style)}".rstrip())
                first = rest

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Columns as wide as their cells, without empty ones; the last is cut at the width."""
        cells: list[Sequence[Cell]] = [[(name, "dim") for name in header], *rows]
        shown: list[tuple[int, int]] = []
        for column in range(len(header)):
            if any(_text(row[column]) for row in rows):
                shown.append((column, max(len(_text(row[column])) for row in cells)))
        for row in cells:
            used = 0
            line = ""
            for column, width in shown:
                text = _text(row[column])
                if column == shown[-1][0] and len(text) > self.width - used:
                    text = f"{text[: self.width - used - 1]}…"
                cell = row[column]
                style = cell[1] if isinstance(cell, tuple) else None
                line += self.styled(text, style) + " " * (width - len(text) + 2)
                used += width + 2
            self.lines.append(line.rstrip())


def show(result: BaseModel, as_json: bool) -> None:
    """Print a tool's result; for people with `next` as a command."""
    body = result.model_dump(mode="json")
    if as_json:
        say(to_json(body, ensure_ascii=False))
    elif page := _page_of(result):
        sys.stdout.write(f"{page}\n")  # already visible; `say` would show its colours as signs
    else:
        say("\n".join(render(body)))


def _page_of(result: BaseModel) -> str | None:
    """None for a result without a layout of its own."""
    page = Page()
    next_step = getattr(result, "next", "")
    if isinstance(result, Status) and result.run:
        _run(page, result.run)
        if next_step.startswith("status("):  # an agent waits with its own calls
            command = f"flash-mcp status {result.run.run_id} --follow"
            next_step = f"`{command}` draws the curve as it grows"
    elif isinstance(result, Status) and result.runs is not None:
        _runs(page, result.runs, result.counts or {})
    elif isinstance(result, Rollouts):
        page.line(
            f"{len(result.rollouts)} of {result.total} transcripts of {result.run_id}", "bold"
        )
        if result.failures:
            modes = [f"{count} {name}" for name, count in result.failures.items()]
            page.prose(", ".join(modes), label="failed: ")
        for message in result.opening or ():
            page.prose(message.content, "dim", label=f"{message.role:{ROLE}}")
        for tool in result.tools or ():
            page.prose(tool, "dim", label="tool       ")
        for row in result.rollouts:
            _rollout(page, row)
    elif isinstance(result, CheckpointList) and not result.export:
        _checkpoints(page, result)
    elif isinstance(result, EnvTest) and result.probes:
        verdicts: dict[bool | None, tuple[str, Style]] = {
            True: ("passed", "good"),
            False: ("failed", "bad"),
            None: ("unfinished", "warn"),
        }
        verdict, style = verdicts[result.passed]
        tasks = f"{result.train_tasks} train and {result.eval_tasks} eval tasks"
        # Not folded, for the path of the folder may be longer than a line.
        page.line(f"{verdict}: {result.environment}, {tasks}, in {result.seconds:.1f} s", style)
        page.line()
        for probe in result.probes:
            mark, style = CHECK_MARKS[probe.result]
            page.prose(probe.evidence, style, label=f"{mark} {probe.name:{CHECK}} ")
            if probe.fix and probe.result:
                page.prose(probe.fix, label=f"  {'fix':{CHECK}} ")
        page.prose(", ".join(result.accepted or ()), label=f"{'accepted':{CHECK + 3}}")
        page.prose(result.sandbox, "dim", label=f"{'sandbox':{CHECK + 3}}")
        if result.sample:
            page.lines += map(visible, render({"sample": result.sample.model_dump(mode="json")}))
    else:
        return None
    page.line()
    if cursor := getattr(result, "cursor", None):
        page.line(f"More: --cursor {cursor}", "dim")
        next_step = re.sub(r"(^|; )cursor brings[^;]*", "", next_step).removeprefix("; ")
    # Not folded: a command that is copied has to stay one line.
    page.line(f"Next: {next_step}")
    return "\n".join(page.lines)


# -- cells -----------------------------------------------------------------------------------------


def _age(created: str) -> str:
    seconds = time.time() - calendar.timegm(time.strptime(created, "%Y-%m-%d %H:%M"))
    if seconds < 60:
        return "now"
    return " ".join(duration(seconds).split()[:2])


def _text(cell: Cell) -> str:
    text = cell if isinstance(cell, str) else cell[0]
    return visible(text).replace("\n", " ")


# -- one run ---------------------------------------------------------------------------------------


def _run(page: Page, view: RunView) -> None:
    style = STATES.get(view.state) if view.state == "failed" else None
    if view.verdict:
        style = OUTCOMES.get(view.verdict.outcome)
    page.line(headline(view), style or "bold")
    subject = f"{view.algorithm} of {view.model} on {view.environment.partition('@')[0]}"
    page.prose(": ".join(filter(None, [view.run_id, view.name, subject])), "dim")
    page.prose(_progress(view), STATES.get(view.state))
    page.prose(view.last_step)
    page.prose(view.note, label="note  ")
    if view.cancel_reason:
        page.prose(f"Cancelled: {view.cancel_reason}")
    if view.pending_reason:
        page.prose(f"Waiting: {view.pending_reason}", "warn")
    if view.error:
        page.line()
        named = " ".join(filter(None, [view.error.code, view.error.values]))
        page.prose(f"[{named}] {view.error.what}", "bad")
        page.prose(view.error.fix or "", label="Fix: ")
        page.prose(view.error.log_tail, "dim", label="  | ")
    _numbers(page, view)
    for flag in view.flags or ():
        page.line()
        page.line(f"{flag.severity}: {flag.name}", "bad" if flag.severity == "problem" else "warn")
        evidence = flag.evidence[:1].upper() + flag.evidence[1:]
        page.prose(f"{evidence}. {flag.remedy}", label="  ")
    for warning in view.warnings or ():
        page.prose(warning, "warn", label="! ")
    if view.outlook and view.state != "succeeded":
        page.line()
        page.prose(f"Worth continuing? {view.outlook}")
    body = view.model_dump(mode="json", include=set(DETAILS), exclude_none=True)
    if details := {name: body[name] for name in DETAILS if body.get(name)}:
        page.line()
        page.lines += map(visible, render(details))


def _progress(view: RunView) -> str:
    unit = "attempts" if view.algorithm == "eval" else "steps"
    steps = f"{view.step} of {view.steps}" if view.steps else str(view.step)
    parts = [view.state, f"{steps} {unit}"]
    if view.elapsed_s is not None:
        parts.append(f"in {duration(view.elapsed_s)}")
    if view.eta_s is not None:
        parts.append(f"{duration(view.eta_s)} left")
    if view.step_s:
        step = duration(view.step_s) if view.step_s >= 10 else f"{number(view.step_s)} s"
        parts.append(f"{step} each")
    if view.queued_ahead:
        parts.append(f"{view.queued_ahead} before it")
    if view.attempt:
        parts.append(f"attempt {view.attempt}")
    return ", ".join([*parts, *filter(None, [view.phase, view.target, view.cost])])


def _numbers(page: Page, view: RunView) -> None:
    trends = [
        _trend("reward", view.reward, number),
        _trend("success", view.success, percent),
        _trend("loss", view.loss, number),
        _trend("held-out loss", view.held_out_loss, number),
    ]
    if rows := list(filter(None, trends)):
        page.line()
        page.table(("TRAINING", "FROM", "TO", "BEST", "EVERY STEP"), rows)
    if view.held_out:
        page.line()
        rows = [[f"step {p.step}" if p.step else "before", *_measured(p)] for p in view.held_out]
        page.table(("HELD OUT", *COLUMNS), rows)
    if view.verdict:
        page.prose(view.verdict.explanation)
    page.prose(view.best, label="best  ")
    for line in view.mixture or ():
        page.prose(line, label="- ")
    page.prose(view.regression, label="elsewhere  ")
    page.prose(view.seeds)
    for line in view.exams or ():
        page.prose(line, label="exam       ")
    if scores := view.scores:
        page.line()
        if scores.success is None:
            page.prose(f"All {scores.errors} attempts failed in environment code.", "bad")
        else:
            page.table(("TASKS", *COLUMNS), [[str(scores.tasks), *_measured(scores)]])
            rates = (scores.pass_at or {}).items()
            page.prose(", ".join(f"{name} {percent(share)}" for name, share in rates))
            page.prose(scores.doubt, "warn")
    if by_label := view.by_label:
        page.line()
        labels: list[list[Cell]] = []
        for row in by_label.labels:
            taken_for = (row.taken_for or {}).items()
            wrong = ", ".join(f"{answer} {count}" for answer, count in taken_for)
            labels.append([row.label, str(row.n), percent(row.right), number(row.f1), wrong])
        page.table(("LABEL", "N", "RIGHT", "F1", "TAKEN FOR"), labels)
        balanced = f"{percent(by_label.balanced)} if each label were as common"
        more = f"; {by_label.more} more labels" if by_label.more else ""
        page.prose(f"Macro-F1 {number(by_label.macro_f1)}, {balanced}{more}.")
        page.prose(by_label.baseline, label="baseline  ")
        page.prose(by_label.few, "warn")


def _trend(name: str, trend: Trend | None, form: Any) -> list[Cell]:
    if trend is None:
        return []
    return [name, form(trend.first), (form(trend.last), "bold"), form(trend.best), trend.spark]


def _measured(point: HeldOut | Scores) -> list[Cell]:
    low = percent(point.low or 0.0).removesuffix(" %")
    return [
        (percent(point.success), "bold"),
        f"{low} to {percent(point.high or 0.0)} of {point.n}",
        number(point.reward),
        percent(point.constant),
        percent(point.truncated),
        str(point.errors or "") if isinstance(point, Scores) else percent(point.errors),
    ]


# -- lists -----------------------------------------------------------------------------------------


def _runs(page: Page, lines: Sequence[RunLine], counts: dict[str, int]) -> None:
    states = [f"{count} {state}" for state, count in counts.items() if count]
    page.line(", ".join(states) or "No runs yet.", "bold")
    if not lines:
        return
    page.line()
    rows: list[list[Cell]] = []
    for line in lines:
        progress = line.state
        if line.state != "succeeded" and line.step:
            progress += f" {line.step}/{line.steps or '?'}"
        subject = f"{line.environment}, {line.model}"
        rows.append(
            [
                line.run_id,
                (progress, STATES.get(line.state)),
                _outcome(line),
                f"{_age(line.created):<6}",
                line.algorithm,
                line.owner or "",
                f"{line.name}: {subject}" if line.name else subject,
            ]
        )
    page.table(("RUN", "STATE", "RESULT", "AGE", "KIND", "OWNER", "WHAT"), rows)


def _outcome(line: RunLine) -> Cell:
    if line.error:
        return line.error, "bad"
    if line.success is not None:
        words = [percent(line.success), (line.verdict or "").replace("_", " ")]
        return " ".join(words).rstrip(), OUTCOMES.get(line.verdict or "")
    if line.reward is not None:
        return f"reward {number(line.reward)}", "dim"
    return ""


def _rollout(page: Page, row: RolloutView) -> None:
    outcome = {True: "success", False: row.failure or "no success", None: ""}[row.success]
    style: Style = "good" if row.success else "bad"
    parts = [row.task_id, f"step {row.step} #{row.index}", outcome]
    if row.reward is not None:
        parts.append(f"reward {number(row.reward)}")
    parts += [f"{name} {number(value)}" for name, value in (row.metrics or {}).items()]
    parts.append(f"{row.completion_tokens} tokens")
    if row.finish and row.finish != "done":
        parts.append(row.finish)
    page.line()
    page.prose(", ".join(parts), style if row.success is not None else "bold")
    page.prose(row.reason, label="scorer     ")
    page.prose(row.expected, "good", label="expected   ")
    page.prose(row.error, "bad", label="error      ")
    for call, count in (row.refused or {}).items():
        page.prose(f"{call}, {count} times", "warn", label="refused    ")
    for message in row.messages:
        page.prose(message.content, label=f"{message.role[: ROLE - 1]:{ROLE}}")
    if row.messages_in_all:
        page.line(f"{len(row.messages)} of {row.messages_in_all} messages", "dim")
    for call in row.calls or ():
        text = [call.role or "", "" if call.trained else "not trained", call.finish]
        text.append(f"{call.prompt_tokens} tokens read, {call.completion_tokens} written")
        page.prose(", ".join(filter(None, text)), "dim", label=f"call {call.number}".ljust(ROLE))


def _checkpoints(page: Page, result: CheckpointList) -> None:
    rows = result.checkpoints
    if not rows:
        page.line(f"No checkpoints of {result.run_id}, {result.state}", "bold")
        return
    count = "1 checkpoint" if len(rows) == 1 else f"{len(rows)} checkpoints"
    page.line(f"{count} of {result.run_id}, {result.state}", "bold")
    page.line()
    lines: list[list[Cell]] = []
    for row in rows:
        lines.append(
            [
                str(row.step),
                (percent(row.eval_success), "bold"),
                number(row.held_out_loss),
                percent(row.success),
                number(row.reward),
                number(row.loss),
                in_words(row.size_bytes),
                row.digest[:12],
                row.saved,
            ]
        )
    page.table(CHECKPOINT_COLUMNS, lines)
    page.line()
    page.line(f"The first is in {rows[0].path}")
