"""compare: whether two evaluations differ."""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from flash_mcp.judgement import attempts as evaluations
from flash_mcp.judgement import comparison, health
from flash_mcp.judgement.attempts import Try
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Evaluation, Json, Run
from flash_mcp.state import references
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.fitting import shorten, to_text
from flash_mcp.tools.shared.frame import Part, Result
from flash_mcp.tools.shared.next_steps import after_comparison, repeated
from flash_mcp.tools.shared.scores import Change

FLIP_CHARACTERS = 4200
"""Of transcripts in one comparison."""


class Side(Part):
    """One side of a comparison."""

    run_id: str
    step: int = Field(description="Step that was evaluated; 0 is before training.")
    of: str = Field(description="The model, in words.")
    environment: str
    tasks: int
    attempts: int = Field(description="Attempts at each task.")
    success: float
    band: float = Field(description="Noise: 1.96 sqrt(p(1-p)/tasks).")
    reward: float
    errors: int | None = Field(
        default=None, description="Attempts left out because environment code failed."
    )


class Flip(Part):
    """A task that came out differently."""

    task_id: str
    base: float = Field(description="Share of successes, base.")
    other: float = Field(description="Share of successes, other.")
    base_index: int = Field(description="For rollouts: index of the attempt of base that is shown.")
    other_index: int
    prompt: str = Field(description="The last message before the model's first turn.")
    base_text: str = Field(description="What the model wrote and was answered, shortened.")
    other_text: str


class Compare(Result):
    """A comparison of two evaluations."""

    verdict: comparison.Outcome | Literal["contaminated", "confounded"] = Field(
        description="Of `metric`; contaminated: eval tasks were trained on; confounded: model and settings both differ."
    )
    metric: str
    base: Side
    other: Side
    paired_tasks: int = Field(
        description="Tasks on both sides that the tests pair; 0: the sides were not paired."
    )
    left_out: int | None = Field(default=None, description="Tasks on one side only.")
    success: Change
    reward: Change
    newly_solved: int = Field(description="Paired tasks with more successes than before.")
    no_longer: int = Field(description="Paired tasks with fewer.")
    flips: list[Flip] | None = Field(
        default=None, description="Some of both kinds, the largest changes first."
    )
    notes: list[str] | None = Field(default=None, description="What limits the comparison.")


def compare(
    base: Annotated[
        str,
        Field(
            min_length=1,
            description="An evaluation; a training run, for its newest evaluation; or RUN@STEP. Alone: a training run, "
            "whose first and newest evaluations are compared.",
        ),
    ],
    other: Annotated[
        str | None, Field(min_length=1, description="The same kinds; is it better than base?")
    ] = None,
    metric: Annotated[
        Literal["success", "reward"],
        Field(description="What the verdict is on; both are shown. Default success."),
    ] = "success",
    min_change: Annotated[
        float,
        Field(gt=0, le=1, description="The smallest change that matters to you; default 0.05."),
    ] = 0.05,
    flips: Annotated[
        int,
        Field(
            ge=0,
            le=5,
            description="Tasks of each kind to show that came out differently; default 2.",
        ),
    ] = 2,
) -> Compare:
    """Say whether one evaluation is better than another: improved, no_change, regressed or
    underpowered.

    Tasks that stand on both sides are paired: exact McNemar test for success, paired bootstrap for
    rewards and for several attempts a task. Otherwise the noise bands decide. `underpowered` comes
    with the number of tasks that would decide. Evaluations are made by evaluate, or by train with
    eval_before, eval_after or eval_every. Two models are judged only where both were sampled alike.
    """
    store = open_store()
    (base_run, base_eval), (other_run, other_eval) = _sides(store, base, other)
    if base_run.environment != other_run.environment:
        fix = f"evaluate both on one of them: evaluate(environment={base_run.environment!r}, model=...)"
        what = (
            f"{base_run.id} is of {base_run.environment}, {other_run.id} of {other_run.environment}"
        )
        raise FlashError(
            "invalid_argument", f"different environments cannot be compared: {what}", fix=fix
        )
    places = (base_run.id, base_eval.step), (other_run.id, other_eval.step)
    tries = [evaluations.tries(store, *place) for place in places]
    tasks = [evaluations.by_task(side) for side in tries]
    both = comparison.shared(*(evaluations.means(side, "success") for side in tasks))
    changes = {name: _change(tasks, both, name, min_change) for name in ("success", "reward")}
    differing = evaluations.differing(base_run, other_run)
    one_model = evaluations.weights(base_run, places[0][1]) == evaluations.weights(
        other_run, places[1][1]
    )
    confounded = bool(differing) and not one_model
    if differing:
        whose = (
            "the change may come from that"
            if one_model
            else "the change may come from that, not from the model"
        )
        for found in changes.values():
            found.explanation += f"; but the two differ in {', '.join(differing)}: {whose}"
    moved = _moved(tasks, both)
    left_out = len({*tasks[0]} ^ {*tasks[1]}) if both else 0
    shown = [
        *[task for task in moved if moved[task] > 0][:flips],
        *[task for task in moved if moved[task] < 0][:flips],
    ]
    each = FLIP_CHARACTERS // max(len(shown), 1)
    on_eval = all(run.spec.get("split", "eval") == "eval" for run in (base_run, other_run))
    trained = _is_trained(base_run, base_eval) or _is_trained(other_run, other_eval)
    overlap = store.overlap(other_run) if on_eval and trained else None
    memory = health.contaminated(**overlap) if overlap else None
    notes = [
        *([f"CONTAMINATED: {memory.evidence}"] if memory else []),
        *_limits(base_run, other_run, tasks, both),
    ]
    more = (
        f"rollouts(run_id={other_run.id!r}, split='eval', step={places[1][1]}, index=other_index)"
    )
    following = [
        repeated(base_run, places[0][1], other_run, differing) if confounded
        else after_comparison(store, changes[metric], other_run, places[1][1], differing),
        *([f"{more} shows a flip whole"] if shown else []),
    ]  # fmt: skip
    return Compare(
        verdict="contaminated"
        if memory
        else "confounded"
        if confounded
        else changes[metric].outcome,
        metric=metric,
        base=_side(base_run, base_eval, tries[0]),
        other=_side(other_run, other_eval, tries[1]),
        paired_tasks=len(both),
        left_out=left_out or None,
        success=changes["success"],
        reward=changes["reward"],
        newly_solved=sum(change > 0 for change in moved.values()),
        no_longer=sum(change < 0 for change in moved.values()),
        flips=[_flip(store, task, tasks, places, each) for task in shown] or None,
        notes=notes or None,
        next=memory.remedy if memory else "; ".join(following),
    )


