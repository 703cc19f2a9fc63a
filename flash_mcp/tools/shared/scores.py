"""What evaluations found, as tools show it: scores, failed attempts, and how far seeds spread."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from flash_mcp.judgement import attempts, comparison, labels, statistics
from flash_mcp.judgement.comparison import Verdict
from flash_mcp.judgement.labels import FEW_EVAL, Confusion
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import ACTIVE, Evaluation, Json, Rollout, Run, Try, text_of
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.truncation import shorten, shorten_as_json

SHOWN = 2
"""Failed attempts."""
CHARACTERS = 700
"""Of a failed attempt."""


class Scores(ResultModel):
    """What an evaluation found. Attempts that failed in environment code are counted in `errors`
    and nowhere else.
    """

    # low, high: Wilson's 95 % interval, tasks are the unit. constant: the best constant answer's
    # share of the tasks. pass_at: unbiased. uniform_share: tasks whose attempts all scored alike.
    tasks: int
    n: int
    success: Rounded | None = None
    low: Rounded | None = None
    high: Rounded | None = None
    constant: Rounded | None = None
    # Present if the model is not clearly better than that, or gives all tasks one answer.
    doubt: str | None = None
    reward: Rounded | None = None
    pass_at: dict[str, Rounded] | None = None
    uniform_share: Rounded | None = None
    never_solved: int | None = None
    always_solved: int | None = None
    tokens_mean: float | None = None
    tokens_most: int | None = None
    turns: float | None = None
    truncated: Rounded | None = None
    errors: int
    error_codes: dict[str, int] | None = None
    tokens_per_s: float | None = None


def scores(store: Store, run: Run) -> Scores | None:
    rows = store.evals(run.id)
    if rows:
        return scores_of(rows[-1], store.tries(run.id, rows[-1].step))
    return None


def scores_of(evaluation: Evaluation, tries: Sequence[Try]) -> Scores:
    tasks = attempts.by_task(tries)
    valid = [item for item in tries if item.error is None]
    codes = Counter(item.error for item in tries if item.error is not None)
    result = Scores(
        tasks=len(tasks),
        n=len(valid),
        errors=len(tries) - len(valid),
        error_codes=dict(codes) or None,
    )
    if not valid:
        return result
    outcomes = attempts.successes(tasks)
    interval = statistics.success_interval(outcomes)
    result.success = attempts.mean(valid, "success")
    result.low = interval.low
    result.high = interval.high
    result.constant = evaluation.summary.get("constant_success")
    result.doubt = comparison.against_constant(evaluation, interval.low) or None
    result.reward = attempts.mean(valid, "reward")
    result.pass_at = attempts.pass_at(tasks) or None
    if len(valid) > len(tasks):
        kinds = attempts.distinct(tasks, "success")
        result.uniform_share = attempts.uniform_share(tasks)
        result.never_solved = kinds.count({False})
        result.always_solved = kinds.count({True})
    result.tokens_mean = round(attempts.mean(valid, "tokens"), 1)
    result.tokens_most = max(item.tokens for item in valid)
    result.turns = round(attempts.mean(valid, "turns"), 2)
    result.truncated = attempts.mean(valid, "truncated")
    speed = evaluation.summary.get("tokens_per_s")
    result.tokens_per_s = float(round(speed)) if speed else None
    return result


def thoughts(scored: Scores) -> list[str]:
    notes: list[str] = []
    if scored.errors:
        share = scored.errors / (scored.errors + scored.n)
        failed = f"{percent(share)} of the attempts failed in environment code"
        notes.append(f"{failed} and say nothing of the model; env_test")
    if scored.doubt:
        notes.append(scored.doubt)
    if scored.truncated and scored.truncated >= 0.1:
        cut = f"{percent(scored.truncated)} were cut off"
        notes.append(f"{cut}: raise max_tokens or max_length, or the rate is of the limit")
    if scored.low is not None and scored.high is not None and scored.high - scored.low > 0.2:
        few = f"the interval is wide: {scored.tasks} tasks tell little"
        notes.append(f"{few}; more tasks narrow it, attempts hardly do")
    return notes


# -- failed attempts -------------------------------------------------------------------------------


class FailedAttempt(ResultModel):
    """An attempt that failed."""

    task_id: str
    index: int
    reward: Rounded
    prompt: str
    text: str
    expected: str | None = None
    reason: str | None = None


def worst_attempts(store: Store, run: Run) -> list[FailedAttempt] | None:
    step = run.evaluation.step
    rows = store.rollouts(run.id, "eval", step, "worst", success=False, limit=SHOWN)
    return [_shown(row) for row in rows] or None


def _shown(row: Rollout) -> FailedAttempt:
    return FailedAttempt(
        task_id=row.task_id,
        index=row.index,
        reward=row.reward,
        prompt=shorten_as_json(last_prompt(row), CHARACTERS // 3),
        text=shorten_as_json(conversation(row), CHARACTERS // 2),
        expected=row.expected and shorten_as_json(row.expected, CHARACTERS // 6),
        reason=shorten(row.reason or "", CHARACTERS // 6) or None,
    )


def last_prompt(row: Rollout) -> str:
    """The last message before the model's first turn."""
    prompt = row.messages[: row.prompt_messages]
    return text_of(prompt[-1]) if prompt else ""


