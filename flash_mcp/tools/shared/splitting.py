"""Questions with answers as two splits that share no task, and what is said of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.same_task import MOST_TASKS, TaskTexts, gold_of, same_tasks, words_of
from flash_mcp.judgement import labels
from flash_mcp.judgement.labels import FEW_EVAL, Confusion
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.tools.shared.scores import said_of
from flash_mcp.tools.shared.truncation import shorten

EVAL_SHARE = 0.2
MOST_EVAL = 200
EXAMPLES = 2
EXAMPLE_CHARACTERS = 100
MOST_LISTED = 20


class LabelsRead(ResultModel):
    """What was found of answers that are labels."""

    counts: dict[str, tuple[int, int]]
    merged: dict[str, str] | None = None
    contradictions: list[str] | None = None
    likely_wrong: list[str] | None = None
    baselines: list[str]
    warnings: list[str] | None = None


@dataclass
class Split:
    """Places of the rows that were kept."""

    golds: list[str]
    """The answers of all rows, labels in one spelling."""
    train: list[int] = field(default_factory=list[int])
    held_out: list[int] = field(default_factory=list[int])
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Rows that were left out, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Two of them, by reason."""
    alike: str | None = None
    """Of the rows that were kept: those that are another one in other words."""
    labels: LabelsRead | None = None

    def drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        if len(self.examples.setdefault(reason, [])) < EXAMPLES:
            self.examples[reason].append(example)


def split_tasks(prompts: Sequence[str], golds: Sequence[str], *, may_be_labels: bool) -> Split:
    """The same rows are always split the same. Copies are left out; tasks in other words come into
    the same split, and so do rows with one text and several labels. `may_be_labels`: whether few
    short answers are labels."""
    split = Split(list(golds))
    whole: list[int] = []
    answers: list[str] = []
    for place, prompt in enumerate(prompts):
        if prompt and golds[place]:
            whole.append(place)
            answers.append(golds[place])
        else:
            said = shorten(prompt or golds[place], EXAMPLE_CHARACTERS)
            split.drop("empty", f"row {place + 1}: {said!r}")
    merged: dict[str, str] = {}
    is_labelled = may_be_labels and labels.are_labels(answers)
    if is_labelled:
        merged = labels.misspelt(answers)
        split.golds = [merged.get(gold, gold) for gold in golds]
    kept, contradictions = _without_copies(split, prompts, whole, is_labelled)
    alike: list[str] = []
    groups: list[list[int]] = []
    for group in _groups(
        [TaskTexts(prompts[place], split.golds[place]) for place in kept], is_labelled
    ):
        places = [kept[number] for number in group]
        if 2 * len(places) > len(kept):
            # Half of all and more, on one side, would leave the other too little.
            groups += [[place] for place in places]
        else:
            groups.append(places)
        first = shorten(prompts[places[0]], EXAMPLE_CHARACTERS)
        for place in places[1:]:
            said = shorten(prompts[place], EXAMPLE_CHARACTERS)
            alike.append(f"row {place + 1}, {said!r} as {first!r} of row {places[0] + 1}")
    if alike:
        what = f"{len(alike)} rows are another one in other words, and came into its split"
        split.alike = f"{what}: {'; '.join(alike[:EXAMPLES])}"
    _divide(split, groups, is_labelled)
    if is_labelled:
        split.labels = _labels_read(split, prompts, golds, groups, merged)
        split.labels.contradictions = contradictions[:MOST_LISTED] or None
    return split


def _without_copies(
    split: Split, prompts: Sequence[str], whole: Sequence[int], is_labelled: bool
) -> tuple[list[int], list[str]]:
    """The first row of each text, and texts with several labels. Of answers the first is kept; of
    labels the one that more rows have, and of two as usual none."""
    same: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place in whole:
        same[words_of(prompts[place])].append(place)
    kept: list[int] = []
    contradictions: list[str] = []
    for places in same.values():
        answers = [gold_of(split.golds[place]) for place in places]
        (usual, most), *others = Counter(answers).most_common()
        head: int | None = places[0]
        text = shorten(prompts[places[0]], EXAMPLE_CHARACTERS)
        if is_labelled and others:
            head, what = None, "left out"
            if others[0][1] < most:
                head = places[answers.index(usual)]
                what = f"{split.golds[head]!r} kept"
            said = ", ".join(f"{split.golds[place]!r} (row {place + 1})" for place in places)
            contradictions.append(f"{text!r}: {said}; {what}")
        if head is not None:
            kept.append(head)
        for place, answer in zip(places, answers, strict=True):
            if place == head:
                continue
            other = head
            if other is None:
                other = places[0] if place != places[0] else places[1]
            reason = "other answer to the same question"
            if head is not None and answer == gold_of(split.golds[head]):
                reason = "copies"
            said = shorten(prompts[place], EXAMPLE_CHARACTERS)
            split.drop(reason, f"row {place + 1}, as row {other + 1}: {said!r}")
    return sorted(kept), contradictions


