"""rollouts: transcripts of a run, shortened to fit an agent's context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Literal

from pydantic import Field

from environments.tools import as_list, as_object
from flash_mcp.judgement.attempts import first_checkpoint
from flash_mcp.judgement.failures import SAMPLE_ROLLOUTS, FailureMode, failure_counts, failure_modes
from flash_mcp.protocol.recordings import Recording
from flash_mcp.protocol.records import ACTIVE, Json, Rollout, Run, text_of
from flash_mcp.protocol.result_model import rounded
from flash_mcp.state.schema import RolloutOrder
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.tool_base import Result, ResultModel, RunId, page_offset
from flash_mcp.tools.shared.truncation import (
    RESULT_CHARACTERS,
    error_text,
    json_characters,
    shorten,
    shorten_as_json,
    to_text,
)

LEAST_PER_MESSAGE = 80
LONG_MESSAGE = 1500
OPENING_CHARACTERS = 1500
MESSAGE_FRAME = 55
"""Characters of a message besides its text."""
MOST_REFUSALS = 4
MOST_CALLS = 24
CALL_CHARACTERS = 130
TOOLS_CHARACTERS = 1200
EXPECTED_CHARACTERS = 300
RESULT_FRAME = 900
"""Characters of the result besides its rows."""


class ShownMessage(ResultModel):
    """One message of a conversation."""

    number: int | None = None
    role: str
    content: str


class CallView(ResultModel):
    """A request of an agent that the model answered."""

    number: int
    parent: int | None = None
    role: str | None = None
    trained: bool
    prompt_tokens: int
    completion_tokens: int
    finish: str
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None


class RolloutView(ResultModel):
    """One conversation with its reward."""

    step: int
    index: int
    task_id: str
    reward: float | None = None
    success: bool | None = None
    advantage: float | None = None
    failure: FailureMode | None = None
    finish: str
    turns: int
    completion_tokens: int
    metrics: dict[str, float] | None = None
    reason: str | None = None
    expected: str | None = None
    error: str | None = None
    refused: dict[str, int] | None = None
    messages: list[ShownMessage]
    messages_in_all: int | None = None
    calls: list[CallView] | None = None


class Rollouts(Result):
    """Transcripts of a run."""

    run_id: str
    total: int
    """Matching transcripts."""
    failures: dict[str, int] | None = None
    """Failed transcripts of the step by mode, counted in at most 256 random ones; absent with
    step=-1."""
    opening: list[ShownMessage] | None = None
    """The first messages of all transcripts shown."""
    tools: list[str] | None = None
    """The tools that the model could call in these, each as name(argument: type) description."""
    rollouts: list[RolloutView]
    has_more: bool
    cursor: str | None = None
    """Pass as `cursor` for the next page."""


def rollouts(
    run_id: RunId,
    step: Annotated[int | None, Field(ge=-1)] = None,
    which: RolloutOrder = "worst",
    split: Literal["train", "eval"] | None = None,
    contains: Annotated[str | None, Field(min_length=1, max_length=200)] = None,
    success: bool | None = None,
    index: Annotated[int | None, Field(ge=0)] = None,
    from_message: Annotated[int, Field(ge=0)] = 0,
    tokens: bool = False,
    limit: Annotated[int, Field(ge=1, le=10)] = 3,
    max_characters: Annotated[int, Field(ge=500, le=7000)] = 5000,
    cursor: str | None = None,
) -> Rollouts:
    """Show transcripts of a run with rewards: what the model wrote, what the environment answered,
    how it scored, and what was expected.

    `opening` has the first messages that all of them share. Long messages are cut in the middle to
    keep within max_characters; index gives one transcript all the space. For numbers over the whole
    run, call status.

    Args:
        step: Step to show; -1: all steps. Default: the newest; with contains: all steps.
        which: Order: lowest reward first, highest first, shuffled, or as generated.
        split: Training rollouts or evaluations. Default train; eval for a run of evaluate.
        contains: Only transcripts with this text in a message.
        success: Only successes (true) or failures (false).
        index: One transcript by its number within the step, with all the space.
        from_message: With index: messages of a long transcript to skip.
        tokens: With index: token ids of an agent's calls too, as far as there is room.
        limit: Transcripts per page.
        max_characters: Characters of transcript text in all.
        cursor: `cursor` of the previous page, all else unchanged.
    """
    store = open_store()
    if run_id.startswith("dep-"):
        offset = 0
        if index is None:
            offset = page_offset(cursor, "rollouts")
        result = _recorded(store, run_id, contains or "", success, index, limit, offset)
        return _result(result, max_characters, contains or "", from_message)
    run = store.run(run_id)
    run.refuse_exam()
    # Rollouts of an evaluation are stored under "eval", whichever split its tasks are from.
    split = "eval" if run.algorithm == "eval" else split or "train"
    steps = store.rollout_steps(run_id, split)
    at = step  # None for all
    if step == -1 or (step is None and contains is not None):
        at = None
    elif step is None and steps:
        at = steps[-1]
    offset = page_offset(cursor, "rollouts") if index is None else index
    if not steps or (at is not None and at not in steps):
        others = store.rollout_steps(run_id, "eval" if split == "train" else "train")
        return _nothing(store, run, at, steps, split, bool(others))
    if index is None:
        rows = store.rollouts(run_id, split, at, which, contains, success, limit, offset)
        total = store.rollout_count(run_id, split, at, contains, success)
    else:
        only = steps[-1] if at is None else at
        rows = store.rollouts(run_id, split, only, "index", limit=1, offset=offset)
        total = len(rows)
    result = _Page(store, run_id, split, at, index, offset, rows, total)
    return _result(result, max_characters, contains or "", from_message, tokens=tokens)


@dataclass(frozen=True)
class _Page:
    store: Store
    run_id: str
    split: str
    step: int | None
    """None: rollouts of all steps."""
    index: int | None
    offset: int
    """Rows before these."""
    rows: list[Rollout]
    total: int
    is_recorded: bool = False
    """Rows of a deployment."""

    @property
    def has_more(self) -> bool:
        return self.index is None and self.offset + len(self.rows) < self.total


def _recorded(
    store: Store,
    deployment: str,
    contains: str,
    success: bool | None,
    index: int | None,
    limit: int,
    offset: int,
) -> _Page:
    """What a deployment was asked and answered, newest first."""
    store.deployment(deployment)  # FlashError(unknown_deployment) for what this caller cannot see
    every = Recording(store.base, deployment).rollouts()
    rows = [row for row in reversed(every) if index in (None, row.index)]
    if contains:
        part = contains.lower()
        rows = [row for row in rows if any(part in text_of(m).lower() for m in row.messages)]
    if success is not None:
        rows = [row for row in rows if row.is_scored and row.success == success]
    total = len(rows)
    shown = rows[offset : offset + limit]
    return _Page(store, deployment, "train", None, index, offset, shown, total, is_recorded=True)


def _add_calls(shown: Rollouts, row: Rollout, *, tokens: bool) -> None:
    """Add the calls of an agent to its rollout, with token ids as far as there is room for them."""
    views: list[CallView] = []
    for call in row.calls[:MOST_CALLS]:
        fields = {name: value for name, value in call.items() if name in CallView.model_fields}
        views.append(CallView.model_validate({**fields, "role": call["role"] or None}))
    shown.rollouts[0].calls = views or None
    room = RESULT_CHARACTERS - len(to_text(shown.model_dump(exclude_none=True)))
    for call, view in zip(row.calls, views, strict=False):
        ids = row.token_ids(call)
        room -= len(to_text(ids))
        if tokens and room > 0:
            view.prompt_ids, view.answer_ids = ids
    if len(row.calls) > len(views) or (tokens and room < 0):
        later = "later calls" if len(row.calls) > len(views) else "token ids of later calls"
        shown.cut = ", ".join(filter(None, (shown.cut, later)))


def _result(
    result: _Page, max_characters: int, around: str, from_message: int, *, tokens: bool = False
) -> Rollouts:
    rows = result.rows
    sample = rows
    failures: dict[str, int] = {}
    if result.step is not None:
        drawn = (result.run_id, result.split, result.step, "random")
        sample = result.store.rollouts(*drawn, limit=SAMPLE_ROLLOUTS) or rows
        failures = failure_counts(sample)
    shared = shared_opening(rows)
    texts = list(map(text_of, shared))
    allowed = share_out(OPENING_CHARACTERS, list(map(json_characters, texts)))
    opening: list[ShownMessage] = []
    for message, text, limit in zip(shared, texts, allowed, strict=True):
        opening.append(ShownMessage(role=message["role"], content=_excerpt(text, limit, "")))
    tools = _tools(rows)
    modes: list[FailureMode | None] = [None] * len(rows)
    if not result.is_recorded:
        modes = failure_modes(rows, sample)
    taken = sum(json_characters(message.content) + MESSAGE_FRAME for message in opening)
    taken += sum(map(_frame_size, rows)) + len(to_text(tools))
    if result.index is not None and rows:
        taken += CALL_CHARACTERS * len(rows[0].calls[:MOST_CALLS])
    room = min(RESULT_CHARACTERS - RESULT_FRAME - taken, max_characters)
    start = None if result.index is None else from_message
    shown, cut = _within(rows, modes, len(opening), room, around, start)
    page = Rollouts(
        run_id=result.run_id,
        total=result.total,
        failures=failures or None,
        opening=opening or None,
        tools=tools or None,
        rollouts=shown,
        has_more=result.has_more,
        cursor=str(result.offset + len(shown)) if result.has_more else None,
        cut=cut,
        next=_next_step(result, shown, bool(cut)),
    )
    if result.index is not None and rows:
        _add_calls(page, rows[0], tokens=tokens)
    return page


def _tools(rows: Sequence[Rollout]) -> list[str]:
    """Each tool of these rollouts once, as far as there is room."""
    lines: dict[str, None] = {}
    for row in rows:
        lines |= dict.fromkeys(map(signature, row.tools))
    shown: list[str] = []
    room = TOOLS_CHARACTERS
    for number, line in enumerate(lines):
        room -= json_characters(line)
        if room < 0 and shown:
            return [*shown, f"…[{len(lines) - number} more tools]"]
        shown.append(line)
    return shown


def signature(tool: Json) -> str:
    """An OpenAI function schema on one line: `lookup(order: integer, note?: string) what it does`,
    with a question mark after what may be left out.
    """
    function = as_object(tool.get("function")) or tool
    schema = as_object(function.get("parameters"))
    needed = as_list(schema.get("required"))
    arguments: list[str] = []
    for name, rules in as_object(schema.get("properties")).items():
        kind = as_object(rules).get("enum") or as_object(rules).get("type") or "any"
        kinds = "|".join(map(str, as_list(kind) or [kind]))
        shown = name
        if name not in needed:
            shown += "?"
        arguments.append(f"{shown}: {kinds}")
    text = f"{function.get('name')}({', '.join(arguments)})"
    described = " ".join(str(function.get("description") or "").split())
    return shorten(f"{text} {described}".rstrip(), 300)


def shared_opening(rows: Sequence[Rollout]) -> list[Json]:
    """The messages that all prompts begin with; empty for a single row."""
    prompts = [row.messages[: row.prompt_messages] for row in rows] if len(rows) > 1 else []
    return shared_beginning(prompts)


def shared_beginning(prompts: Iterable[Sequence[Json]]) -> list[Json]:
    """The messages with which all of them begin."""
    columns = takewhile(
        lambda column: all(item == column[0] for item in column), zip(*prompts, strict=False)
    )
    return [column[0] for column in columns]


def _nothing(
    store: Store, run: Run, step: int | None, steps: list[int], split: str, others: bool
) -> Rollouts:
    run_id = run.id
    state = run.state
    if steps:
        listed = f"{steps[0]} to {steps[-1]}" if len(steps) > 6 else ", ".join(map(str, steps))
        next_step = f"there are {split} rollouts of the steps {listed}, none of step {step}"
    elif others:
        other = "eval" if split == "train" else "train"
        next_step = f"it has no {split} rollouts: split={other!r} has the others"
    elif split == "eval" and run.algorithm != "eval":
        makes = f"evaluate(model={run_id!r}) makes one, as eval_before and eval_after do"
        if not store.checkpoints(run_id):
            makes = first_checkpoint(run)
        next_step = f"no evaluation was made: {makes}"
    elif state in ACTIVE and run.algorithm != "sft":
        waits = f"status(run_id={run_id!r}, wait_s=40) waits for the first"
        next_step = f"the run is {state} and has none yet: {waits}"
    else:
        next_step = f"the run is {state} and has none; status(run_id={run_id!r}) has what there is"
    return Rollouts(run_id=run_id, total=0, rollouts=[], has_more=False, next=next_step)


def _within(
    rows: list[Rollout],
    modes: list[FailureMode | None],
    opening: int,
    characters: int,
    around: str,
    from_message: int | None,
) -> tuple[list[RolloutView], str | None]:
    """The rows after their first `opening` messages, with texts cut to `characters` in all, and a
    note on what was left out.
    """
    texts = [list(map(text_of, row.shown_messages[opening:])) for row in rows]
    if from_message is not None:
        # The messages from there on that fit; a long one counts as LONG_MESSAGE
        numbers: list[list[int]] = []
        for text in texts:
            left = characters
            some: list[int] = []
            for number in range(from_message, len(text)):
                left -= min(json_characters(text[number]), LONG_MESSAGE) + MESSAGE_FRAME
                if some and left < 0:
                    break
                some.append(number)
            numbers.append(some)
    else:
        most = max(3, characters // max(len(rows), 1) // (LEAST_PER_MESSAGE + MESSAGE_FRAME))
        numbers = [_around(text, most, around) for text in texts]
    lengths: list[int] = []
    for item, some in zip(texts, numbers, strict=True):
        lengths += [json_characters(item[number]) for number in some]
    allowed = iter(share_out(characters - MESSAGE_FRAME * len(lengths), lengths))
    shown: list[RolloutView] = []
    left = 0
    for row, mode, item, some in zip(rows, modes, texts, numbers, strict=True):
        excerpts = {number: _excerpt(item[number], next(allowed), around) for number in some}
        # `excerpts`: the text of each message that is shown, by its number after the opening
        messages = row.shown_messages
        is_whole = opening + len(excerpts) == len(messages)
        parts = {name: round(value, 4) for name, value in row.metrics.items()}
        shown.append(
            RolloutView(
                step=row.step,
                index=row.index,
                task_id=row.task_id,
                reward=round(row.reward, 4) if row.is_scored else None,
                success=row.success if row.is_scored else None,
                advantage=rounded(row.advantage, 4),
                failure=mode,
                finish=row.finish,
                turns=row.turns,
                completion_tokens=row.completion_tokens,
                metrics=parts or None,
                reason=shorten(row.reason or "", 300) or None,
                expected=_expected(row),
                refused=_refused(row),
                error=error_text(row.error, 600),
                messages=[
                    ShownMessage(
                        role=messages[opening + number]["role"],
                        content=text,
                        number=None if is_whole else opening + number,
                    )
                    for number, text in excerpts.items()
                ],
                messages_in_all=None if is_whole else len(messages),
            )
        )
        left += sum(map(len, item)) - sum(map(len, excerpts.values()))
    return shown, f"about {left} characters of text" if left > 0 else None


def _around(texts: list[str], most: int, around: str) -> list[int]:
    """All messages, or the first one and the last, or those about the first with `around`."""
    if len(texts) <= most:
        return list(range(len(texts)))
    results: list[int] = []
    for number, text in enumerate(texts):
        if around and around.lower() in text.lower():
            results.append(number)
    middle = results[0] if results else len(texts)
    start = max(1, min(middle - (most - 1) // 2, len(texts) - (most - 1)))
    return [0, *range(start, start + most - 1)]


def share_out(total: int, lengths: list[int]) -> list[int]:
    """Split `total`: small requests get all they want, the others equal shares of the rest."""
    shares = [0] * len(lengths)
    left = total
    for rank, place in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        fair = max(left // (len(lengths) - rank), LEAST_PER_MESSAGE)
        shares[place] = min(lengths[place], fair)
        left -= shares[place]
    return shares


def _frame_size(row: Rollout) -> int:
    parts = (row.metrics, row.reason, row.error, _expected(row))
    return 290 + sum(min(len(to_text(part)), 700) for part in parts)


def _expected(row: Rollout) -> str | None:
    return row.expected and shorten_as_json(row.expected, EXPECTED_CHARACTERS)


def _refused(row: Rollout) -> dict[str, int] | None:
    """The most frequent refusals of the model's API."""
    counts = sorted(row.refusals.items(), key=lambda item: -item[1])
    return {shorten(what, 80): count for what, count in counts[:MOST_REFUSALS]} or None