def _sides(
    store: Store, base: str, other: str | None
) -> tuple[tuple[Run, Evaluation], tuple[Run, Evaluation]]:
    if other is None:
        run, step = _reference(store, base)
        steps = [row.step for row in store.evals(run.id)]
        if step is not None or len(steps) < 2:
            made = f"; it has evaluations of the steps {steps}" if steps else ""
            asked = [
                name for name in ("eval_before", "eval_after", "eval_every") if run.spec.get(name)
            ]
            code, what = "invalid_argument", f"{base} alone has no before and after{made}"
            fix = (
                "name the other evaluation; evaluate makes one"
                if steps
                else "train with eval_before and eval_after"
            )
            if step is None and run.ended is None and asked and asked != ["eval_before"]:
                code, what = (
                    "not_ready",
                    f"{base} is {run.state} and has no before and after yet{made}",
                )
                fix = f"status(run_id={base!r}, wait_s=40) waits for it; compare again once it has ended"
            raise FlashError(code, what, base=base, fix=fix)
        first = evaluations.evaluation_at(store, run, steps[0])
        return (run, first), (run, evaluations.evaluation_at(store, run, None))
    first, second = ((run, evaluations.evaluation_at(store, run, step)) for run, step in (
        _reference(store, reference) for reference in (base, other)
    ))  # fmt: skip
    if (first[0].id, first[1].step) == (second[0].id, second[1].step):
        raise FlashError(
            "invalid_argument",
            "both are the same evaluation",
            base=base,
            other=other,
            fix="name two",
        )
    return first, second


def _reference(store: Store, text: str) -> tuple[Run, int | None]:
    named = references.RUN.fullmatch(text)
    if named is None:
        fix = "name a run as RUN or RUN@STEP; evaluate makes an evaluation of any model and returns its run_id"
        raise FlashError("invalid_argument", f"{text!r} is no run", fix=fix)
    return store.run(named["run"]), int(named["step"]) if named["step"] else None


def _is_trained(run: Run, row: Evaluation) -> bool:
    """Whether the model had learnt here: a base model remembers no task, whatever the splits share."""
    return bool(run.init_adapter) or (run.algorithm != "eval" and row.step > 0)


