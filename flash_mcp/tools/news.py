"""What is new about a run since a caller last looked. The server remembers no caller: a cursor that
the caller passes back says what it was told.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from anyio.to_thread import run_sync

from flash_mcp.judgement import health
from flash_mcp.judgement.comparison import Verdict
from flash_mcp.judgement.health import Flag, Trend
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import Run, RunState
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.state.store import Store
from flash_mcp.tools.shared import waiting
from flash_mcp.tools.shared.next_steps import next_of, waiting_for
from flash_mcp.tools.shared.run_view import Failure, HeldOut, RunReport, report_on
from flash_mcp.tools.shared.scores import Scores

Until = Literal["news", "end"]
CURSOR = re.compile(
    r"(?P<run>..)(l(?P<lost>\d+))?(e(?P<evaluations>\d+))?(c(?P<checkpoint>\d+))?(?P<blocked>h)?"
    r"(-(?P<flags>[A-Za-z]+))?",
    re.ASCII,
)
"""Short, since every call without news sends it: parts that are 0 are left out."""
FLAG_LETTERS = {**health.LETTERS, health.CONTAMINATED: "s", health.WORSE_ELSEWHERE: "x"}
"""With the flags that no check raises."""


class News(ResultModel):
    """What is new about a run since the caller's last look; all else is as it was."""

    state: RunState
    step: int
    steps: int | None = None
    eta_s: int | None = None
    trends: dict[str, Trend] | None = None
    held_out: list[HeldOut] | None = None
    verdict: Verdict | None = None
    mixture: list[str] | None = None
    regression: str | None = None
    checkpoint: int | None = None
    outlook: str | None = None
    flags: list[Flag] | None = None
    warnings: list[str] | None = None
    scores: Scores | None = None
    error: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class NewsCursor:
    """What a caller was told of a run. As text it is the cursor `since`."""

    run: str
    """The end of its id: a cursor of another run would hide news."""
    lost: int = 0
    """Attempts that were lost."""
    evaluations: int = 0
    checkpoint: int = 0
    """Step of the newest."""
    blocked: bool = False
    flags: str = ""
    """FLAG_LETTERS of the flags, in capitals if they were problems."""

    def __str__(self) -> str:
        counts = {"l": self.lost, "e": self.evaluations, "c": self.checkpoint}
        parts = [f"{letter}{count}" for letter, count in counts.items() if count]
        if self.blocked:
            parts.append("h")
        if self.flags:
            parts.append(f"-{self.flags}")
        return self.run + "".join(parts)

    @classmethod
    def parse(cls, run_id: str, since: str | None) -> Self:
        """FlashError(invalid_argument) for a text that is no cursor of this run."""
        run = run_id[-2:]
        if since is None:
            return cls(run=run)
        match = CURSOR.fullmatch(since)
        if match is None or match["run"] != run:
            what = f"that is no cursor of {run_id}"
            fix = "pass `since` as the last result of this run has it, or leave it out"
            raise FlashError("invalid_argument", what, since=since, fix=fix)
        names = ("lost", "evaluations", "checkpoint")
        counts = {name: int(match[name] or 0) for name in names}
        return cls(run=run, blocked=bool(match["blocked"]), flags=match["flags"] or "", **counts)

    def has(self, flag: Flag) -> bool:
        """Whether the flag was told, as grave as it is now."""
        letter = _letter(flag)
        return letter in self.flags or letter.upper() in self.flags

    def after(self, report: RunReport) -> NewsCursor:
        """What a caller has been told once it saw this report."""
        return NewsCursor(
            run=self.run,
            lost=_lost(report.run),
            evaluations=len(report.evaluations),
            checkpoint=max(self.checkpoint, report.view.checkpoint or 0),
            blocked=bool(report.blocked),
            flags=self.flags + "".join(map(_letter, self.new_flags(report))),
        )

    def new_flags(self, report: RunReport) -> list[Flag]:
        return [flag for flag in report.flags if not self.has(flag)]

    def misses(self, report: RunReport, until: Until) -> bool:
        run = report.run
        is_blocked = bool(report.blocked) and not self.blocked
        if run.ended is not None or _lost(run) > self.lost or is_blocked:
            return True
        new_flags = self.new_flags(report)
        if until == "end":
            return any(flag.severity == "problem" for flag in new_flags)
        is_saved = (report.view.checkpoint or 0) > self.checkpoint
        return bool(new_flags) or is_saved or len(report.evaluations) > self.evaluations


