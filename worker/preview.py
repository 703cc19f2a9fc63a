"""Rows of a dataset as a model will see them, before a run learns them.

    python -m worker.preview < JOB

JOB is {"model": FOLDER, "thinking": false, "max_length": 2048, "seconds": 10, "rows": [...]}, with
rows as lines of a dataset. It prints what `preview` returns, or {"error": ...} of a FlashError."""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from worker.model_files import end_ids
from worker.process import quick_imports
from worker.rollouts.gold import IGNORED, Row, learnable_of, rows_of_line
from worker.rollouts.transcript import ChatTemplate

GAP = "\n\n...\n\n"


def preview(job: Json, template: ChatTemplate) -> Json:
    """Token counts and three rows as text, what is learnt between [[ and ]]. As many rows are
    rendered as `seconds` allow, the shortest and the longest first. FlashError(dataset_invalid) as
    a run would raise it."""
    ends = time.monotonic() + job["seconds"]
    order = sorted(range(len(job["rows"])), key=lambda place: len(str(job["rows"][place])))
    others = order[1:-1]
    random.Random(0).shuffle(others)
    made: list[list[Row]] = []
    for place in dict.fromkeys([order[0], order[-1], *others]):
        if len(made) > 1 and time.monotonic() > ends:
            break
        name = f"train.jsonl line {place + 1}"
        made.append(rows_of_line(name, job["rows"][place], template))
    sizes = sorted(len(row["input_ids"]) for row in chain(*made))
    made.sort(key=lambda rows: sum(len(row["input_ids"]) for row in rows))
    most = job["max_length"]
    return {
        "rows": len(job["rows"]),
        "measured": len(made),
        "tokens": {
            "shortest": sizes[0],
            "median": round(median(sizes)),
            "p95": sizes[int(0.95 * len(sizes))],
            "longest": sizes[-1],
        },
        "cut": sum(size > most for size in sizes),
        "left_out": len(made) - len(learnable_of(made, most)),
        "shortest": _shown(made[0], template),
        "typical": _shown(made[len(made) // 2], template),
        "longest": _shown(made[-1], template),
    }


def _shown(rows: list[Row], template: ChatTemplate) -> str:
    """Of a conversation that is learnt in several rows, all of these."""
    texts: list[str] = []
    for row in rows:
        text = ""
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        for is_learnt, run in groupby(pairs, lambda pair: pair[1] != IGNORED):
            said = template.tokenizer.decode([token for token, _ in run])
            text += f"[[{said}]]" if is_learnt else said
        texts.append(text)
    return GAP.join(texts)


def main() -> None:
    job = json.load(sys.stdin)
    with quick_imports():
        from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(job["model"])
        ids = end_ids(Path(job["model"]))
        template = ChatTemplate(tokenizer, thinking=job["thinking"], end_ids=ids)
        result = preview(job, template)
    except FlashError as error:
        result = {"error": error.to_dict()}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
