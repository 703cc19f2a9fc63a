"""compare: whether two evaluations differ, or which of several is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from flash_mcp.judgement import attempts, comparison, health, statistics
from flash_mcp.judgement.attempts import Metric
from flash_mcp.judgement.comparison import Change, Outcome, Solved
from flash_mcp.judgement.health import Flag
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Evaluation, Rollout, Run, Try
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state import references
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.versions import digest_of
from flash_mcp.tools.shared.next_steps import after_comparison, model_of, repeated
from flash_mcp.tools.shared.resolve import differing_values
from flash_mcp.tools.shared.scores import (
    ByLabel,
    by_label,
    conversation,
    elsewhere,
    last_prompt,
    spread_of,
)
from flash_mcp.tools.shared.tool_base import Result
from flash_mcp.tools.shared.truncation import shorten, shorten_as_json, to_text

FLIP_CHARACTERS = 4200
"""All transcripts in one comparison have at most so many; half of them beside a table."""
LABELS = 8
"""So many labels of each side are shown."""
TRAINED_CHARACTERS = 800
"""What the settings may take in which two runs differ."""


Judged = Outcome | Literal["contaminated", "confounded"]


class Measured(ResultModel):
    run_id: str
    step: int
    tasks: int
    success: Rounded
    low: Rounded
    high: Rounded
    reward: Rounded


class Side(Measured):
    """One side of a comparison."""

    of: str
    environment: str
    attempts: int
    errors: int | None = None
    constant: Rounded | None = None
    constant_answer: str | None = None
    by_label: ByLabel | None = None


class Flip(ResultModel):
    """A task that came out differently."""

    task_id: str
    base: Rounded
    other: Rounded
    base_index: int
    other_index: int
    prompt: str
    base_text: str
    other_text: str


class ComparisonLine(Measured):
    """One of several evaluations, compared with base."""

    of: str | None = None
    verdict: Judged | None = None
    change: Rounded | None = None
    change_low: Rounded | None = None
    change_high: Rounded | None = None


class Compare(Result):
    """A comparison of two evaluations, or of several with the first."""

    verdict: Judged
    """Of `metric`; contaminated: eval tasks were trained on; confounded: beside the model, settings
    or the environment's version differ."""
    metric: str
    base: Side
    other: Side
    paired_tasks: int
    """Tasks on both sides that the tests pair; 0: the sides were not paired."""
    left_out: int | None = None
    """Tasks on one side only."""
    success: Change
    reward: Change | None = None
    """Absent where it is the same as that of success."""
    headroom: str | None = None
    """Where base had several attempts and fewer steps of training: whether the best of them solve
    tasks that other does not (headroom) or not (ceiling)."""
    newly_solved: int
    """Paired tasks with more successes than before."""
    no_longer: int
    """Paired tasks with fewer."""
    table: list[ComparisonLine] | None = None
    """With more: all of them, base first."""
    best: str | None = None
    """With more: which is best on `metric`, and whether it differs from the next."""
    flips: list[Flip] | None = None
    """Some of both kinds, the largest changes first."""
    notes: list[str] | None = None
    """What limits the comparison."""


