"""Answers that are labels: their spellings, what word counts reach, and rows that look wrong.

Pure functions over texts and their labels."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from statistics import fmean

from environments.same_task import words_of

MOST_LABELS = 100
MOST_NUMBERS = 5
"""If all labels are numbers there are fewer of them: 0 and 1, or one to five stars."""
ROWS_EACH = 4
ROWS_EACH_NUMBER = 10
"""So many rows a label has on average."""
LONGEST = 60
"""Characters of a label."""
SHORTEST_MISSPELT = 5
"""Characters of a label of which one may be wrong."""
RARE = 0.05
"""A spelling is a mistake if it is used so seldom beside the one that it resembles."""
FEW_EVAL = 20
"""Of fewer eval rows, a label's share of right answers says little."""
FOLDS = 5
NEIGHBOURS = 5
MOST_CHECKED = 4000
"""So many rows are looked at for wrong labels."""
SURE = 0.9
"""So sure is the baseline of another label than the row's, if the row's is likely wrong."""

Predict = Callable[[str], tuple[str, float]]
"""The label of a text, and its probability."""


def are_labels(answers: Sequence[str]) -> bool:
    spellings = Counter(map(_plain, answers))
    is_numeric = all(re.fullmatch(r"[-+\d.,]+", label) for label in spellings)
    most = min(MOST_LABELS, len(answers) // ROWS_EACH)
    if is_numeric:
        most = min(MOST_NUMBERS, len(answers) // ROWS_EACH_NUMBER)
    return 2 <= len(spellings) <= most and max(map(len, spellings)) <= LONGEST


def misspelt(answers: Iterable[str]) -> dict[str, str]:
    """{spelling: label} of the answers that are another one's in other case, spacing or hyphens,
    or seldom and with a letter missing, added, wrong or swapped."""
    counter = Counter(answers)
    forms: defaultdict[str, list[str]] = defaultdict(list)
    sizes = Counter[str]()
    for answer, count in counter.most_common():
        forms[_plain(answer)].append(answer)
        sizes[_plain(answer)] += count
    results: dict[str, str] = {}
    for form, same in forms.items():
        label = same[0]
        for other, size in sizes.most_common():
            if sizes[form] <= max(1, RARE * size) and _is_slip(form, other):
                label = forms[other][0]
                break
        for answer in same:
            if answer != label:
                results[answer] = label
    return results


def _plain(label: str) -> str:
    return " ".join(re.split(r"[\s_-]+", label.casefold().strip(" \t\n_-.\"'")))


def _is_slip(form: str, other: str) -> bool:
    """Whether `form` is `other` with one letter missing, added, swapped, or wrong within a word."""
    if min(len(form), len(other)) < SHORTEST_MISSPELT or form == other:
        return False
    place = 0
    while form[place : place + 1] == other[place : place + 1]:
        place += 1
    changed = {form[place : place + 1], other[place : place + 1]} - {""}
    if not all(letter.isalpha() for letter in changed):
        return False
    rest, its_rest = form[place:], other[place:]
    is_swapped = rest[:2] == its_rest[1::-1] and len(rest) > 1 and rest[2:] == its_rest[2:]
    # "type a" and "type b" are two labels.
    is_wrong = rest[1:] == its_rest[1:] and 0 < place < len(form) - 1
    return is_swapped or is_wrong or rest[1:] == its_rest or rest == its_rest[1:]


# -- what word counts reach ------------------------------------------------------------------------


def learn_by_words(texts: Sequence[str], labels: Sequence[str]) -> Predict:
    """The label of the texts that are nearest, by the cosine of their words' weights (tf-idf)."""
    sets = [set(words_of(text)) for text in texts]
    uses = Counter[str]()
    for words in sets:
        uses.update(words)
    weights = {word: math.log(1 + len(texts) / count) ** 2 for word, count in uses.items()}

    def length(words: Iterable[str]) -> float:
        return math.sqrt(sum(weights.get(word, 0.0) for word in words)) or 1.0

    lengths = list(map(length, sets))
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, words in enumerate(sets):
        for word in words:
            places[word].append(place)

    def predict(text: str) -> tuple[str, float]:
        shared: defaultdict[int, float] = defaultdict(float)
        for word in set(words_of(text)):
            for place in places.get(word, ()):
                shared[place] += weights[word] / lengths[place]
        votes: defaultdict[str, float] = defaultdict(float)
        for place in nlargest(NEIGHBOURS, shared, key=shared.__getitem__):
            votes[labels[place]] += shared[place]
        if not votes:
            return Counter(labels).most_common(1)[0][0], 0.0
        best = max(votes, key=votes.__getitem__)
        return best, votes[best] / sum(votes.values())

    return predict


def likely_wrong(
    texts: Sequence[str], labels: Sequence[str], groups: Sequence[int]
) -> list[tuple[int, str]]:
    """(place, other label) of the rows that all their nearest neighbours contradict. Rows of one
    group are no neighbours."""
    results: list[tuple[int, str, float]] = []
    count = min(len(texts), MOST_CHECKED)
    for fold in range(FOLDS):
        rest: list[int] = []
        left_out: list[int] = []
        for place in range(count):
            (left_out if groups[place] % FOLDS == fold else rest).append(place)
        if not rest:
            continue
        predict = learn_by_words(
            [texts[place] for place in rest], [labels[place] for place in rest]
        )
        for place in left_out:
            label, share = predict(texts[place])
            if label != labels[place] and share >= SURE:
                results.append((place, label, share))
    results.sort(key=lambda item: (-item[2], item[0]))
    return [(place, label) for place, label, _ in results]


# -- results by class ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Confusion:
    """How often each label was answered with each: {label: {answer: count}}."""

    counts: Mapping[str, Mapping[str, int]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Confusion:
        """Of (label, answer)."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for label, answer in pairs:
            counts[label][answer] += 1
        return cls(counts)

    def n(self, label: str) -> int:
        return sum(self.counts.get(label, {}).values())

    def recall(self, label: str) -> float:
        return self.counts[label].get(label, 0) / self.n(label)

    def f1(self, label: str) -> float:
        right = self.counts[label].get(label, 0)
        answered = sum(answers.get(label, 0) for answers in self.counts.values())
        return 2 * right / (self.n(label) + answered)

    @cached_property
    def accuracy(self) -> float:
        right = sum(answers.get(label, 0) for label, answers in self.counts.items())
        return right / sum(map(self.n, self.counts))

    @property
    def balanced(self) -> float:
        """The mean of the labels' recalls: the accuracy if each label were as common."""
        return fmean(map(self.recall, self.counts))

    @property
    def macro_f1(self) -> float:
        return fmean(map(self.f1, self.counts))


NO_LABEL = "(no label)"
TAGGED = re.compile(r"<(\w+)>\s*([^<>]*?)\s*</\1>")


def label_said(text: str, known: Mapping[str, str]) -> str:
    """The label that an answer names: in its last tags, as its last line, or alone in it; `known`
    are the labels by their plain spelling."""
    tags = [said for _, said in TAGGED.findall(text)]
    for place in (*tags[-1:], *text.rstrip().splitlines()[-1:]):
        if label := known.get(_plain(place)):
            return label
    said = f" {_plain(' '.join(words_of(text)))} "
    named = {label for plain, label in known.items() if f" {plain} " in said}
    return named.pop() if len(named) == 1 else NO_LABEL


def confusion_of(answers: Iterable[tuple[str, str, bool]]) -> Confusion:
    """Of (gold label, answer, success) of attempts. What succeeded has said the gold label, in
    whatever words."""
    rows = list(answers)
    known = {_plain(gold): gold for gold, _, _ in rows}
    pairs: list[tuple[str, str]] = []
    for gold, text, is_right in rows:
        said = gold if is_right else label_said(text, known)
        # A scorer that wants more than the label did not take it.
        pairs.append((gold, NO_LABEL if said == gold and not is_right else said))
    return Confusion.of(pairs)
