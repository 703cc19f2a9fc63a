"""What a run's stored rollouts would have earned in another version of its environment."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import anyio

from environments.checks.constants import best_constant
from environments.checks.replay import GONE, Replayed, StoredConversation, replay
from environments.process.host import EnvironmentHost, Score
from environments.untrusted_text import marked
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Rollout
from flash_mcp.protocol.result_model import Rounded
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.scores import conversation
from flash_mcp.tools.shared.tool_base import ResultModel
from flash_mcp.tools.shared.truncation import shorten, shorten_as_json

MOST = 1000
"""Rollouts that one call plays again, the newest ones."""
SHOWN = 3
"""Transcripts of each kind."""
CHARACTERS = 300
CONSTANT_TASKS = 40


class Earned(ResultModel):
    """Of all rollouts that were played again."""

    reward: Rounded
    success: Rounded


class Moved(ResultModel):
    """A rollout that earns something else."""

    step: int
    index: int
    task_id: str
    reward: list[Rounded]
    success: list[bool]
    text: str
    reason: str | None = None


class Replay(ResultModel):
    """What a run's rollouts earn now."""

    run_id: str
    of: int
    played: int
    before: Earned | None = None
    now: Earned | None = None
    moved: int
    newly: int
    no_longer: int
    groups: int = 0
    taught: int = 0
    teach: int = 0
    no_longer_teach: int = 0
    other_way: int | None = None
    gone: int | None = None
    failed_before: int | None = None
    late: int | None = None
    faulty: str | None = None
    now_successes: list[Moved] | None = None
    now_failures: list[Moved] | None = None
    paid_less: list[Moved] | None = None
    constant: str | None = None


@dataclass(frozen=True)
class Stored:
    """The newest rollouts of a run, and the same as they are played again."""

    run_id: str
    rows: Sequence[Rollout]
    attempts: Sequence[StoredConversation]
    total: int
    """Rollouts that the run has."""
    failed: int
    """Of the newest ones, those that the environment failed."""


def stored_rollouts(store: Store, run_id: str) -> Stored:
    """FlashError(invalid_argument | unknown_run) if the run has none that can be played again."""
    run = store.run(run_id)
    run.refuse_exam()
    fix = "name a run whose rollouts lists transcripts of one environment"
    if isinstance(run.spec, RunSpec) and run.spec.mixture:
        what = f"{run_id} mixes environments: its rollouts are not played again"
        raise FlashError("invalid_argument", what, run_id=run_id, fix=fix)
    stored = split = "train"
    if run.algorithm == "eval":
        stored, split = "eval", run.eval_split
    total = store.rollout_count(run_id, stored, None, None, None)
    skipped = max(0, total - MOST)
    newest = store.rollouts(run_id, stored, order="index", limit=MOST, offset=skipped)
    rows = [row for row in newest if row.error is None]
    if not rows:
        raise FlashError("invalid_argument", f"{run_id} has no rollouts", run_id=run_id, fix=fix)
    if any(row.calls for row in rows):
        what = f"the rollouts of {run_id} are of an agent's program, which decides what it asks"
        fix = "evaluate plays the new version with the model"
        raise FlashError("invalid_argument", what, run_id=run_id, fix=fix)
    attempts: list[StoredConversation] = []
    for row in rows:
        group = (row.step, row.group)
        cut = row.finish != "done"
        attempts.append(
            StoredConversation(split, row.task_id, group, row.messages, row.prompt_messages, cut)
        )
    return Stored(run_id, rows, attempts, total, len(newest) - len(rows))


async def played_again(host: EnvironmentHost, stored: Stored, seconds: float) -> Replay:
    started = time.monotonic()
    # A third of the time is for the constants.
    found = await replay(host, stored.attempts, started + seconds * 2 / 3)
    constant = None
    split = "eval"
    if not host.splits[split]:
        split = "train"
    with anyio.move_on_after(started + seconds - time.monotonic()):
        tasks = range(min(CONSTANT_TASKS, host.splits[split]))
        constant = await best_constant(host, split, tasks, at_once=8)
    result = _compared(stored, found)
    if constant:
        share = f"{sum(constant.successes)} of {len(constant.successes)} {split} tasks"
        result.constant = f"succeeds on {share}, mean reward {constant.mean_reward:.3g}:\n"
        result.constant += marked(shorten(constant.answer, 100))
    return result


