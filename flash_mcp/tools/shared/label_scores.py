"""What an evaluation found by label, where the gold answers of its tasks are labels."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from flash_mcp.judgement import labels
from flash_mcp.judgement.labels import FEW_EVAL, Confusion
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.result_model import ResultModel, Rounded
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.truncation import shorten

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
        baseline=_baseline(store, run),
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
    """A classifier's figures in words."""
    rows = sum(map(result.n, result.counts))
    return (
        f"{name}: {percent(result.accuracy)} of the {rows} eval rows, "
        f"{percent(result.balanced)} if each label were as common, "
        f"macro-F1 {result.macro_f1:.2f}"
    )


def _short(label: str) -> str:
    return shorten(label, LABEL_CHARACTERS)


def _baseline(store: Store, run: Run) -> str | None:
    with suppress(FlashError):  # it may have been removed
        return _by_words(store.environment(run.environment_reference).path)
    return None


@lru_cache(maxsize=64)
def _by_words(folder: str) -> str | None:
    """A version's files never change."""
    splits: dict[str, tuple[list[str], list[str]]] = {}
    for split in ("train", "eval"):
        texts: list[str] = []
        golds: list[str] = []
        for row in _rows(Path(folder, "datasets", f"{split}.jsonl"))[:MOST_ROWS]:
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
    pairs = [(gold, predict(text)[0]) for text, gold in zip(texts, golds, strict=True)]
    return said_of(f"{labels.method()} by words", Confusion.of(pairs))


def _rows(path: Path) -> Sequence[Json]:
    """Its rows; none if it cannot be read as the starter writes it."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError, RecursionError):
        return ()
    return rows if all(isinstance(row, dict) for row in rows) else ()
