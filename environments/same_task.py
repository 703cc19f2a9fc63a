"""Which tasks are the same: the one notion of it that splits, checks and curation share.

    groups = same_tasks([Task("What is 3 + 4?", "7"), Task("what is 3 + 4", "7")]).groups

Two tasks are the same if they ask with the same words, whatever the case, spacing and punctuation,
or nearly the same words about the same numbers, and their gold answers, where both are known, are
equal. `template_of` is the second level: a prompt without its numbers and names."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import chain, takewhile
from math import ceil
from typing import Any, cast

ALIKE = 0.8  # share of their words that two tasks have in common if one is the other in other words
TELLING_ALIKE = 0.85
"""Share of the words that at most half of all tasks have, which the one with fewer of them shares
if both tasks have words of their own: a long instruction of all tasks does not make them alike."""
MOST_ALIKE = 20
"""Wordings of one task. If more are alike, it is the form of all tasks."""
FILLERS = 2
"""So many others that differ from a task in the words at one place: these are what it asks."""
MOST_FILLED = 3  # words at that place
MOST_PAIRS = 3_000_000  # so many pairs are compared, which takes some seconds
MOST_TASKS = 30_000  # of more tasks, no other words are sought: to index 20,000 takes a second
MOST_SHOUTED = 0.6  # in a text with more capital letters than this share, they mark no names

# Scripts without spaces are compared by character. A bracket, sign or emoji may change what is
# asked.
TOKEN = re.compile(
    r"\d+(?:[.,]\d+)*(?!\w)|[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|\w+|[-+*/=<>^%|&~$€£()\[\]{}]"
    r"|[\u2600-\u27bf\U0001f000-\U0001faff]"
)
NAME = re.compile(r"[^\W\d_]+(?:['’]\w+)?")
VERB = re.compile(
    r"\s+(?:\w+(?:s|ed)|and|bought|can|found|gave|got|had|made|sold|spent|took|went|will|won)\b"
)
"""What follows a name that begins a sentence, as "Ada buys". "How many" and "Add 3" are none."""
NO_NAMES = re.compile(
    "an?|he|her|his|how|i|it|my|she|that|the|there|they|this|wh(?:at|en|ere|ich|o|y)|you"
)
"""Words that begin a sentence before a verb and are no names."""


@dataclass(frozen=True)
class TaskTexts:
    """`text` is all that the model is shown but the system message. A gold of None is unknown."""

    text: str
    gold: str | None = None
    system: str = ""


@dataclass
class Same:
    """Places of tasks in groups that are one task; each task is in one group."""

    groups: list[list[int]]
    is_whole: bool = True
    """Whether all pairs were compared. Equal words are always found."""
    reworded: set[int] = field(default_factory=set[int])
    """The tasks that are in a group by other words than its first."""


def task_of(messages: Iterable[Mapping[str, Any]], gold: str | None = None) -> TaskTexts:
    """A conversation as a task: all turns that the model sees, with tool calls."""
    system: list[str] = []
    turns: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        for call in cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ()):
            said += f"\n{json.dumps(call.get('function', call), ensure_ascii=False, default=str)}"
        (system if message.get("role") in ("system", "developer") else turns).append(said)
    return TaskTexts("\n".join(turns), gold, "\n".join(system))


def words_of(text: str) -> tuple[str, ...]:
    """Its words, numbers and signs of arithmetic, in order; a line of a drawing is one word."""
    words: list[str] = []
    for line in unicodedata.normalize("NFKC", text).casefold().splitlines():
        own = TOKEN.findall(line)
        signs = "".join(line.split())
        is_drawn = len(signs) > 2 * sum(map(len, own))  # such as a maze of # and dots
        words += [signs] if is_drawn else own
    return tuple(words)


def gold_of(gold: str | None) -> str | None:
    """The gold answer by its words."""
    return None if gold is None else " ".join(words_of(gold)) or gold.strip()


def template_of(prompt: str) -> str:
    """The prompt without its numbers and names: tasks that were made from one form share it."""
    text = unicodedata.normalize("NFKC", prompt)
    letters = [letter for letter in text if letter.isalpha()]
    is_shouted = sum(map(str.isupper, letters)) > MOST_SHOUTED * len(letters)

    def without_name(match: re.Match[str]) -> str:
        if is_shouted or not match[0][0].isupper() or NO_NAMES.fullmatch(match[0].casefold()):
            return match[0]
        before = text[: match.start()].rstrip(" \t\"'“‘(")
        begins = not before or before[-1] in ".!?:\n"
        is_title = re.search(r"\b(?:Dr|Mr|Mrs|Ms|Prof)\.$", before[-6:]) is not None
        is_name = not begins or is_title or VERB.match(text, match.end())
        return " \x00 " if is_name else match[0]

    masked = re.sub(r"\x00(?:\W+\x00)*", " \x00 ", NAME.sub(without_name, text))
    tokens = re.findall(r"\x00|" + TOKEN.pattern, masked.casefold())
    return " ".join(
        "NAME" if token == "\x00" else "0" if token[0].isdigit() else token for token in tokens
    )


def kind_of(messages: Sequence[Mapping[str, Any]], group: str | None) -> str:
    """The group that a task declares, else a digest of the form of the last message that it opens
    with: those before it may show other tasks as examples.
    """
    return group if group is not None else _digest_of_form(task_of(messages[-1:]).text)


@lru_cache(512)  # the attempts at a task have one prompt
def _digest_of_form(prompt: str) -> str:
    return sha256(template_of(prompt).encode(errors="replace")).hexdigest()[:12]


def is_permuted(one: TaskTexts, other: TaskTexts) -> bool:
    """Whether two tasks of one form have the same numbers in another order, as 3 + 4 and 4 + 3."""
    orders = [[word for word in words_of(task.text) if word[0].isdigit()] for task in (one, other)]
    return orders[0] != orders[1] and template_of(one.text) == template_of(other.text)


class SameTasks:
    """An index of tasks, in which the same ones are found without comparing all pairs.

    Words are compared as sets. Two sets of which ALIKE is shared also share one of the rarest words
    of either, so only tasks with such a word in common, and the same numbers, are compared."""

    def __init__(self, tasks: Sequence[TaskTexts]) -> None:
        self._systems: defaultdict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        uses: defaultdict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        parts = [(words_of(task.text), words_of(task.system)) for task in tasks]
        for turns, system in parts:
            uses[system].add(turns)
        for turns, system in parts:
            if len(uses[system]) == 1:  # else it says nothing of the task
                self._systems[turns].add(system)
        self.golds = [gold_of(task.gold) for task in tasks]
        self.words = [self._words(*part) for part in parts]
        self._sets = list(map(frozenset, self.words))
        self._counter = Counter(chain.from_iterable(set(self.words)))
        self._half = len(set(self.words)) / 2
        self._tells = list(map(self._telling, self._sets))
        self.pairs = 0
        self._equal: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for place, words in enumerate(self.words):
            self._equal[words].append(place)
        # One task stands for all with its words and gold.
        self._rare: defaultdict[tuple[Any, str], list[int]] = defaultdict(list)
        for places in self._equal.values():
            for place in {self.golds[place]: place for place in reversed(places)}.values():
                for key in self._keys(self._sets[place]):
                    self._rare[key].append(place)

    @property
    def is_whole(self) -> bool:
        return self.pairs <= MOST_PAIRS

    def find(self, task: TaskTexts) -> list[int]:
        """The places of the tasks that are the same as this one, those in the same words first."""
        words, gold = self._words(words_of(task.text), words_of(task.system)), gold_of(task.gold)
        equal = [place for place in self._equal.get(words, ()) if _agree(gold, self.golds[place])]
        near = list(self._near(frozenset(words), gold, words))
        return equal + (near if len(near) <= MOST_ALIKE else [])

    def groups(self) -> Same:
        """All tasks of the index, by what is the same."""
        heads: dict[tuple[tuple[str, ...], str | None], int] = {}
        head_of = [
            heads.setdefault(key, place)
            for place, key in enumerate(zip(self.words, self.golds, strict=True))
        ]
        root = list(range(len(self.words)))

        def find(place: int) -> int:
            while root[place] != place:
                root[place] = place = root[root[place]]
            return place

        for place in heads.values():
            for other in self._near(self._sets[place], self.golds[place], self.words[place]):
                one, two = sorted((find(place), find(head_of[other])))
                root[two] = one
        wordings = Counter(map(find, heads.values()))
        groups: defaultdict[int, list[int]] = defaultdict(list)
        reworded: set[int] = set()
        for place, head in enumerate(head_of):
            top = find(head)
            is_form = wordings[top] > MOST_ALIKE
            groups[head if is_form else top].append(place)
            if not is_form and self.words[place] != self.words[top]:
                reworded.add(place)
        return Same(list(groups.values()), self.is_whole, reworded)

    def _words(self, turns: tuple[str, ...], system: tuple[str, ...]) -> tuple[str, ...]:
        """With the system message where it tells apart what is asked in the same turns."""
        return (*system, *turns) if len(self._systems.get(turns, ())) > 1 else turns

    def _keys(self, words: frozenset[str]) -> Iterator[tuple[Any, str]]:
        numbers = tuple(sorted(word for word in words if word[0].isdigit()))
        rarest = sorted(words, key=lambda word: (self._counter[word], word))
        for word in rarest[: len(words) - ceil(ALIKE * len(words)) + 1]:
            yield numbers, word

    def _near(
        self, words: frozenset[str], gold: str | None, whole: tuple[str, ...]
    ) -> Iterator[int]:
        """The tasks in other words."""
        telling = self._telling(words)
        seen: set[int] = set()
        alike: list[int] = []
        slots: dict[int, int | None] = {}
        for key in self._keys(words):
            for place in self._rare.get(key, ()):
                if place in seen or self.pairs > MOST_PAIRS:
                    continue
                seen.add(place)
                self.pairs += 1
                if self.words[place] == whole or not _agree(gold, self.golds[place]):
                    continue
                others = self._sets[place]
                fewer, more = sorted((len(words), len(others)))
                if fewer < ALIKE * more:  # cannot be alike, and is seen at once
                    continue
                both = len(words & others)
                if both < ALIKE * (fewer + more - both):
                    continue
                is_known = gold is not None and self.golds[place] is not None
                other = self.words[place]
                signs = [[word for word in one if not word[0].isalpha()] for one in (whole, other)]
                if not is_known and signs[0] != signs[1]:
                    continue  # without a gold answer, 3 - 4 and 4 - 3 are two tasks
                tells = self._tells[place]
                least = TELLING_ALIKE * min(len(telling), len(tells))
                is_swapped = both < fewer  # each has words that the other lacks
                slots[place] = _slot(whole, self.words[place])
                if not is_swapped or len(telling & tells) >= least:
                    alike.append(place)
        fillers = Counter(slots.values())
        for place in alike:
            if slots[place] is None or fillers[slots[place]] < FILLERS:
                yield place

    def _telling(self, words: frozenset[str]) -> frozenset[str]:
        return frozenset(word for word in words if self._counter[word] <= self._half)


def same_tasks(tasks: Sequence[TaskTexts]) -> Same:
    return SameTasks(tasks).groups()


def _agree(gold: str | None, other: str | None) -> bool:
    return gold is None or other is None or gold == other


def _slot(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Where two texts have other words, if that is a few at one place alone."""

    def alike(pairs: Iterable[tuple[str, str]]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    before = alike(zip(one, other, strict=False))
    after = alike(zip(reversed(one), reversed(other), strict=False))
    fewer, more = sorted((len(one) - before - after, len(other) - before - after))
    return before if 0 < fewer <= more <= MOST_FILLED else None
