"""Writes datasets/train.jsonl and datasets/eval.jsonl, with the same rows every time.

python make_datasets.py [FOLDER]
"""

from __future__ import annotations

import json
import operator
import random
import sys
from pathlib import Path

SIZES = {"train": 500, "eval": 200}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
QUESTIONS = ("What is {}?", "Compute {}.", "Work out {}.", "How much is {}?")


def rows(seed: int = 7) -> dict[str, list[dict[str, str]]]:
    """The rows of each split. No calculation occurs twice, so the splits are disjoint."""
    source = random.Random(seed)
    seen: set[str] = set()
    found: dict[str, list[dict[str, str]]] = {}
    for split, size in SIZES.items():
        found[split] = [{"id": f"{split}-{number:03}"} for number in range(size)]
        for row in found[split]:
            row.update(_row(source, seen))
    return found


def _row(source: random.Random, seen: set[str]) -> dict[str, str]:
    while True:
        symbol = source.choice(list(OPERATORS))
        left = source.randint(12, 99)
        right = source.randint(3, 99)
        expression = f"{left} {symbol} {right}"
        if expression not in seen:
            seen.add(expression)
            break
    question = source.choice(QUESTIONS).format(expression)
    output = str(OPERATORS[symbol](left, right))
    return {"input": question, "output": output, "expression": expression}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, examples in rows().items():
        lines = "\n".join(map(json.dumps, examples))
        (folder / f"{split}.jsonl").write_text(f"{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "datasets")