def _excerpt(text: str, allowed: int, around: str) -> str:
    """`text` within `allowed` characters of JSON; where it holds `around`, the part that does."""
    shortened = shorten_as_json(text, allowed)
    place = text.lower().find(around.lower())
    if shortened == text or not around or place < 0:
        return shortened
    limit = allowed * len(text) // json_characters(text)
    kept = max(limit - 50, len(around))
    start = max(0, min(place - (kept - len(around)) // 2, len(text) - kept))
    after = len(text) - start - kept
    shown = text[start : start + kept]
    return f"…[{start} characters cut]… {shown} …[{after} characters cut]…"


def _next_step(result: _Page, shown: list[RolloutView], was_cut: bool) -> str:
    run_id = result.run_id
    if result.is_recorded:
        id = result.run_id
        run_id = result.store.deployment(id).run_id
        if not shown and Recording(result.store.base, id).is_on():
            return "nothing of that kind was recorded so far; requests to its base_url and chat are"
        if not shown:
            return f"nothing was recorded: deploy(run_id={run_id!r}, record=true) begins"
        learn = f"curate(runs=[{id!r}], select='all', name='...') makes a dataset of them"
        if result.has_more:
            return f"cursor brings more; {learn}"
        return learn
    if not shown and result.index is not None:
        count = result.store.rollout_count(run_id, result.split, result.step)
        return f"this step has {count} {result.split} rollouts: index is 0 to {count - 1}"
    if not shown:
        if result.step is not None:
            return f"nothing of step {result.step} matches: step=-1 looks into all steps"
        return "nothing of any step matches: leave out contains or success"
    options: list[str] = []
    first = shown[0]
    last = first.messages[-1].number if first.messages else None
    if result.index is not None and last is not None and last + 1 < (first.messages_in_all or 0):
        options.append(f"from_message={last + 1} continues")
    elif result.index is not None and was_cut:
        kind = "rollouts" if result.split == "train" else "evaluations"
        whole = f"flash://runs/{run_id}/{kind}/{first.step}"
        options.append(f"the resource {whole} has every text whole")
    elif was_cut:
        which = f"run_id={run_id!r}, split={result.split!r}, step={first.step}, index={first.index}"
        options.append(f"rollouts({which}) shows the first one longer")
    if result.has_more:
        options.append("cursor brings more")
    return "; ".join([*options, f"status(run_id={run_id!r}) has the numbers"])
