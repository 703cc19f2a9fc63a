"""status: the report on a run, or the list of runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Literal

from anyio.to_thread import run_sync
from pydantic import Field

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run, RunState
from flash_mcp.protocol.result_model import rounded
from flash_mcp.state.history import NEWEST_STEPS
from flash_mcp.state.owners import caller
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.news import (
    News,
    NewsCursor,
    Until,
    news_of,
    next_call,
    one_line,
    wait_for_news,
)
from flash_mcp.tools.shared import tool_base
from flash_mcp.tools.shared.next_steps import next_of, waiting_for
from flash_mcp.tools.shared.resolve import adapter_name
from flash_mcp.tools.shared.run_view import RunHead, RunView, report_on
from flash_mcp.tools.shared.scores import verdict_of
from flash_mcp.tools.shared.truncation import to_text, utc
from flash_mcp.tools.shared.waiting import wait_for_change

LINES_CHARACTERS = 7_500
"""What the lines of a list may take of a result."""


class RunLine(RunHead):
    """A run in the list."""

    owner: str | None = None
    reward: float | None = None
    success: float | None = None
    verdict: str | None = None
    parent: str | None = None
    created: str
    error: str | None = None


class Status(tool_base.Result):
    """One run, or the list of runs."""

    run: RunView | None = None
    """With run_id."""
    changed: bool | None = None
    """With wait_s but not until: whether something changed while waiting."""
    news: News | None = None
    """With since: what is new."""
    now: str | None = None
    """With until, without news: where the run is."""
    runs: list[RunLine] | None = None
    """Without run_id: newest first."""
    counts: dict[str, int] | None = None
    """Without run_id: runs by state."""
    has_more: bool | None = None
    """Whether older runs follow."""
    cursor: str | None = None
    """Pass as `cursor` for the next page."""
    since: str | None = None
    """Pass as `since` to be told only what is new; `next` has it."""


async def status(
    run_id: str | None = None,
    until: Until | None = None,
    since: Annotated[str, Field(min_length=1)] | None = None,
    wait_s: Annotated[float, Field(ge=0, le=45)] | None = None,
    detail: Literal["concise", "detailed"] = "concise",
    curve: bool = False,
    state: RunState | None = None,
    limit: Annotated[int, Field(ge=1, le=40)] = 15,
    cursor: str | None = None,
) -> Status:
    """Report the progress of a run, what its numbers mean and what to do next. Without run_id, list
    the runs.

    The report has the state and step, the trend of reward and success, held-out evaluations with
    their noise band and a verdict, speed and time left, whether to continue, warning signs with
    remedies, and the error of a failed run with evidence. To follow a run, wait for news with
    until: nothing is told twice. For transcripts call rollouts, for saved adapters checkpoints.

    Args:
        run_id: Run id. Without it: the list of runs, newest first.
        until: With run_id: wait; 43 s, or up to an hour if the client asks for progress. news: for
            a flag, evaluation, checkpoint, lost attempt or the end, never a mere step; end: for the
            end or a problem.
        since: `since` of the last result: tells only what is new; until is then news.
        wait_s: Seconds to wait, at most, for until; without it, for any change.
        detail: detailed adds all metrics, failure modes, lineage, values with sources, the
            log's end.
        curve: With run_id: add the curve as a picture.
        state: Without run_id: only runs in this state.
        limit: Without run_id: runs per page.
        cursor: Without run_id: `cursor` of the previous page.
    """
    store = open_store()
    if run_id is None and (until or since):
        what = "until and since need run_id"
        raise FlashError("invalid_argument", what, fix="status() lists the runs; name one of them")
    if run_id is None:
        return await run_sync(_list, store, state, limit, cursor)
    if until or since:
        return await _follow(store, run_id, until or "news", since, wait_s)
    changed = await wait_for_change(store, run_id, wait_s) if wait_s else None
    if curve:
        tool_base.illustrate(await run_sync(store.curve, run_id))
    shown = await run_sync(_shown, store, run_id, detail == "detailed")
    shown.changed = changed
    return shown


def _shown(store: Store, run_id: str, detailed: bool) -> Status:
    """The whole report. What waits for more does not tell it again."""
    report = report_on(store, run_id, detailed=detailed)
    run = report.run
    if run.ended is not None or run.algorithm == "eval":  # both have all to tell at the end
        return Status(run=report.view, next=next_of(report))
    cursor = NewsCursor.parse(run_id, None)
    reached = str(cursor.after(report))
    next_step = next_call(report, cursor, "news", reached)
    return Status(run=report.view, since=reached, next=next_step)


async def _follow(
    store: Store, run_id: str, until: Until, since: str | None, wait_s: float | None
) -> Status:
    """Wait, then tell what the cursor `since` says that the caller was not told."""
    cursor = NewsCursor.parse(run_id, since)
    limit = tool_base.longest_wait_s() if wait_s is None else wait_s
    report = await wait_for_news(store, run_id, cursor, until, limit)
    if not cursor.misses(report, until):
        again = waiting_for(run_id, until, since)
        return Status(now=one_line(report), next=again)
    reached = str(cursor.after(report))
    next_step = next_call(report, cursor, until, reached)
    if since is None:
        return Status(run=report.view, since=reached, next=next_step)
    return Status(news=news_of(report, cursor), since=reached, next=next_step)


def _list(store: Store, state: str | None, limit: int, cursor: str | None) -> Status:
    try:
        rows = store.runs(state, limit + 1, cursor)
    except FlashError as error:
        if error.code != "unknown_run":
            raise
        raise tool_base.no_cursor(cursor, "status") from error
    lines = _lines(store, rows[:limit])
    has_more = len(rows) > len(lines)
    if has_more:
        next_step = f"status(run_id={lines[0].run_id!r}) reports one; cursor brings older ones"
    elif lines:
        next_step = f"status(run_id={lines[0].run_id!r}) reports one"
    elif state:
        next_step = f"no run is {state}: leave state out for all"
    else:
        next_step = "no runs yet: train starts one; catalog lists the environments"
    return Status(
        runs=lines,
        counts=store.run_counts(),
        has_more=has_more,
        cursor=lines[-1].run_id if has_more else None,
        next=next_step,
    )


def _lines(store: Store, rows: Sequence[Run]) -> list[RunLine]:
    lines: list[RunLine] = []
    characters = 0
    for run in rows:
        # Not `report_on`: a list shows no advice, and has to cost little for many runs.
        rewards = store.values(run.id, "reward/mean", NEWEST_STEPS)
        evaluations = [row for row in store.evals(run.id) if row.can_be_judged]
        verdict = verdict_of(store, run, evaluations)
        is_its_own = evaluations and (evaluations[-1].step or run.algorithm == "eval")
        line = RunLine(
            run_id=run.id,
            name=run.name,
            owner=run.owner if run.owner != caller().owner else None,
            state=run.state,
            algorithm=run.algorithm,
            model=run.model,
            environment=run.environment,
            step=run.step,
            steps=run.steps,
            reward=rounded(fmean(rewards), 3) if rewards else None,
            success=rounded(evaluations[-1].summary["success"], 3) if is_its_own else None,
            verdict=verdict.outcome if verdict else None,
            parent=adapter_name(run.init_adapter),
            created=utc(run.created),
            error=run.error["code"] if run.error and run.state == "failed" else None,
        )
        characters += len(to_text(line.model_dump(mode="json")))
        if lines and characters > LINES_CHARACTERS:
            break
        lines.append(line)
    return lines
