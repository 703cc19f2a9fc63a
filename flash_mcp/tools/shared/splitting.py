"""Questions with answers as two splits that share no task, and what is said of them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.same_task import MOST_TASKS, Task, gold_of, same_tasks, words_of
from flash_mcp.judgement import labels
from flash_mcp.judgement.labels import FEW_EVAL, Confusion
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.tools.shared.label_scores import said_of
from flash_mcp.tools.shared.truncation import shorten

EVAL_SHARE = 0.2
MOST_EVAL = 200
EXAMPLES = 2
EXAMPLE_CHARACTERS = 100
MOST_LISTED = 20


class LabelsRead(ResultModel):
    """What was found of answers that are labels."""

    counts: dict[str, tuple[int, int]]
    """Rows of train and of eval, by label."""
    merged: dict[str, str] | None = None
    """Spellings that were taken for a label, and in how many rows."""
    contradictions: list[str] | None = None
    """Texts that several labels were given to; the usual one was kept, if there is one."""
    likely_wrong: list[str] | None = None
    """Rows whose label differs from that of the rows with the nearest words; they were kept."""
    baselines: list[str]
    """What eval gets without a model: the label that is most common, and a classifier by words. A
    model that is not better has learnt nothing more."""
    warnings: list[str] | None = None
    """Labels with too few rows to judge."""


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
    whole = [place for place, prompt in enumerate(prompts) if prompt and golds[place]]
    split = Split(list(golds))
    for place in range(len(prompts)):
        if not (prompts[place] and golds[place]):
            said = shorten(prompts[place] or golds[place], EXAMPLE_CHARACTERS)
            split.drop("empty", f"row {place + 1}: {said!r}")
    merged: dict[str, str] = {}
    is_labelled = may_be_labels and labels.are_labels([golds[place] for place in whole])
    if is_labelled:
        merged = labels.misspelt(golds[place] for place in whole)
        split.golds = [merged.get(gold, gold) for gold in golds]
    kept, contradictions = _without_copies(split, prompts, whole, is_labelled)
    alike: list[str] = []
    groups: list[list[int]] = []
    for group in _groups([Task(prompts[place], split.golds[place]) for place in kept], is_labelled):
        places = [kept[number] for number in group]
        # Half of all and more, on one side, would leave the other too little.
        groups += [[place] for place in places] if 2 * len(places) > len(kept) else [places]
        for place in places[1:]:
            texts = (shorten(prompts[number], EXAMPLE_CHARACTERS) for number in (place, places[0]))
            said = " as ".join(map(repr, texts))
            alike.append(f"row {place + 1}, {said} of row {places[0] + 1}")
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
        counter = Counter(gold_of(split.golds[place]) for place in places)
        (usual, most), *others = counter.most_common()
        head: int | None = next(
            place for place in places if not is_labelled or gold_of(split.golds[place]) == usual
        )
        if is_labelled and others:
            given = ", ".join(f"{split.golds[place]!r} (row {place + 1})" for place in places)
            if others[0][1] == most:
                head = None
            what = f"{split.golds[head]!r} kept" if head is not None else "left out"
            contradictions.append(
                f"{shorten(prompts[places[0]], EXAMPLE_CHARACTERS)!r}: {given}; {what}"
            )
        if head is not None:
            kept.append(head)
        for place in places:
            if place == head:
                continue
            first = next(other for other in (head, *places) if other not in (None, place))
            is_copy = head is not None and gold_of(split.golds[place]) == gold_of(split.golds[head])
            reason = "copies" if is_copy else "other answer to the same question"
            said = shorten(prompts[place], EXAMPLE_CHARACTERS)
            split.drop(reason, f"row {place + 1}, as row {first + 1}: {said!r}")
    return sorted(kept), contradictions


def _groups(tasks: Sequence[Task], is_labelled: bool) -> list[list[int]]:
    """Places of tasks in groups that are one task; with labels, whatever labels they have."""
    groups = [[place] for place in range(len(tasks))]
    if len(tasks) > MOST_TASKS:
        return groups
    kinds = [tasks, [Task(task.text) for task in tasks]] if is_labelled else [tasks]
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
        usual = Counter(split.golds[place] for place in group).most_common(1)[0][0]
        strata[usual if is_labelled else ""].append(group)
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
    train = Counter(split.golds[place] for place in split.train)
    held_out = Counter(split.golds[place] for place in split.held_out)
    order = [label for label, _ in (train + held_out).most_common()]
    spelt = Counter(golds)
    usual = train.most_common(1)[0][0]
    predict = labels.learn_by_words(
        [prompts[place] for place in split.train], [split.golds[place] for place in split.train]
    )
    said = [(split.golds[place], predict(prompts[place])[0]) for place in split.held_out]
    constant = [(gold, usual) for gold, _ in said]
    few = [f"{label!r} {held_out[label]}" for label in order if held_out[label] < FEW_EVAL]
    warnings: list[str] = []
    if few:
        what = f"fewer than {FEW_EVAL} eval rows, so that their own figures say little"
        warnings.append(f"{what}: {', '.join(few[:MOST_LISTED])}; add rows of these labels")
    return LabelsRead(
        counts={label: (train[label], held_out[label]) for label in order},
        merged={spelling: f"{label!r}: {spelt[spelling]}" for spelling, label in merged.items()}
        or None,
        likely_wrong=_likely_wrong(split, prompts, groups) or None,
        baselines=[
            said_of(f"always {usual!r}", Confusion.of(constant)),
            said_of(f"{labels.method()} by words", Confusion.of(said)),
        ],
        warnings=warnings or None,
    )


def _likely_wrong(
    split: Split, prompts: Sequence[str], groups: Sequence[Sequence[int]]
) -> list[str]:
    places = [place for group in groups for place in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    texts, golds = [prompts[place] for place in places], [split.golds[place] for place in places]
    found = labels.likely_wrong(texts, golds, numbers)
    lines: list[str] = []
    for number, label in found[:MOST_LISTED]:
        text = shorten(texts[number], EXAMPLE_CHARACTERS)
        lines.append(f"row {places[number] + 1}, {golds[number]!r}: {text!r} looks like {label!r}")
    if len(found) > MOST_LISTED:
        lines.append(f"and {len(found) - MOST_LISTED} more")
    return lines