def conversation(row: Rollout) -> str:
    """The model's turns as they are, what answered them in brackets."""
    messages: Sequence[Json] = row.messages[row.prompt_messages :]
    turns: list[str] = []
    for message in messages:
        text = text_of(message)
        turns.append(text if message["role"] == "assistant" else f"[{text}]")
    return "\n".join(turns)


# -- seeds -----------------------------------------------------------------------------------------


def verdict_of(store: Store, run: Run, evaluations: Sequence[Evaluation]) -> Verdict | None:
    """The verdict on a training run, by those of its evaluations that can be judged."""
    pairs = store.pairs(run.id, evaluations)
    is_active = run.state in ACTIVE
    judged = comparison.judge(evaluations, pairs, run.lineage.get("overlap"), is_active)
    return judged[1] if judged else None


def spread_of(store: Store, run: Run) -> str | None:
    """The held-out success of the runs with other seeds, if `run` is one of several: their mean and
    its interval, then each with its verdict. Only runs that succeeded count in the mean.
    """
    if run.seed_group is None:
        return None
    shares: list[float] = []
    lines: list[str] = []
    for other in store.seed_runs(run):
        line = f"{other.id} (seed {other.training.seed}) {other.state}"
        evaluations = [row for row in store.evals(other.id) if row.can_be_judged]
        if evaluations and evaluations[-1].step > 0:
            share = evaluations[-1].summary["success"]
            line += f", {share:.3f}"
            if other.state == "succeeded":
                shares.append(share)
        if verdict := verdict_of(store, other, evaluations):
            line += f", {verdict.outcome}"
        if elsewhere(store, other)[1]:
            line += ", worse elsewhere"
        lines.append(line)
    text = f"{len(lines)} seeds, none with a held-out success yet"
    if shares:
        text = f"held-out success of {len(shares)} of {len(lines)} seeds: mean {fmean(shares):.3f}"
    if len(shares) > 1:
        interval = statistics.mean_interval(shares)
        low, high = max(0.0, interval.low), min(1.0, interval.high)
        text += f", 95 % interval over seeds, on these tasks, {low:.3f} to {high:.3f}"
    return f"{text}: {'; '.join(lines)}"


def elsewhere(store: Store, run: Run) -> tuple[str, bool]:
    """How the run changed at other kinds of tasks, in words, and whether it got worse; empty where
    none were tried.
    """
    events = store.events(run.id, kinds=["regression"])
    before: Mapping[str, bool] = {}
    after: Mapping[str, bool] = {}
    for event in events:
        if event.data["step"]:
            after = event.data["outcomes"]
        else:
            before = event.data["outcomes"]
    tasks = comparison.shared(before, after)
    if not tasks:
        if before:
            solved = fmean(before.values())
            loss = percent(statistics.visible_loss(len(before), solved * len(before)))
            text = f"{solved:.2f} of {len(before)} other tasks before training"
            return f"{text}; a loss of {loss} of what it solves is seen", False
        return "", False
    pairs = [(float(before[task]), float(after[task])) for task in tasks]
    old, new = zip(*pairs, strict=True)
    change = comparison.compare_paired(old, new, effect=comparison.MIN_CHANGE)
    lost = Counter(task.rpartition("-")[0] for task in tasks if before[task] and not after[task])
    where = ", ".join(f"{kind} {count}" for kind, count in lost.most_common())
    text = f"{change.outcome} on {len(tasks)} other tasks, {fmean(old):.2f} -> {fmean(new):.2f}"
    if where:
        where = f"; no longer solved: {where}"
    return f"{text}: {change.explanation}{where}", change.outcome == "regressed"