def compare(
    base: Annotated[str, Field(min_length=1)],
    other: Annotated[str | None, Field(min_length=1)] = None,
    more: Annotated[list[str] | None, Field(min_length=1, max_length=8)] = None,
    metric: Metric = "success",
    min_change: Annotated[float, Field(gt=0, le=1)] = 0.05,
    flips: Annotated[int, Field(ge=0, le=5)] = 2,
) -> Compare:
    """Say whether one evaluation is better than another: improved, no_change, regressed,
    constant or underpowered.

    Tasks on both sides are paired: exact McNemar test for success, paired bootstrap for
    rewards and for several attempts a task. Otherwise the noise bands decide. `underpowered` comes
    with the number of tasks that would decide. Evaluations are made by evaluate, or by train with
    eval_before, eval_after or eval_every. Two models are judged only where both were sampled alike.

    Args:
        base: An evaluation; a training run, for its newest evaluation; or RUN@STEP. Alone: a
            training run, its first against its newest evaluation.
        other: The same kinds; is it better than base?
        more: Further ones, each also compared with base.
        metric: What the verdict is on; both are shown.
        min_change: The smallest change that matters to you.
        flips: Tasks to show of each kind that came out differently.
    """
    store = open_store()
    if more and other is None:
        other, *more = more
    pair = _pair(store, base, other)
    further = [_comparable(Pair(pair.base, _find(store, item)), base, item) for item in more or ()]
    memory = _memory(store, pair)
    count = 1 + len(further)
    changes = {name: pair.change(name, min_change, count) for name in ("success", "reward")}
    moved = pair.moved()
    better = [task for task, change in moved.items() if change > 0]
    worse = [task for task, change in moved.items() if change < 0]
    shown = better[:flips] + worse[:flips]
    room = FLIP_CHARACTERS // (2 if further else 1)
    lost = _lost(store, pair.other)
    # What the runs with other seeds came to, of a side that is one of several
    groups = {side.run.seed_group: side.run for side in (pair.other, pair.base)}
    spreads = filter(None, (spread_of(store, run) for run in groups.values()))
    notes = [*_limits(pair, memory), *_trained(store, pair), *spreads]
    if lost:
        notes.insert(0, f"{health.WORSE_ELSEWHERE}: other {lost}")
    if further:
        judged = f"each of the {count} comparisons with base is judged at 0.05 / {count}"
        notes.append(f"{judged}, so that all of them hold together")
    result = Compare(
        verdict=_judged(pair, changes[metric], memory),
        metric=metric,
        base=_side(pair.base),
        other=_side(pair.other),
        paired_tasks=len(pair.shared),
        left_out=pair.left_out or None,
        success=changes["success"],
        headroom=pair.headroom(),
        newly_solved=len(better),
        no_longer=len(worse),
        flips=[_flip(store, task, pair, room // len(shown)) for task in shown] or None,
        notes=notes or None,
        next=memory.remedy if memory else _next_step(store, pair, changes[metric], shown, lost),
    )
    for shown_side, side in ((result.base, pair.base), (result.other, pair.other)):
        shown_side.by_label = by_label(store, side.run, side.row.step, LABELS)
    if changes["reward"] != changes["success"]:
        result.reward = changes["reward"]
    if further:
        result.table = [_line(result.base), _line(result.other, result.verdict, changes[metric])]
        for one in further:
            change = one.change(metric, min_change, count)
            side = _side(one.other)
            line = _line(side, _judged(one, change, _memory(store, one)), change)
            line.of = side.of
            result.table.append(line)
        sides = [pair.base, *(item.other for item in (pair, *further))]
        result.best = _best(sides, metric, min_change, count)
    return result


def _judged(pair: Pair, change: Change, memory: Flag | None) -> Judged:
    if memory:
        return "contaminated"
    if pair.is_confounded:
        return "confounded"
    return change.outcome


def _line(
    side: Side, verdict: Judged | None = None, change: Change | None = None
) -> ComparisonLine:
    measured = side.model_dump(include={*Measured.model_fields})
    line = ComparisonLine(**measured, verdict=verdict)
    if change:
        line.change = change.change
        line.change_low = change.low
        line.change_high = change.high
    return line


def _best(sides: Sequence[Evaluated], metric: Metric, effect: float, of: int) -> str:
    """Which side has the highest mean, and how it compares with the next."""

    def mean(side: Evaluated) -> float:
        return fmean(side.means(metric).values())

    first, second = sorted(sides, key=mean, reverse=True)[:2]
    pair = Pair(second, first)
    change = pair.change(metric, effect, of)
    by = f"{change.change:+.3f} ({change.low:+.3f} to {change.high:+.3f}), {change.outcome}"
    against = f"against the next, {_named_side(second)}: {by}"
    return f"{_named_side(first)}, {metric} {mean(first):.3f}; {against}"


def _named_side(side: Evaluated) -> str:
    return f"{side.run.id}@{side.row.step}"


# -- the two evaluations ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluated:
    run: Run
    row: Evaluation
    tries: Sequence[Try]
    rivals: int = 1
    """Evaluations of its training run that it may have been picked from, by its success."""

    @cached_property
    def tasks(self) -> dict[str, list[Try]]:
        return attempts.by_task(self.tries)

    @property
    def kinds(self) -> dict[str, str]:
        """{task id: kind}, in the order of `means`"""
        kinds: dict[str, str] = {}
        for task, tries in self.tasks.items():
            kinds[task] = tries[0].kind
        return kinds

    def means(self, metric: Metric) -> dict[str, float]:
        return attempts.means(self.tasks, metric)

    @property
    def weights(self) -> tuple[str, str | None, int | None]:
        return attempts.weights(self.run, self.row.step)

    @property
    def is_trained(self) -> bool:
        """Whether the model learnt here: a base model remembers no task, whatever splits share."""
        return bool(self.run.init_adapter) or (self.run.algorithm != "eval" and self.row.step > 0)


@dataclass(frozen=True)
class Pair:
    base: Evaluated
    other: Evaluated

    @cached_property
    def shared(self) -> list[str]:
        return comparison.shared(self.base.tasks, self.other.tasks)

    @property
    def left_out(self) -> int:
        """Tasks on one side only, if the others are paired."""
        if self.shared:
            return len(self.base.tasks.keys() ^ self.other.tasks.keys())
        return 0

    @cached_property
    def differing(self) -> list[str]:
        names = attempts.differing(self.base.run, self.other.run)
        sides = (self.base.run, self.other.run)
        ours, theirs = (run.environment_references.split(", ") for run in sides)
        if not all(map(_are_equal, ours, theirs)):
            names.append("environment")
        return names

    @property
    def rivals(self) -> int:
        return max(self.base.rivals, self.other.rivals)

    @property
    def is_confounded(self) -> bool:
        return bool(self.differing) and self.base.weights != self.other.weights

    def change(self, metric: Metric, effect: float, of: int = 1) -> Change:
        """How `metric` differs, as one of so many comparisons with base."""
        looks = of * self.rivals
        base = self.base.means(metric)
        other = self.other.means(metric)
        if self.shared:
            before, after, kinds = zip(*self.of_shared(base, other), strict=True)
            result = comparison.compare_paired(before, after, kinds, effect=effect, looks=looks)
        else:
            before = [*base.values()]
            after = [*other.values()]
            kinds = [*self.base.kinds.values(), *self.other.kinds.values()]
            sides = (before, after, kinds)
            result = comparison.compare_unpaired(*sides, effect=effect, looks=looks)
        if metric == "success":
            result = comparison.discounted(result, self.other.row)
        if self.differing:
            names = ", ".join(self.differing)
            result.explanation += f"; but the two differ in {names}: the change may come from that"
            if self.is_confounded:
                result.explanation += ", not from the model"
        return result

    def headroom(self) -> str | None:
        tries = attempts.settings(self.base.run)["attempts"]
        is_earlier = self.base.run.model == self.other.run.model
        is_earlier &= self.base.row.step < self.other.row.step
        if tries < 2 or not is_earlier or not self.shared:
            return None
        best = self.base.means("success")
        last = self.other.means("success")
        solved = {task: math.ceil(share) for task, share in best.items()}
        return comparison.headroom(self.of_shared(solved, last), tries)

    def of_shared(self, base: Mapping[str, float], other: Mapping[str, float]) -> list[Solved]:
        """The values of the tasks on both sides, with the tasks' kinds."""
        pairs: list[Solved] = []
        kinds = self.other.kinds
        for task in self.shared:
            pairs.append((base[task], other[task], kinds[task]))
        return pairs

    def moved(self) -> dict[str, float]:
        """{paired task: change of its share of successes} if it changed, the largest first."""
        base = self.base.means("success")
        other = self.other.means("success")
        changes = {task: other[task] - base[task] for task in self.shared}
        ordered = sorted(changes.items(), key=lambda item: -abs(item[1]))
        return {task: change for task, change in ordered if change}


def _pair(store: Store, base: str, other: str | None) -> Pair:
    if other is None:
        # The first and the newest evaluation of a training run
        run, step = _named(store, base)
        steps = [row.step for row in store.evals(run.id)]
        if step is None and len(steps) > 1:
            pair = Pair(_evaluated(store, run, steps[0]), _evaluated(store, run, None))
        else:
            hint = f"; it has evaluations of the steps {steps}" if steps else ""
            spec = run.spec
            later = isinstance(spec, RunSpec) and (spec.eval_after or spec.eval_every)
            if step is None and run.ended is None and later:
                what = f"{base} is {run.state} and has no before and after yet{hint}"
                wait = f"status(run_id={base!r}, until='end') waits for it"
                fix = f"{wait}; compare again once it has ended"
                raise FlashError("not_ready", what, base=base, fix=fix)
            fix = "train with eval_before and eval_after"
            if steps:
                fix = "name the other evaluation; evaluate makes one"
            what = f"{base} alone has no before and after{hint}"
            raise FlashError("invalid_argument", what, base=base, fix=fix)
    else:
        pair = Pair(_find(store, base), _find(store, other))
    return _comparable(pair, base, other)


def _comparable(pair: Pair, base: str, other: str | None) -> Pair:
    """The pair. FlashError(invalid_argument) if it cannot be compared."""
    ours = pair.base.run
    theirs = pair.other.run
    if (ours.id, pair.base.row.step) == (theirs.id, pair.other.row.step):
        what = "both are the same evaluation"
        raise FlashError("invalid_argument", what, base=base, other=other, fix="name two")
    if _environments(ours) != _environments(theirs):
        both = f"{ours.id} is of {_environments(ours)}, {theirs.id} of {_environments(theirs)}"
        what = f"different environments cannot be compared: {both}"
        call = f"evaluate(environment={ours.environment!r}, model=...)"
        raise FlashError("invalid_argument", what, fix=f"evaluate both on one of them: {call}")
    if ours.eval_split != theirs.eval_split:
        both = f"{ours.id} is of {ours.eval_split}, {theirs.id} of {theirs.eval_split}"
        what = f"different splits cannot be compared: {both}"
        call = f"evaluate(split={ours.eval_split!r}, model=...)"
        raise FlashError("invalid_argument", what, fix=f"evaluate both on one of them: {call}")
    return pair


def _are_equal(one: str, other: str) -> bool:
    """Whether both are the same version, or versions whose scorer and tasks are equal."""
    if one == other:
        return True
    digests: set[str] = set()
    for reference in (one, other):
        try:
            folder = Path(open_store().environment(reference).path)
        except FlashError:  # this version was removed
            return False
        digests.add(digest_of(folder, without_documents=True))
    return len(digests) == 1


def _pushed(run: Run) -> float:
    """When its version of the environment was published; 0 for one that was removed."""
    with suppress(FlashError):
        return open_store().environment(run.environment_reference).pushed
    return 0.0


def _environments(run: Run) -> str:
    return " and ".join(part["name"] for part in run.mixture) or run.environment


def _named(store: Store, text: str) -> tuple[Run, int | None]:
    named = references.RUN.fullmatch(text)
    if named is None:
        forms = "name a run as RUN or RUN@STEP"
        hint = "evaluate makes an evaluation of any model and returns its run_id"
        raise FlashError("invalid_argument", f"{text!r} is no run", fix=f"{forms}; {hint}")
    return store.run(named["run"]), int(named["step"]) if named["step"] else None


def _find(store: Store, text: str) -> Evaluated:
    return _evaluated(store, *_named(store, text))


def _evaluated(store: Store, run: Run, step: int | None) -> Evaluated:
    run.refuse_exam()
    saved = [row.step for row in store.checkpoints(run.id)]
    rows = store.evals(run.id)
    row = attempts.evaluation_at(run, rows, step, saved)
    rivals = 1
    if run.algorithm != "eval" and 0 < row.step < rows[-1].step:
        rivals = sum(other.step > 0 for other in rows)
    return Evaluated(run, row, store.tries(run.id, row.step), rivals)


def _memory(store: Store, pair: Pair) -> Flag | None:
    """The flag of a contaminated split, if a trained model was evaluated on the eval split."""
    run = pair.other.run
    is_trained = pair.base.is_trained or pair.other.is_trained
    overlap = store.overlap(run) if run.eval_split == "eval" and is_trained else None
    if overlap:
        return health.contaminated(**overlap)
    return None


# -- what is shown ---------------------------------------------------------------------------------


def _side(side: Evaluated) -> Side:
    run = side.run
    success = fmean(side.means("success").values())
    outcomes = attempts.successes(side.tasks)
    interval = statistics.success_interval(outcomes)
    of = f"{run.model} before the training of {run.id}"
    if run.algorithm == "eval":
        of = run.model
        if run.evaluation.checkpoint:
            of += f" with {run.evaluation.checkpoint}"
    elif side.row.step:
        of = f"{run.model} with {run.id}@{side.row.step}"
    return Side(
        run_id=run.id,
        step=side.row.step,
        of=of,
        environment=run.environment_references,
        tasks=len(side.tasks),
        attempts=attempts.settings(run)["attempts"],
        success=success,
        low=interval.low,
        high=interval.high,
        reward=fmean(side.means("reward").values()),
        errors=sum(item.error is not None for item in side.tries) or None,
        constant=side.row.summary.get("constant_success"),
        constant_answer=shorten(side.row.constant, 100) if side.row.constant else None,
    )


def _flip(store: Store, task: str, pair: Pair, characters: int) -> Flip:
    """A task that moved; the attempt shown of each side is a failure where it failed more."""
    base = pair.base.means("success")[task]
    other = pair.other.means("success")[task]
    ours = _shown(store, pair.base, task, base > other)
    theirs = _shown(store, pair.other, task, other > base)
    return Flip(
        task_id=task,
        base=base,
        other=other,
        base_index=ours.index,
        other_index=theirs.index,
        prompt=shorten_as_json(last_prompt(ours), characters // 4),
        base_text=shorten_as_json(conversation(ours), characters * 3 // 8),
        other_text=shorten_as_json(conversation(theirs), characters * 3 // 8),
    )


def _shown(store: Store, side: Evaluated, task: str, success: bool) -> Rollout:
    index = next(item.index for item in side.tasks[task] if item.success == success)
    return store.transcript(side.run.id, side.row.step, index)


def _limits(pair: Pair, memory: Flag | None) -> list[str]:
    notes: list[str] = []
    if memory:
        notes.append(f"CONTAMINATED: {memory.evidence}")
    if "environment" in pair.differing:
        two = "the two are of different versions of the environment"
        notes.append(f"{two}: tasks or scorer may differ")
    if pair.rivals > 1:
        picked = pair.other if pair.other.rivals > 1 else pair.base
        one = f"{_named_side(picked)} is one of {pair.rivals} evaluations after training began"
        notes.append(f"{one}: the best of equal ones is ahead by chance, so the test is stricter")
    ours = attempts.settings(pair.base.run)
    theirs = attempts.settings(pair.other.run)
    differing: list[str] = []
    for name, value in ours.items():
        if value != theirs[name]:
            both = f"{shorten(str(value), 100)} and {shorten(str(theirs[name]), 100)}"
            differing.append(f"{name} {both}")
    if differing:
        notes.append(f"the two were not made alike: {'; '.join(differing)}")
    interval = statistics.success_interval(attempts.successes(pair.other.tasks))
    if doubt := comparison.against_constant(pair.other.row, interval.low):
        notes.append(f"other: {doubt}")
    if not pair.shared:
        few = "the sides have too few tasks in common to be paired"
        notes.append(f"{few}: the same tasks on both sides tell far more")
    valid = (item for item in (*pair.base.tries, *pair.other.tries) if item.error is None)
    if not any(item.success for item in valid):
        notes.append("nothing succeeded on either side: reward tells more than success here")
    return notes


def _trained(store: Store, pair: Pair) -> list[str]:
    """In which settings the two runs differ that trained what is compared."""
    runs: list[Run] = []
    for side in (pair.base, pair.other):
        _, run_id, _ = attempts.weights(side.run, side.row.step)
        with suppress(FlashError):  # a base model, or its run was removed
            runs.append(store.run(run_id or ""))
    if len(runs) < 2 or runs[0].id == runs[1].id:
        return []
    differing = differing_values([run.spec.model_dump() for run in runs])
    fields: list[str] = []
    for name, values in differing.items():
        fields.append(f"{name} {' and '.join(shorten(to_text(value), 100) for value in values)}")
    both = f"{runs[0].id} and {runs[1].id} were trained with"
    return [shorten(f"{both} {'; '.join(fields) or 'the same values'}", TRAINED_CHARACTERS)]


def _lost(store: Store, side: Evaluated) -> str:
    """How the run that trained the model got worse at other kinds of tasks, or ""."""
    with suppress(FlashError):  # a base model, or its run was removed
        said, is_worse = elsewhere(store, store.run(side.weights[1] or ""))
        return said if is_worse else ""
    return ""


def _next_step(store: Store, pair: Pair, change: Change, flips: Sequence[str], lost: str) -> str:
    run = pair.other.run
    step = pair.other.row.step
    base = model_of(pair.base.run, pair.base.row.step)
    if pair.is_confounded:
        advice = repeated(base, run, pair.differing)
        if _pushed(run) < _pushed(pair.base.run):  # what is older is measured again
            advice = repeated(model_of(run, step), pair.base.run, pair.differing, is_base=False)
    else:
        models = (base, model_of(run, step))
        size = references.split_size(store, run)
        measured = len(pair.other.tasks)
        advice = after_comparison(change, models, run, pair.differing, measured, size, bool(lost))
    if not flips:
        return advice
    call = f"rollouts(run_id={run.id!r}, split='eval', step={step}, index=other_index)"
    return f"{advice}; {call} shows a flip whole"