def _compared(stored: Stored, found: Mapping[int, Replayed]) -> Replay:
    scored: list[tuple[Rollout, Score]] = []
    faults: list[str] = []
    other_way = gone = 0
    for number, item in sorted(found.items()):
        if item.score:
            scored.append((stored.rows[number], item.score))
            other_way += bool(item.why)
        elif item.why == GONE:
            gone += 1
        else:
            faults.append(item.why)
    newly = [pair for pair in scored if pair[1].success and not pair[0].success]
    no_longer = [pair for pair in scored if pair[0].success and not pair[1].success]
    rest = [pair for pair in scored if pair[0].success == pair[1].success and _change(pair) < 0]
    result = Replay(
        run_id=stored.run_id,
        of=stored.total,
        played=len(scored),
        moved=sum(_change(pair) != 0 for pair in scored),
        newly=len(newly),
        no_longer=len(no_longer),
        other_way=other_way or None,
        gone=gone or None,
        failed_before=stored.failed or None,
        late=len(stored.rows) - len(found) or None,
        now_successes=_shown(newly),
        now_failures=_shown(no_longer),
        paid_less=_shown(sorted(rest, key=_change)),
    )
    if faults:
        result.faulty = f"{len(faults)}, the first:\n{marked(faults[0])}"
    if scored:
        result.before = Earned(
            reward=fmean(row.reward for row, _ in scored),
            success=fmean(row.success for row, _ in scored),
        )
        result.now = Earned(
            reward=fmean(score.reward for _, score in scored),
            success=fmean(score.success for _, score in scored),
        )
    _count_groups(result, stored, found)
    return result


def _count_groups(result: Replay, stored: Stored, found: Mapping[int, Replayed]) -> None:
    members: dict[tuple[int, int], list[int]] = {}
    for number, attempt in enumerate(stored.attempts):
        members.setdefault(attempt.group, []).append(number)
    for numbers in members.values():
        scores = [item.score for number in numbers if (item := found.get(number)) and item.score]
        if len(numbers) < 2 or len(scores) < len(numbers):
            continue
        varied = len({stored.rows[number].reward for number in numbers}) > 1
        varies = len({score.reward for score in scores}) > 1
        result.groups += 1
        result.taught += varied
        result.teach += varies
        result.no_longer_teach += varied and not varies


def _change(pair: tuple[Rollout, Score]) -> float:
    """Of the reward; what rounding makes of a sum is none."""
    change = pair[1].reward - pair[0].reward
    if abs(change) <= 1e-9:
        return 0.0
    return change


def _shown(pairs: Sequence[tuple[Rollout, Score]]) -> list[Moved] | None:
    results: list[Moved] = []
    for row, score in pairs[:SHOWN]:
        moved = Moved(
            step=row.step,
            index=row.index,
            task_id=row.task_id,
            reward=[row.reward, score.reward],
            success=[row.success, score.success],
            text=shorten_as_json(conversation(row), CHARACTERS),
            reason=score.reason,
        )
        results.append(moved)
    return results or None


def after_replay(result: Replay, what: str) -> str:
    """What to do next; `what` names the environment as an argument of the tools."""
    if not result.played:
        return "nothing could be played: its tasks must have the ids that the run's had"
    if (result.other_way or 0) * 2 > result.played:
        return (
            "most conversations go another way, so these rewards say little: "
            f"evaluate({what}, model=...) plays it with the model"
        )
    if result.groups and result.teach == 0:
        return "no group would teach anything: pay for partial progress, or use other tasks"
    if result.no_longer_teach * 2 > result.taught:
        return (
            f"{result.no_longer_teach} of {result.taught} groups that taught would no longer: read "
            "now_failures and paid_less before you train with it"
        )
    return f"env_test({what}) checks it; then env_push and train"
