"""rollouts: what the model really wrote, cut to fit an agent's context."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Field

from flash_mcp.judgement.attempts import prompt_length
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, FailureMode, failure_counts, failure_modes
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE, Json, Rollout, Run
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.fitting import RESULT_CHARACTERS, shorten, to_text
from flash_mcp.tools.shared.frame import Part, Result, RunId

LEAST_PER_MESSAGE = 80
LONG_MESSAGE = 1500
OPENING_CHARACTERS = 1500
MESSAGE_FRAME = 55
"""Characters that a message takes beside its text."""
RESULT_FRAME = 900
"""Characters that the result takes beside its rows."""


class Message(Part):
    """One message of a conversation."""

    number: int | None = None
    """Its place in the conversation, where not all are shown."""
    role: str
    content: str
    """Its text; `…[N characters cut]…` stands where text was left out."""


class RolloutView(Part):
    """One conversation with its reward."""

    step: int
    """Training step, or step of the evaluation."""
    index: int
    """Its number within the step."""
    task_id: str
    """Task of the environment."""
    reward: float
    success: bool
    advantage: float | None = None
    """How it was weighted, relative to its group."""
    failure: FailureMode | None = None
    """Why it is no success, as far as can be told."""
    finish: str
    """done, max_turns, length (cut off) or error."""
    turns: int
    """Turns the model took."""
    completion_tokens: int
    """Tokens the model wrote."""
    metrics: dict[str, float] | None = None
    """Parts of the reward."""
    reason: str | None = None
    """What the scorer said."""
    error: str | None = None
    """What failed in environment code."""
    messages: list[Message]
    """The conversation, prompt included, after `opening`."""
    messages_in_all: int | None = None
    """Where not all are shown: how many there are."""


@dataclass(frozen=True)
class _Shown:
    """A rollout on its way into the result; its first `opening` messages are shown once for all."""

    rollout: Rollout
    failure: FailureMode | None
    opening: int

    @property
    def messages(self) -> list[Json]:
        return self.rollout.messages[self.opening :]


class Rollouts(Result):
    """Transcripts of a run."""

    run_id: str
    total: int
    """Transcripts that match."""
    failures: dict[str, int] | None = None
    """How many of a step's transcripts failed, by mode, where it has more than 256 of as many
    drawn at random; absent with step=-1."""
    opening: list[Message] | None = None
    """The first messages of every transcript shown, left out of each of them."""
    rollouts: list[RolloutView]
    has_more: bool
    cursor: str | None = None
    """Pass as `cursor` for the next page."""


def rollouts(
    run_id: RunId,
    step: Annotated[int | None, Field(ge=-1)] = None,
    which: Literal["worst", "best", "random", "index"] = "worst",
    split: Literal["train", "eval"] | None = None,
    contains: Annotated[str | None, Field(min_length=1, max_length=200)] = None,
    success: bool | None = None,
    index: Annotated[int | None, Field(ge=0)] = None,
    from_message: Annotated[int, Field(ge=0)] = 0,
    limit: Annotated[int, Field(ge=1, le=10)] = 3,
    max_characters: Annotated[int, Field(ge=500, le=7000)] = 5000,
    cursor: str | None = None,
) -> Rollouts:
    """Show real transcripts of a run with rewards: what the model wrote, what the environment
    answered, how it scored.

    What all of them begin with stands once, under `opening`. Long messages are shortened in the
    middle to keep within max_characters; index shows one transcript with all the room there is.
    Numbers over the whole run: status.

    Args:
        step: Step to look at; -1: all steps. Default: the newest; with contains: all steps.
        which: Order: lowest reward first, highest first, shuffled, or as generated. Default worst.
        split: Training rollouts or evaluations. Default train; eval for a run made by evaluate.
        contains: Only transcripts with this text in a message.
        success: Only successes (true) or failures (false).
        index: One transcript of the step by its number, with all the room there is.
        from_message: With index: skip this many messages, to page through a long one.
        limit: Transcripts a page, 1 to 10; default 3.
        max_characters: Characters of transcript text in all, 500 to 7000; default 5000.
        cursor: `cursor` of the page before, other arguments unchanged.
    """
    store = open_store()
    run = store.run(run_id)
    # What an evaluation sampled stands under "eval", whichever split's tasks they are.
    split = "eval" if run.algorithm == "eval" else split or "train"
    steps = store.rollout_steps(run_id, split)
    at = _step(step, steps, search=contains is not None)
    offset = _offset(cursor) if index is None else index
    if not steps or (at is not None and at not in steps):
        others = store.rollout_steps(run_id, "eval" if split == "train" else "train")
        return _nothing(run, at, steps, split, bool(others))
    if index is not None:
        page = store.rollouts(
            run_id, split, at if at is not None else steps[-1], "index", limit=1, offset=offset
        )
        total, has_more = len(page), False
    else:
        page = store.rollouts(run_id, split, at, which, contains, success, limit + 1, offset)
        total, has_more = (
            store.rollout_count(run_id, split, at, contains, success),
            len(page) > limit,
        )
    rows = page[:limit]
    drawn: list[Rollout] = []
    if at is not None:
        drawn = store.rollouts(run_id, split, at, "random", limit=SAMPLE_ROLLOUTS)
    sample = drawn or rows
    opening = _opening(rows)
    rest = [
        _Shown(row, mode, len(opening))
        for row, mode in zip(rows, failure_modes(rows, sample), strict=True)
    ]
    taken = sum(_cost(message.content) + MESSAGE_FRAME for message in opening) + sum(
        map(_frame_size, rows)
    )
    start = from_message if index is not None else None
    shown, cut = _within(
        rest, min(RESULT_CHARACTERS - RESULT_FRAME - taken, max_characters), contains or "", start
    )
    return Rollouts(
        run_id=run_id,
        total=total,
        failures=(failure_counts(sample) or None) if at is not None else None,
        opening=opening or None,
        rollouts=shown,
        has_more=has_more,
        cursor=str(offset + len(shown)) if has_more else None,
        cut=cut,
        next=_next_step(store, run_id, split, at, shown, index, bool(cut), has_more),
    )


def _opening(rows: list[Rollout]) -> list[Message]:
    """What all prompts begin with, as a rule instructions and examples; nothing for a single row."""
    prompts = [row.messages[: prompt_length(row)] for row in rows] if len(rows) > 1 else []
    columns = takewhile(
        lambda column: all(each == column[0] for each in column), zip(*prompts, strict=False)
    )
    shared: list[Json] = [column[0] for column in columns]
    texts = [_text(message.get("content")) for message in shared]
    allowed = share_out(OPENING_CHARACTERS, [_cost(text) for text in texts])
    return [
        Message(role=message["role"], content=_excerpt(text, limit, ""))
        for message, text, limit in zip(shared, texts, allowed, strict=True)
    ]


def _step(step: int | None, steps: list[int], *, search: bool) -> int | None:
    """The step to look at; None for all."""
    if step == -1 or (step is None and search):
        return None
    return steps[-1] if step is None and steps else step


def _offset(cursor: str | None) -> int:
    if cursor is not None and not cursor.isdigit():
        raise FlashError(
            "invalid_argument",
            "that is no cursor of rollouts",
            cursor=cursor,
            fix="pass it unchanged",
        )
    return int(cursor or 0)


def _nothing(run: Run, step: int | None, steps: list[int], split: str, others: bool) -> Rollouts:
    run_id, state = run.id, run.state
    if steps:
        next_step = f"there are {split} rollouts of the steps {_ranges(steps)}, none of step {step}"
    elif others:
        next_step = f"it has none of these: split={'eval' if split == 'train' else 'train'!r} has the others"
    elif split == "eval" and run.algorithm != "eval":
        next_step = f"no evaluation was made: evaluate(model={run_id!r}) makes one, as eval_before and eval_after do"
    elif state in ACTIVE and run.algorithm != "sft":
        next_step = f"the run is {state} and has none yet: status(run_id={run_id!r}, wait_s=40) waits for the first"
    else:
        next_step = f"the run is {state} and has none; status(run_id={run_id!r}) has what there is"
    return Rollouts(run_id=run_id, total=0, rollouts=[], has_more=False, next=next_step)


def _ranges(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 6 else ", ".join(map(str, steps))


def _within(
    rows: list[_Shown], characters: int, around: str, from_message: int | None
) -> tuple[list[RolloutView], str | None]:
    """The rows with their texts cut to `characters` in all, and a note on what was left out."""
    texts = [[_text(message.get("content")) for message in row.messages] for row in rows]
    if from_message is not None:
        numbers = [_from(each, from_message, characters) for each in texts]
    else:
        most = max(3, characters // max(len(rows), 1) // (LEAST_PER_MESSAGE + MESSAGE_FRAME))
        numbers = [_around(each, most, around) for each in texts]
    chosen = [each[number] for each, shown in zip(texts, numbers, strict=True) for number in shown]
    allowed = iter(
        share_out(characters - MESSAGE_FRAME * len(chosen), [_cost(text) for text in chosen])
    )
    shown = [
        _rollout(row, {number: _excerpt(each[number], next(allowed), around) for number in some})
        for row, each, some in zip(rows, texts, numbers, strict=True)
    ]
    left = sum(len(text) for each in texts for text in each)
    left -= sum(len(message.content) for rollout in shown for message in rollout.messages)
    return shown, f"about {left} characters of text" if left > 0 else None


def _from(texts: list[str], start: int, characters: int) -> list[int]:
    """Messages from `start` on, as many as there is room for; long ones count only as far as they
    will be shown.
    """
    numbers: list[int] = []
    for number in range(start, len(texts)):
        characters -= min(_cost(texts[number]), LONG_MESSAGE) + MESSAGE_FRAME
        if numbers and characters < 0:
            break
        numbers.append(number)
    return numbers


def _around(texts: list[str], most: int, around: str) -> list[int]:
    """All messages, or the first one and a stretch of others: the last, or those about the first
    with `around`.
    """
    if len(texts) <= most:
        return list(range(len(texts)))
    found = [
        number for number, text in enumerate(texts) if around and around.lower() in text.lower()
    ]
    middle = found[0] if found else len(texts)
    start = max(1, min(middle - (most - 1) // 2, len(texts) - (most - 1)))
    return [0, *range(start, start + most - 1)]


def _cost(text: str) -> int:
    """Characters that it takes as JSON: line ends and quotes take two."""
    return len(to_text(text)) - 2


def share_out(total: int, wanted: list[int]) -> list[int]:
    """Split `total`: small wishes are met whole, the rest is shared equally; at least
    LEAST_PER_MESSAGE for each.
    """
    shares, left = [0] * len(wanted), total
    for rank, place in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        fair = max(left // (len(wanted) - rank), LEAST_PER_MESSAGE)
        shares[place] = min(wanted[place], fair)
        left -= shares[place]
    return shares


def _text(content: Any) -> str:
    return content if isinstance(content, str) else to_text(content)


def _frame_size(row: Rollout) -> int:
    """Characters that a row takes beside its messages."""
    return 290 + sum(min(len(to_text(part)), 700) for part in (row.metrics, row.reason, row.error))


def _rollout(shown: _Shown, excerpts: dict[int, str]) -> RolloutView:
    """`excerpts`: the text of each message that is shown, by its number."""
    row, messages = shown.rollout, shown.messages
    is_whole = len(excerpts) == len(messages)
    parts = {name: round(value, 4) for name, value in row.metrics.items()}
    error = row.error
    return RolloutView(
        step=row.step,
        index=row.index,
        task_id=row.task_id,
        reward=round(row.reward, 4),
        success=row.success,
        advantage=None if row.advantage is None else round(row.advantage, 4),
        failure=shown.failure,
        finish=row.finish,
        turns=row.turns,
        completion_tokens=row.completion_tokens,
        metrics=parts or None,
        reason=shorten(row.reason or "", 300) or None,
        error=shorten(f"[{error['code']}] {error['what']}", 600) if error else None,
        messages=[
            Message(
                role=messages[number]["role"],
                content=text,
                number=None if is_whole else shown.opening + number,
            )
            for number, text in excerpts.items()
        ],
        messages_in_all=None if is_whole else shown.opening + len(messages),
    )


def _excerpt(text: str, allowed: int, around: str) -> str:
    """`text` within `allowed` characters of JSON; where it holds `around`, the part that does."""
    cost = _cost(text)
    if cost <= allowed:
        return text
    limit = allowed * len(text) // cost
    place = text.lower().find(around.lower()) if around else -1
    if place < 0:
        return shorten(text, limit)
    kept = max(limit - 50, len(around))
    start = max(0, min(place - (kept - len(around)) // 2, len(text) - kept))
    return f"…[{start} characters cut]… {text[start : start + kept]} …[{len(text) - start - kept} characters cut]…"


def _next_step(
    store: Store,
    run_id: str,
    split: str,
    step: int | None,
    shown: list[RolloutView],
    index: int | None,
    was_cut: bool,
    has_more: bool,
) -> str:
    if not shown and index is not None:
        count = store.rollout_count(run_id, split, step)
        return f"this step has {count} {split} rollouts: index is 0 to {count - 1}"
    if not shown:
        return "nothing matches: try step=-1, or without contains and success"
    first, options = shown[0], list[str]()
    last = first.messages[-1].number if first.messages else None
    if index is not None and last is not None and last + 1 < (first.messages_in_all or 0):
        options.append(f"from_message={last + 1} goes on")
    elif index is not None and was_cut:
        kind = "rollouts" if split == "train" else "evaluations"
        options.append(
            f"the resource flash://runs/{run_id}/{kind}/{first.step} has every text whole"
        )
    elif was_cut:
        which = f"run_id={run_id!r}, split={split!r}, step={first.step}, index={first.index}"
        options.append(f"rollouts({which}) shows the first one longer")
    if has_more:
        options.append("cursor brings more")
    return "; ".join([*options, f"status(run_id={run_id!r}) has the numbers"])
