"""Rows of a user's file or of a dataset at the hub, as the tasks of an environment or as
conversations to learn: columns recognised, copies dropped, split."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import httpx

from environments.checks.likeness import ALIKE, share_of_words
from flash_mcp.judgement.curation import Counts, is_held_back
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import Json
from flash_mcp.state import datasets
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.owners import refuse_server_side

HUB = re.compile(r"hub:(?P<id>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?")
"""hub:OWNER/NAME, or hub:OWNER/NAME/CONFIG."""
HUB_TIMEOUT_S = 20.0
MOST_BYTES = 64 * 2**20
QUESTIONS = ("question", "input", "prompt", "instruction", "text", "query", "problem")
ANSWERS = ("answer", "output", "label", "target", "response", "completion", "solution", "result")
EVAL_SHARE = 0.2
MOST_EVAL = 200
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
FEWEST_ROWS = 10
MOST_ALIKE = 20
"""Questions that are one another in other words. If more are, it is the form of all questions."""
MOST_COMPARED = 30

Row = Json


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


def read_table(source: str, question: str | None, answer: str | None) -> Table:
    """The tasks of a CSV, TSV, JSON, JSONL or parquet file, or of a dataset at the hub. Questions
    that are nearly the same come into the same split. The split is the same every time.

    Raises FlashError(invalid_argument).
    """
    rows, columns = read_rows(source)
    question = _column(source, columns, question, QUESTIONS, "question")
    answer = _column(source, columns, answer, ANSWERS, "answer")
    dropped: Counter[str] = Counter()
    golds: dict[str, str] = {}
    for row in rows:
        prompt, gold = _text(row.get(question)), _text(row.get(answer))
        if not prompt or not gold:
            dropped["empty"] += 1
        elif prompt not in golds:
            golds[prompt] = gold
        else:
            dropped["copies" if golds[prompt] == gold else "other answer to the same question"] += 1
    if len(golds) < FEWEST_ROWS:
        what = f"there are {len(golds)} different questions with an answer"
        raise _refusal(source, what, f"give at least {FEWEST_ROWS}, better some hundreds")
    train, held_out = _split(golds)
    return Table(train, held_out, columns, question, answer, dict(dropped))


def read_conversations(source: str) -> list[Row]:
    """The rows as conversations to learn: a column `messages`, or a question and an answer.

    Raises FlashError(invalid_argument)."""
    rows, columns = read_rows(source)
    if "messages" not in columns:
        question = _column(source, columns, None, QUESTIONS, "messages")
        answer = _column(source, columns, None, ANSWERS, "messages")
        return [_conversation(_text(row.get(question)), _text(row.get(answer))) for row in rows]
    return [_of_messages(source, number, row) for number, row in enumerate(rows, start=1)]


def _conversation(question: str, answer: str) -> Row:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "prompt_messages": 1}


def _of_messages(source: str, number: int, row: Row) -> Row:
    """What follows the first user's messages is learnt."""
    messages: Any = row["messages"]
    roles: list[Any] = []
    with suppress(ValueError, AttributeError, TypeError):
        if isinstance(messages, str):  # a CSV has them as JSON
            messages = json.loads(messages)
        turns: list[Any] = list(messages)
        roles = [turn.get("role") for turn in turns]
    if "assistant" not in roles[1:] or None in roles:
        fix = "give messages as [{'role': 'user', 'content': ...}, {'role': 'assistant', ...}]"
        raise _refusal(source, f"row {number}: messages holds no conversation", fix)
    kept = {"messages": messages, "prompt_messages": roles.index("assistant", 1)}
    return kept | ({"tools": row["tools"]} if row.get("tools") else {})


def is_rows(reference: str) -> bool:
    """Whether it names rows, and not a dataset that was curated."""
    return bool(HUB.fullmatch(reference)) or Path(reference).suffix.lower() in SUFFIXES


def keep_conversations(
    source: str, name: str | None = None, holdout: float = 0.0, base: Path | None = None
) -> Dataset:
    """Keep the conversations of a file or of the hub as a dataset for SFT, without copies.

    Raises FlashError(invalid_argument | local_only | quota_exceeded)."""
    refuse_server_side("rows of a file", "curate attempts of runs instead", dataset=source)
    stem = Path(source).stem.rpartition(":")[2]
    name = name or re.sub(r"[^a-z0-9_-]+", "-", stem.casefold()).strip("-_") or "rows"
    rows: dict[str, Row] = {}
    total = 0
    for row in read_conversations(source):
        total += 1
        text = json.dumps(row, sort_keys=True)
        task = hashlib.sha256(text.encode()).hexdigest()[:16]
        rows[task] = row | {"provenance": {"task_id": task}}
    held = {task: row for task, row in rows.items() if is_held_back(task, holdout)}
    train = [row for task, row in rows.items() if task not in held]
    counts = Counts(attempts=total, duplicates=total - len(rows), tasks=len(rows))
    counts.train_tasks = counts.train_rows = len(train)
    counts.holdout_tasks = counts.holdout_rows = len(held)
    manifest: Json = {"runs": [], "allow_eval_tasks": False, "counts": counts.model_dump()}
    manifest |= {"environment": {"name": Path(source).name, "digest": "rows", "args": {}}}
    version = datasets.register(name, train, list(held.values()), manifest, base)
    return datasets.find(f"{version.name}@{version.digest}", base)