def _groups(tasks: Sequence[TaskTexts], is_labelled: bool) -> list[list[int]]:
    """Places of tasks in groups that are one task; with labels, whatever labels they have."""
    groups = [[place] for place in range(len(tasks))]
    if len(tasks) > MOST_TASKS:
        return groups
    kinds = [tasks, [TaskTexts(task.text) for task in tasks]] if is_labelled else [tasks]
    home = list(range(len(tasks)))
    for kind in kinds:
        for places in same_tasks(kind).groups:
            first, *others = {home[place] for place in places}
            for other in others:
                groups[first] += groups[other]
                for place in groups[other]:
                    home[place] = first
                groups[other] = []
    return [sorted(group) for group in groups if group]


def _divide(split: Split, groups: list[list[int]], is_labelled: bool) -> None:
    """Fill train and eval with whole groups; of each label the same share."""
    total = sum(map(len, groups))
    share = min(MOST_EVAL / max(total, 1), EVAL_SHARE)
    strata: defaultdict[str, list[list[int]]] = defaultdict(list)
    for group in groups:
        usual = ""
        if is_labelled:
            usual = Counter(split.golds[place] for place in group).most_common(1)[0][0]
        strata[usual].append(group)
    generator = random.Random(0)
    train: list[int] = []
    held_out: list[int] = []
    for stratum in strata.values():
        generator.shuffle(stratum)
        wanted = round(share * sum(map(len, stratum)))
        if is_labelled and len(stratum) > 1:
            wanted = max(1, wanted)
        count = 0
        for number, group in enumerate(stratum):
            is_last = is_labelled and number == len(stratum) - 1
            if count < wanted and not is_last:
                held_out += group
                count += len(group)
            else:
                train += group
    if is_labelled:  # rows of one label would follow each other
        generator.shuffle(train)
        generator.shuffle(held_out)
    split.train, split.held_out = train, held_out


def _labels_read(
    split: Split,
    prompts: Sequence[str],
    golds: Sequence[str],
    groups: Sequence[Sequence[int]],
    merged: dict[str, str],
) -> LabelsRead:
    learnt = [split.golds[place] for place in split.train]
    train = Counter(learnt)
    usual = train.most_common(1)[0][0]
    predict = labels.learn_by_words([prompts[place] for place in split.train], learnt)
    said: list[tuple[str, str]] = []
    constant: list[tuple[str, str]] = []
    for place in split.held_out:
        said.append((split.golds[place], predict(prompts[place])[0]))
        constant.append((split.golds[place], usual))
    held_out = Counter(gold for gold, _ in said)
    spelt = Counter(golds)
    counts: dict[str, tuple[int, int]] = {}
    few: list[str] = []
    for label, _ in (train + held_out).most_common():
        counts[label] = (train[label], held_out[label])
        if held_out[label] < FEW_EVAL:
            few.append(f"{label!r} {held_out[label]}")
    warnings: list[str] = []
    if few:
        what = f"fewer than {FEW_EVAL} eval rows, so that their own figures say little"
        warnings.append(f"{what}: {', '.join(few[:MOST_LISTED])}; add rows of these labels")
    return LabelsRead(
        counts=counts,
        merged={spelling: f"{label!r}: {spelt[spelling]}" for spelling, label in merged.items()}
        or None,
        likely_wrong=_likely_wrong(split, prompts, groups) or None,
        baselines=[
            said_of(f"always {usual!r}", Confusion.of(constant)),
            said_of("nearest neighbours by words", Confusion.of(said)),
        ],
        warnings=warnings or None,
    )


def _likely_wrong(
    split: Split, prompts: Sequence[str], groups: Sequence[Sequence[int]]
) -> list[str]:
    places: list[int] = []
    numbers: list[int] = []
    for number, group in enumerate(groups):
        places += group
        numbers += [number] * len(group)
    texts, golds = [prompts[place] for place in places], [split.golds[place] for place in places]
    found = labels.likely_wrong(texts, golds, numbers)
    lines: list[str] = []
    for number, label in found[:MOST_LISTED]:
        text = shorten(texts[number], EXAMPLE_CHARACTERS)
        lines.append(f"row {places[number] + 1}, {golds[number]!r}: {text!r} looks like {label!r}")
    if len(found) > MOST_LISTED:
        lines.append(f"and {len(found) - MOST_LISTED} more")
    return lines
