"""Writes datasets/train.jsonl and datasets/eval.jsonl, with the same rows every time.

python make_datasets.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SIZES = {"train": 500, "eval": 200}
WORDS_PER_TASK = (3, 5)
WORDS = """
apple arrow basket bell bird boat bottle bread bridge brush butter button cake camera candle carpet
castle chain chair cheese circle clock coat coin copper cotton curtain desert dinner doctor door
dragon dress drum eagle engine fabric farmer feather fence field finger flag flower forest garden
glass glove grain grape guitar hammer harbor helmet honey horse island jacket jungle kettle kitchen
ladder lamp leaf lemon letter lion market marble meadow mirror monkey mountain needle night noodle
ocean office onion orange oven painter paper pencil pepper piano pillow planet pocket potato prince
quarter queen rabbit rain ribbon road rocket salad sailor school shadow shirt silver singer snow
spoon spring sugar summer table teacher temple ticket tiger tower tunnel turtle uncle valley velvet
village violin wagon wallet water wheat whistle window winter wizard yellow zebra
""".split()  # noqa: SIM905


def rows(seed: int = 11) -> dict[str, list[dict[str, str]]]:
    """The rows of each split. No set of words occurs twice, and none is sorted already."""
    source = random.Random(seed)
    seen: set[frozenset[str]] = set()
    found: dict[str, list[dict[str, str]]] = {}
    for split, size in SIZES.items():
        found[split] = [{"id": f"{split}-{number:03}"} for number in range(size)]
        for row in found[split]:
            row.update(_row(source, seen))
    return found


def _row(source: random.Random, seen: set[frozenset[str]]) -> dict[str, str]:
    while True:
        chosen = source.sample(WORDS, source.randint(*WORDS_PER_TASK))
        if frozenset(chosen) not in seen and chosen != sorted(chosen):
            seen.add(frozenset(chosen))
            question = f"Sort alphabetically: {', '.join(chosen)}"
            return {"input": question, "output": ", ".join(sorted(chosen))}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, examples in rows().items():
        lines = "\n".join(map(json.dumps, examples))
        (folder / f"{split}.jsonl").write_text(f"{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "datasets")