def read_rows(source: str) -> tuple[list[Row], list[str]]:
    """All rows, and the names of their columns. Raises FlashError(invalid_argument)."""
    if named := HUB.fullmatch(source):
        rows = _parquet(source, _from_hub(source, named["id"], named["config"]))
    else:
        path = Path(source).expanduser().absolute()
        rows = _rows(source, path.suffix.lower(), _content(source, path))
    return rows, list(dict.fromkeys(name for row in rows for name in row))


def _content(source: str, path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _too_large(source)
        return path.read_bytes()
    except OSError as error:
        what = f"cannot read it: {error.strerror}"
        raise _refusal(source, what, "name a file, or hub:OWNER/NAME") from error


def _from_hub(source: str, name: str, config: str | None) -> bytes:
    """The first part of the train split, in the form that the hub keeps of every dataset."""
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(headers=headers, timeout=HUB_TIMEOUT_S, follow_redirects=True) as client:
            listed = client.get(f"{hub}/api/datasets/{name}/parquet").raise_for_status().json()
            if config is not None and config not in listed:
                fix = f"name one of: {', '.join(listed)}"
                raise _refusal(source, f"{name} has no configuration {config!r}", fix)
            splits = listed[config or next(iter(listed))]
            files = splits.get("train") or next(iter(splits.values()))
            with client.stream("GET", files[0]) as response:
                content = bytearray()
                for part in response.raise_for_status().iter_bytes():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise _too_large(source)
                return bytes(content)
    except (httpx.HTTPError, ValueError, LookupError, AttributeError, StopIteration) as error:
        fix = "check the name; set HF_TOKEN if the dataset asks for it; or give a file"
        what = f"the hub does not serve it: {str(error) or type(error).__name__:.200}"
        raise _refusal(source, what, fix) from error


def _rows(source: str, suffix: str, content: bytes) -> list[Row]:
    if suffix == ".parquet":
        return _parquet(source, content)
    try:
        return _parsed(suffix, content.decode("utf-8-sig"))
    except (ValueError, csv.Error) as error:  # JSONDecodeError and UnicodeDecodeError are both
        fix = (
            "give CSV with a header line, TSV, JSON, JSONL (an object a line) or parquet, in UTF-8"
        )
        raise _refusal(source, f"it cannot be read: {error}", fix) from error


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


def _parquet(source: str, content: bytes) -> list[Row]:
    try:
        parquet: Any = import_module("pyarrow.parquet")  # only there with the extra cpu or gpu
    except ImportError as error:
        fix = "install flash-mcp with the extra cpu or gpu, or give CSV or JSONL"
        raise _refusal(source, "parquet needs pyarrow, which is not installed", fix) from error
    try:
        return parquet.read_table(io.BytesIO(content)).to_pylist()
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        what = f"it is no parquet file: {error}"
        raise _refusal(source, what, "give the file that its writer has closed") from error


def _column(
    source: str, columns: Sequence[str], name: str | None, usual: Sequence[str], what: str
) -> str:
    shown = ", ".join(map(repr, columns)) or "none"
    if name is not None:
        if name in columns:
            return name
        near = did_you_mean(name, columns)
        raise _refusal(source, f"there is no column {name!r}{near}", f"its columns are: {shown}")
    by_name = {column.strip().casefold(): column for column in columns}
    for candidate in usual:
        if candidate in by_name:
            return by_name[candidate]
    fix = f"name it: {what}=...; its columns are: {shown}"
    raise _refusal(source, f"no column is called {' or '.join(usual[:3])}", fix)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value, ensure_ascii=False)


def _split(golds: Mapping[str, str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    groups = _alike(golds)
    random.Random(0).shuffle(groups)
    eval_size = min(MOST_EVAL, round(EVAL_SHARE * len(golds)))
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for group in groups:
        split, rows = ("eval", held_out) if len(held_out) < eval_size else ("train", train)
        for prompt in group:
            row = {"id": f"{split}-{len(rows):05}", "input": prompt, "output": golds[prompt]}
            rows.append(row)
    return train, held_out


def _alike(golds: Mapping[str, str]) -> list[list[str]]:
    """Questions in groups: those of the same words, and those of nearly the same words with the
    same numbers and answer.
    """
    same: dict[tuple[str, ...], list[str]] = {}
    for prompt in golds:
        words = tuple(sorted(re.findall(r"\w+", prompt.casefold())))
        same.setdefault(words, []).append(prompt)
    clusters: list[list[list[str]]] = []
    heads: defaultdict[Any, list[list[list[str]]]] = defaultdict(list)
    for words, group in same.items():
        numbers = tuple(word for word in words if word.isdecimal())
        places = [(golds[group[0]], numbers, word) for word in sorted(set(words), key=len)[-3:]]
        candidates = [cluster for place in places for cluster in heads[place][-MOST_COMPARED:]]
        for near in candidates:
            if share_of_words(near[0][0], group[0]) >= ALIKE:
                near.append(group)
                break
        else:
            clusters.append([group])
            for place in places:
                heads[place].append(clusters[-1])
    groups: list[list[str]] = []
    for cluster in clusters:
        is_form = len(cluster) > MOST_ALIKE
        groups += cluster if is_form else [list(itertools.chain.from_iterable(cluster))]
    return groups


def _jsonl(rows: Iterable[Mapping[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _too_large(source: str) -> FlashError:
    what = f"it is larger than {MOST_BYTES >> 20} MiB"
    return _refusal(source, what, "take a sample of its rows")


def _refusal(source: str, what: str, fix: str) -> FlashError:
    return FlashError("invalid_argument", what, data=source, fix=fix)
