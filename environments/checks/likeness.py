"""Signs that an answer can be had without solving its task. Each function returns a sentence, or
"" if there is no sign."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from environments.same_task import template_of, words_of
from environments.untrusted_text import plain_name

FEWEST_TASKS = 5
MOST_TASKS = 0.9  # A sign counts if it is there on so many of the tasks
PLACES = 12  # how many words from either end of a prompt are looked at
LONGEST_PERIOD = 8
CHANCE_ALIKE = 0.02
"""So small a share of the eval tasks may be like a train task by chance: 3 + 4 and 4 + 3."""
MOST_RARE = 3
RARE_SHARE = 0.05  # A word in so many tasks, or an answer to so many of them, tells one from others


@dataclass(frozen=True)
class Row:
    """A task as a model that guesses would see it; `gold` is what stands in its answer's tags."""

    task_id: str
    prompt: str
    gold: str
    split: str
    index: int


def fixed_place(rows: Sequence[Row]) -> str:
    """Whether the answer is the word at one place of the prompt, counted from either end."""
    words = [re.findall(r"[^\W_]+", row.prompt.casefold()) for row in rows]
    for place in (*range(PLACES), *range(-PLACES, 0)):
        hits = 0
        for row, said in zip(rows, words, strict=True):
            if -len(said) <= place < len(said) and said[place] == row.gold.casefold():
                hits += 1
        if _is_usual(hits, rows):
            where = f"word {place + 1}" if place >= 0 else f"word {-place} from the end"
            return f"on {hits} of {len(rows)} tasks the answer is {where} of the prompt"
    return ""


def in_ids(rows: Sequence[Row]) -> str:
    """Whether ids contain the answers: an agent is given the id of its task."""
    hits = [row for row in rows if len(row.gold) > 2 and row.gold in row.task_id]
    if not _is_usual(len(hits), rows):
        return ""
    example = plain_name(hits[0].task_id)
    return f"the ids of {len(hits)} of {len(rows)} tasks contain the answer, as {example} does"


def in_order(rows: Sequence[Row]) -> str:
    """Whether the answers of tasks that follow each other repeat."""
    for split in ("train", "eval"):
        golds: list[str] = []
        for row in sorted((row for row in rows if row.split == split), key=lambda row: row.index):
            if row.index == len(golds):
                golds.append(row.gold)
        for period in range(2, LONGEST_PERIOD + 1):
            pairs = list(zip(golds, golds[period:], strict=False))
            same = sum(one == other for one, other in pairs)
            if len(golds) >= 3 * period and len(set(golds)) > 1 and same == len(pairs):
                return f"the answers of the {split} tasks repeat every {period} tasks"
    return ""


SIGNS = (fixed_place, in_ids, in_order)


def alike(pairs: Sequence[tuple[str, str]], held_out: int) -> str:
    """Whether more of the eval tasks than by chance are train tasks in other words."""
    if len(pairs) <= CHANCE_ALIKE * held_out:
        return ""
    which = f"train {plain_name(pairs[0][0])} and eval {plain_name(pairs[0][1])}"
    return f"{len(pairs)} eval tasks are train tasks in other words, for instance {which}"


def paraphrased(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(train id, eval id) of eval tasks in another form than a train task's, with the same answer,
    if that is not a usual one, and the same numbers or, without numbers, a rare word.
    """
    uses = Counter(word for row in rows for word in set(words_of(row.prompt)))
    by_gold: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.split == "train":
            by_gold[row.gold].append(row)

    def numbers(row: Row) -> list[str]:
        """Those that tell the task from others."""
        words = sorted(word for word in words_of(row.prompt) if word[0].isdigit())
        return [word for word in words if len(word) > 1 and uses[word] <= len(rows) / 2]

    def rare(row: Row) -> set[str]:
        said = set(words_of(row.prompt)) - set(words_of(row.gold))
        most = max(MOST_RARE, RARE_SHARE * len(rows))
        return {word for word in said if len(word) > 2 and uses[word] <= most}

    def is_same(row: Row, other: Row) -> bool:
        if template_of(other.prompt) == template_of(row.prompt):
            return False
        if own := numbers(row):
            return len(own) > 1 and numbers(other) == own
        is_word = re.search(r"[^\W\d_]{3}", row.gold) is not None
        return is_word and len(by_gold[row.gold]) == 1 and bool(rare(row) & rare(other))

    pairs: list[tuple[str, str]] = []
    for row in rows:
        others = by_gold[row.gold] if row.split == "eval" else []
        if len(others) <= max(1, RARE_SHARE * len(rows)):
            same = (other.task_id for other in others if is_same(row, other))
            pairs += [(other, row.task_id) for other in same][:1]
    return pairs


def _is_usual(hits: int, rows: Sequence[Row]) -> bool:
    return len(rows) >= FEWEST_TASKS and hits >= MOST_TASKS * len(rows)