def _letter(flag: Flag) -> str:
    letter = FLAG_LETTERS[flag.name]
    if flag.severity == "problem":
        return letter.upper()
    return letter


def _lost(run: Run) -> int:
    """Attempts that were lost: the newest one is under way, or was the last."""
    under_way = 0 if run.state == "queued" else 1
    return max(0, run.attempt - under_way)


async def wait_for_news(
    store: Store, run_id: str, cursor: NewsCursor, until: Until, wait_s: float
) -> RunReport:
    """The report as soon as it has what the caller waits for, or as it is after `wait_s`."""
    start_s = await run_sync(lambda: store.usual_start_s(store.run(run_id)))

    @functools.lru_cache(maxsize=1)
    def report_at(mark: object) -> RunReport:
        """The report, made anew whenever something about the run changed."""
        return report_on(store, run_id)

    def read() -> RunReport:
        run = store.run(run_id)
        return report_at((*waiting.fingerprint(store, run), *waiting.obstacles(store, run)))

    def progress(report: RunReport) -> tuple[str, float | None]:
        return waiting.progress_of(report.run, report.view.step_s, start_s)

    deadline = waiting.deadline_after(wait_s)
    return await waiting.wait_until(
        read, lambda report: cursor.misses(report, until), deadline, progress
    )


def one_line(report: RunReport) -> str:
    view = report.view
    parts = [f"step {view.step}" + (f"/{view.steps}" if view.steps else "")]
    is_counted = view.phase is not None and view.phase.startswith("eval ")
    if not view.step or is_counted:
        parts.insert(0, view.phase or view.state)
    if view.success:
        parts.append(f"success {percent(view.success.last)}")
    elif view.loss:
        parts.append(f"loss {view.loss.last:.2f}")
    if view.eta_s is not None:
        parts.append(f"{max(1, round(view.eta_s / 60))} min left")
    if report.blocked:
        parts.append("still held up")
    return ", ".join(parts)


def news_of(report: RunReport, cursor: NewsCursor) -> News:
    """The parts of the report that the caller was not told."""
    view = report.view
    is_over = report.run.ended is not None
    new_flags = cursor.new_flags(report)
    is_lost = _lost(report.run) > cursor.lost
    news = News(state=view.state, step=view.step, steps=view.steps, eta_s=view.eta_s)
    if len(report.evaluations) > cursor.evaluations:
        new = {row.step for row in report.evaluations[cursor.evaluations :]}
        news.held_out = [row for row in view.held_out or () if row.step in new] or None
        news.verdict = view.verdict
        news.mixture = view.mixture
    if (view.checkpoint or 0) > cursor.checkpoint:
        news.checkpoint = view.checkpoint
    news.flags = new_flags or None
    if is_over or new_flags:
        news.outlook = view.outlook
    if is_over:
        names = ("reward", "success", "loss", "held_out_loss")
        news.trends = {name: trend for name in names if (trend := getattr(view, name))} or None
        news.mixture = view.mixture
        news.regression = view.regression
        news.scores = view.scores
    if is_over or report.blocked:
        news.warnings = view.warnings
    if is_over or is_lost:
        news.error = view.error
    return news


def next_call(report: RunReport, cursor: NewsCursor, until: Until, since: str) -> str:
    """What to do after a look: what is new decides, and the look again comes last."""
    wait = waiting_for(report.run.id, until, since)
    flags = report.flags if report.run.ended else cursor.new_flags(report)
    return next_of(replace(report, flags=flags, wait=wait))