def _change(
    tasks: list[dict[str, list[Try]]], both: list[str], metric: str, effect: float
) -> Change:
    base, other = (evaluations.means(side, metric) for side in tasks)
    if both:
        found = comparison.compare_paired(
            [base[task] for task in both], [other[task] for task in both], effect=effect
        )
    else:
        found = comparison.compare_unpaired([*base.values()], [*other.values()], effect=effect)
    return Change(
        outcome=found.outcome,
        change=round(found.change, 4),
        low=round(found.low, 4),
        high=round(found.high, 4),
        test=found.test,
        p=None if found.p is None else float(f"{found.p:.3g}"),
        decide_n=found.decide_n,
        explanation=found.explanation,
    )


def _side(run: Run, row: Evaluation, found: list[Try]) -> Side:
    tasks = evaluations.by_task(found)
    success, reward = (
        fmean(evaluations.means(tasks, metric).values()) for metric in ("success", "reward")
    )
    return Side(
        run_id=run.id,
        step=row.step,
        of=_name(run, row.step),
        environment=f"{run.environment}@{run.environment_digest}",
        tasks=len(tasks),
        attempts=evaluations.settings(run)["attempts"],
        success=round(success, 4),
        band=round(health.noise_band(success, len(tasks)), 4),
        reward=round(reward, 4),
        errors=sum(attempt.error is not None for attempt in found) or None,
    )


def _name(run: Run, step: int) -> str:
    if run.algorithm == "eval":
        checkpoint = run.spec["checkpoint"]
        return f"{run.model} with {checkpoint}" if checkpoint else run.model
    return (
        f"{run.model} with {run.id}@{step}"
        if step
        else f"{run.model} before the training of {run.id}"
    )


def _moved(tasks: list[dict[str, list[Try]]], both: list[str]) -> dict[str, float]:
    """{task id: change of its share of successes} where there is one, the largest first."""
    base, other = (evaluations.means(side, "success") for side in tasks)
    changes = {task: other[task] - base[task] for task in both if other[task] != base[task]}
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))


def _flip(
    store: Store,
    task: str,
    tasks: list[dict[str, list[Try]]],
    places: tuple[tuple[str, int], tuple[str, int]],
    characters: int,
) -> Flip:
    """A task that moved, with a typical attempt of each side: a failure where it failed more, a
    success otherwise.
    """
    base, other = (side[task] for side in tasks)
    shares = [fmean(each.success for each in side) for side in (base, other)]
    indices = [
        next(each.index for each in side if each.success == (share == max(shares)))
        for side, share in zip((base, other), shares, strict=True)
    ]
    rows = [
        evaluations.transcript(store, *place, index)
        for place, index in zip(places, indices, strict=True)
    ]
    prompts = [evaluations.prompt_length(row) for row in rows]
    first: list[Json] = rows[0].messages[: prompts[0]]
    texts = [_conversation(row.messages[start:]) for row, start in zip(rows, prompts, strict=True)]
    return Flip(
        task_id=task,
        base=round(shares[0], 4),
        other=round(shares[1], 4),
        base_index=indices[0],
        other_index=indices[1],
        prompt=_excerpt(str(first[-1].get("content")) if first else "", characters // 4),
        base_text=_excerpt(texts[0], characters * 3 // 8),
        other_text=_excerpt(texts[1], characters * 3 // 8),
    )


def _excerpt(text: str, characters: int) -> str:
    """The text within so many characters of JSON, where line ends and quotes take two."""
    cost = len(to_text(text)) - 2
    return text if cost <= characters else shorten(text, characters * len(text) // cost)


def _conversation(messages: list[Json]) -> str:
    """The model's turns as they are, what answered them in brackets."""
    texts = [(message["role"] == "assistant", str(message.get("content"))) for message in messages]
    return "\n".join(text if mine else f"[{text}]" for mine, text in texts)


def _limits(base: Run, other: Run, tasks: list[dict[str, list[Try]]], both: list[str]) -> list[str]:
    notes: list[str] = []
    if base.environment_digest != other.environment_digest:
        notes.append(
            "the two are of different versions of the environment: tasks and scorer may differ"
        )
    ours, theirs = evaluations.settings(base), evaluations.settings(other)
    differing = [
        f"{name} {shorten(str(ours[name]), 100)} and {shorten(str(theirs[name]), 100)}"
        for name in ours
        if ours[name] != theirs[name]
    ]
    if differing:
        notes.append(f"the two were not made alike: {'; '.join(differing)}")
    if not both:
        notes.append(
            "the sides have too few tasks in common to be paired: the same tasks on both sides tell far more"
        )
    if not any(
        attempt.success for side in tasks for attempts in side.values() for attempt in attempts
    ):
        notes.append("nothing succeeded on either side: reward tells more than success here")
    return notes
