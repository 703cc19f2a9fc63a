"""Rows of a user's file as the tasks of an environment: columns found, copies dropped, split."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError, did_you_mean

MOST_BYTES = 64 * 2**20
QUESTIONS = ("question", "input", "prompt", "instruction", "text", "query", "problem")
ANSWERS = ("answer", "output", "label", "target", "response", "completion", "solution", "result")
EVAL_SHARE = 0.2
MOST_EVAL = 200
FEWEST_ROWS = 10

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """The tasks of a file, as rows of train.jsonl and eval.jsonl."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]
    columns: list[str]
    question: str
    """The column of the questions."""
    answer: str
    """The column of the answers."""
    dropped: dict[str, int]
    """Rows that were left out, by reason."""

    def files(self) -> dict[str, bytes]:
        return {
            "datasets/train.jsonl": _jsonl(self.train),
            "datasets/eval.jsonl": _jsonl(self.held_out),
        }


def read_table(path: Path, question: str | None, answer: str | None) -> Table:
    """The tasks of a CSV, TSV, JSON, JSONL or parquet file. Rows whose questions have the same
    words and numbers come into the same split. The split is the same every time.

    Raises FlashError(invalid_argument).
    """
    rows = _rows(path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    question = _column(path, columns, question, QUESTIONS, "question")
    answer = _column(path, columns, answer, ANSWERS, "answer")
    dropped: Counter[str] = Counter()
    golds: dict[str, str] = {}
    for row in rows:
        asked, gold = _text(row.get(question)), _text(row.get(answer))
        if not asked or not gold:
            dropped["empty"] += 1
        elif asked not in golds:
            golds[asked] = gold
        else:
            dropped["copies" if golds[asked] == gold else "other answer to the same question"] += 1
    if len(golds) < FEWEST_ROWS:
        what = f"{path.name} has {len(golds)} different questions with an answer"
        raise _refusal(path, what, f"give at least {FEWEST_ROWS}, better some hundreds")
    train, held_out = _split(golds)
    return Table(train, held_out, columns, question, answer, dict(dropped))


def _rows(path: Path) -> list[Row]:
    try:
        if path.stat().st_size > MOST_BYTES:
            what = f"{path.name} is larger than {MOST_BYTES >> 20} MiB"
            raise _refusal(path, what, "take a sample of its rows")
        content = path.read_bytes()
    except OSError as error:
        raise _refusal(path, f"cannot read it: {error.strerror}", "name a file") from error
    if path.suffix == ".parquet":
        return _parquet(path, content)
    try:
        return _parsed(path.suffix, content.decode("utf-8-sig"))
    except (ValueError, csv.Error) as error:  # JSONDecodeError and UnicodeDecodeError are both
        fix = (
            "give CSV with a header line, TSV, JSON, JSONL (an object a line) or parquet, in UTF-8"
        )
        raise _refusal(path, f"{path.name} cannot be read: {error}", fix) from error


def _parsed(suffix: str, text: str) -> list[Row]:
    """Raises ValueError and csv.Error."""
    if suffix in (".csv", ".tsv"):
        delimiter = "\t" if suffix == ".tsv" else ","
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    if suffix == ".json":
        rows: Any = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not isinstance(rows, list):
        raise ValueError("it holds no list of rows")
    for number, row in enumerate(cast("list[Any]", rows), start=1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object")
    return cast("list[Row]", rows)


def _parquet(path: Path, content: bytes) -> list[Row]:
    try:
        parquet: Any = import_module("pyarrow.parquet")  # only there with the extra cpu or gpu
    except ImportError as error:
        fix = "install flash-mcp with the extra cpu or gpu, or give CSV or JSONL"
        raise _refusal(path, "parquet needs pyarrow, which is not installed", fix) from error
    try:
        return parquet.read_table(io.BytesIO(content)).to_pylist()
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        what = f"{path.name} is no parquet file: {error}"
        raise _refusal(path, what, "give the file that its writer has closed") from error


def _column(
    path: Path, columns: Sequence[str], name: str | None, usual: Sequence[str], what: str
) -> str:
    shown = ", ".join(map(repr, columns)) or "none"
    if name is not None:
        if name in columns:
            return name
        near = did_you_mean(name, columns)
        raise _refusal(path, f"there is no column {name!r}{near}", f"its columns are: {shown}")
    by_name = {column.strip().casefold(): column for column in columns}
    for candidate in usual:
        if candidate in by_name:
            return by_name[candidate]
    fix = f"name it: {what}=...; its columns are: {shown}"
    raise _refusal(path, f"no column is called {' or '.join(usual[:3])}", fix)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value, ensure_ascii=False)


def _split(golds: Mapping[str, str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for asked in golds:
        words = tuple(sorted(re.findall(r"\w+", asked.casefold())))
        groups.setdefault(words, []).append(asked)
    shuffled = list(groups.values())
    random.Random(0).shuffle(shuffled)
    eval_size = min(MOST_EVAL, round(EVAL_SHARE * len(golds)))
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for group in shuffled:
        split, rows = ("eval", held_out) if len(held_out) < eval_size else ("train", train)
        for asked in group:
            row = {"id": f"{split}-{len(rows):05}", "input": asked, "output": golds[asked]}
            rows.append(row)
    return train, held_out


def _jsonl(rows: Sequence[Mapping[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _refusal(path: Path, what: str, fix: str) -> FlashError:
    return FlashError("invalid_argument", what, data=str(path), fix=fix)