# -- what an evaluation found by label, where the gold answers of its tasks are labels -------------

MOST_SHOWN = 20
LABEL_CHARACTERS = 60
MOST_ROWS = 5000
"""Of more train rows the first ones are learnt by words, within a second."""


class LabelScore(ResultModel):
    """One label."""

    label: str
    n: int
    right: Rounded
    f1: Rounded
    taken_for: dict[str, int] | None = None


class ByLabel(ResultModel):
    """What an evaluation found by label."""

    step: int
    macro_f1: Rounded
    balanced: Rounded
    labels: list[LabelScore]
    more: int | None = None
    baseline: str | None = None
    few: str | None = None


def by_label(store: Store, run: Run, step: int, most: int = MOST_SHOWN) -> ByLabel | None:
    """`most`: labels that are shown. None where gold answers are no labels."""
    if run.mixture or not labels.are_labels(store.golds(run.id, step)):
        return None
    answers = store.answers(run.id, step)
    result = labels.confusion_of((row["expected"], row["text"], row["success"]) for row in answers)
    order = sorted(result.counts, key=lambda label: (result.f1(label), label))
    tasks: defaultdict[str, set[str]] = defaultdict(set)
    for row in answers:
        tasks[row["expected"]].add(row["task_id"])
    words = by_words(store, run)
    few: list[str] = []
    for label in order:
        if len(tasks[label]) < FEW_EVAL:
            few.append(f"{_short(label)} {len(tasks[label])}")
    return ByLabel(
        step=step,
        macro_f1=result.macro_f1,
        balanced=result.balanced,
        labels=[score_of(result, label) for label in order[:most]],
        more=max(0, len(order) - most) or None,
        baseline=said_of("nearest neighbours by words", words) if words else None,
        few=f"fewer than {FEW_EVAL} tasks: {', '.join(few[:most])}" if few else None,
    )


def score_of(result: Confusion, label: str) -> LabelScore:
    wrong: dict[str, int] = {}
    for answer, count in sorted(result.counts[label].items(), key=lambda item: -item[1]):
        if answer != label:
            wrong[_short(answer)] = count
    return LabelScore(
        label=_short(label),
        n=result.n(label),
        right=result.recall(label),
        f1=result.f1(label),
        taken_for=wrong or None,
    )


def said_of(name: str, result: Confusion) -> str:
    rows = sum(map(result.n, result.counts))
    return (
        f"{name}: {percent(result.accuracy)} of the {rows} eval rows, "
        f"{percent(result.balanced)} if each label were as common, "
        f"macro-F1 {result.macro_f1:.2f}"
    )


def _short(label: str) -> str:
    return shorten(label, LABEL_CHARACTERS)


def by_words(store: Store, run: Run) -> Confusion | None:
    """What word counts reach on the eval rows of the run's environment."""
    with suppress(FlashError):  # it may have been removed
        return _by_words(store.environment(run.environment_reference).path)
    return None


@lru_cache(maxsize=64)
def _by_words(folder: str) -> Confusion | None:
    """A version's files never change."""
    splits: dict[str, tuple[list[str], list[str]]] = {}
    for split in ("train", "eval"):
        texts: list[str] = []
        golds: list[str] = []
        try:
            lines = Path(folder, "datasets", f"{split}.jsonl").read_text("utf-8").splitlines()
            rows = list(map(json.loads, lines))
        except (OSError, ValueError, RecursionError):
            return None
        if not all(isinstance(row, dict) for row in rows):  # the starter writes it otherwise
            return None
        for row in rows[:MOST_ROWS]:
            text, gold = row.get("input"), row.get("output")
            if not (isinstance(text, str) and isinstance(gold, str)):
                return None
            texts.append(text)
            golds.append(gold)
        if not texts:
            return None
        splits[split] = texts, golds
    if not labels.are_labels(splits["train"][1]):
        return None
    predict = labels.learn_by_words(*splits["train"])
    texts, golds = splits["eval"]
    return Confusion.of((gold, predict(text)[0]) for text, gold in zip(texts, golds, strict=True))
