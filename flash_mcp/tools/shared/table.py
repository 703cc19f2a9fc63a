"""Rows of a user's file or of a dataset at the hub, as the tasks of an environment or as
conversations to learn: columns recognised, copies dropped, split."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from environments.checks.likeness import are_alike
from flash_mcp.judgement.curation import Counts, is_held_back
from flash_mcp.protocol.errors import did_you_mean
from flash_mcp.protocol.records import Json
from flash_mcp.state import datasets
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.owners import refuse_server_side
from flash_mcp.tools.shared.rows import Row, read_rows, refusal

ASK_TOGETHER = (("context", "question"), ("passage", "question"), ("instruction", "input"))
"""Columns that are one question where all of them exist."""
QUESTIONS = ("question", "input", "prompt", "instruction", "text", "query", "problem")
ANSWERS = (
    "answer",
    "answerkey",
    "output",
    "label",
    "target",
    "response",
    "completion",
    "solution",
    "result",
    "answers",
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FINAL = "####"
"""What stands before the answer itself where the rows hold its derivation too, as GSM8K's do."""
FROM_ROWS = "rows"
"""Stands for the environment's digest in the manifest of a dataset that no run made."""
CHAT_COLUMNS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Roles of the ShareGPT form, {"from": role, "value": text}."""
EVAL_SHARE = 0.2
MOST_EVAL = 200
FEWEST_ROWS = 10
MOST_ALIKE = 20
"""Questions that are one another in other words. If more are, it is the form of all questions."""
MOST_COMPARED = 30


@dataclass(frozen=True)
class Table:
    """The tasks of a file, as rows of train.jsonl and eval.jsonl."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]
    columns: list[str]
    question: str
    """The column of the questions, or the columns that together are one."""
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
    asking = _asking(source, columns, question, "question")
    answer = _column(source, columns, answer, ANSWERS, "answer")
    pairs = [_task(row, asking, answer) for row in rows]
    has_derivations = all(FINAL in gold for _, gold in pairs)
    dropped: Counter[str] = Counter()
    golds: dict[str, str] = {}
    for prompt, gold in pairs:
        if has_derivations:
            gold = gold.rpartition(FINAL)[2].strip()
        if not prompt or not gold:
            dropped["empty"] += 1
        elif prompt not in golds:
            golds[prompt] = gold
        else:
            dropped["copies" if golds[prompt] == gold else "other answer to the same question"] += 1
    if len(golds) < FEWEST_ROWS:
        what = f"there are {len(golds)} different questions with an answer"
        raise refusal(source, what, f"give at least {FEWEST_ROWS}, better some hundreds")
    train, held_out = _split(golds)
    return Table(train, held_out, columns, ", ".join(asking), answer, dict(dropped))


def _task(row: Row, asking: Sequence[str], answer: str) -> tuple[str, str]:
    """Question and answer; the letter, of an answer that chooses."""
    texts = list(map(_text, map(row.get, asking)))
    value = row.get(answer)
    gold = _text(value)
    options = _options(row)
    for number, (letter, option) in enumerate(options.items()):
        texts.append(f"{letter}. {option}")
        if gold not in options and (option == gold or value == number):
            gold = letter
    return "\n\n".join(filter(None, texts)), gold


def _options(row: Row) -> dict[str, str]:
    """{letter: answer to choose}; the hub has them as a list, or as {"text": [], "label": []}."""
    options: Any = row.get("choices") or row.get("options")
    letters: Any = None
    if isinstance(options, dict):
        letters = cast("Json", options).get("label")
        options = cast("Json", options).get("text")
    if not isinstance(options, list):
        return {}
    names: Sequence[Any] = LETTERS
    if isinstance(letters, list):
        names = cast("list[Any]", letters)
    texts = map(_text, cast("list[Any]", options))
    return dict(zip(map(_text, names), texts, strict=False))


def read_conversations(source: str) -> list[Row]:
    """The rows as conversations to learn: a column of messages, or a question and an answer.

    Raises FlashError(invalid_argument)."""
    rows, columns = read_rows(source)
    chats = next((name for name in CHAT_COLUMNS if name in columns), None)
    if chats is not None:
        read = partial(_of_messages, source, chats)
    elif any(isinstance(row.get("prompt"), list) for row in rows):
        read = partial(_of_parts, source)
    else:
        asking = _asking(source, columns, None, "messages")
        read = partial(_of_columns, asking, _column(source, columns, None, ANSWERS, "messages"))
    return list(itertools.starmap(read, enumerate(rows, start=1)))


def _of_columns(asking: Sequence[str], answering: str, _: int, row: Row) -> Row:
    question, answer = _task(row, asking, answering)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "prompt_messages": 1}


def _of_messages(source: str, column: str, number: int, row: Row) -> Row:
    """What follows the first user's messages is learnt."""
    messages: Any = row.get(column)
    roles: list[Any] = []
    with suppress(ValueError, AttributeError, TypeError):
        if isinstance(messages, str):  # a CSV has them as JSON
            messages = json.loads(messages)
        messages = list(map(_message, messages or ()))
        roles = [message.get("role") for message in messages]
    if "assistant" not in roles[1:] or None in roles:
        fix = "give messages as [{'role': 'user', 'content': ...}, {'role': 'assistant', ...}]"
        raise refusal(source, f"row {number}: messages holds no conversation", fix)
    kept = {"messages": messages, "prompt_messages": roles.index("assistant", 1)}
    return kept | ({"tools": row["tools"]} if row.get("tools") else {})


def _of_parts(source: str, number: int, row: Row) -> Row:
    """TRL's form of a conversation: messages in `prompt`, and those to learn in `completion`."""
    prompt, completion = row.get("prompt"), row.get("completion")
    messages: Any = None
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = [*prompt, *completion]
    result = _of_messages(source, "messages", number, row | {"messages": messages})
    return result | {"prompt_messages": len(cast("list[Any]", prompt))}


def _message(message: Any) -> Any:
    if "from" not in message:
        return message
    role = message["from"]
    return {"role": ROLES.get(role, role), "content": message["value"]}


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
    train: list[Row] = []
    held_out: list[Row] = []
    for task, row in rows.items():
        (held_out if is_held_back(task, holdout) else train).append(row)
    counts = Counts(attempts=total, duplicates=total - len(rows), tasks=len(rows))
    counts.train_tasks = counts.train_rows = len(train)
    counts.holdout_tasks = counts.holdout_rows = len(held_out)
    manifest: Json = {"runs": [], "allow_eval_tasks": False, "counts": counts.model_dump()}
    manifest |= {"environment": {"name": Path(source).name, "digest": FROM_ROWS, "args": {}}}
    version = datasets.register(name, train, held_out, manifest, base)
    return datasets.find(f"{version.name}@{version.digest}", base)


def _by_name(columns: Sequence[str]) -> dict[str, str]:
    """Columns by their names without case and spaces."""
    return {column.strip().casefold(): column for column in columns}


def _asking(source: str, columns: Sequence[str], names: str | None, what: str) -> list[str]:
    by_name = _by_name(columns)
    for together in ASK_TOGETHER:
        if names is None and by_name.keys() >= set(together):
            return list(map(by_name.__getitem__, together))
    if names is None or names in columns:
        return [_column(source, columns, names, QUESTIONS, what)]
    return [_column(source, columns, name.strip(), QUESTIONS, what) for name in names.split(",")]


def _column(
    source: str, columns: Sequence[str], name: str | None, usual: Sequence[str], what: str
) -> str:
    shown = ", ".join(map(repr, columns)) or "none"
    if name is not None:
        if name in columns:
            return name
        near = did_you_mean(name, columns)
        raise refusal(source, f"there is no column {name!r}{near}", f"its columns are: {shown}")
    by_name = _by_name(columns)
    for candidate in usual:
        if candidate in by_name:
            return by_name[candidate]
    fix = f"name it: {what}=...; its columns are: {shown}"
    raise refusal(source, f"no column is called {' or '.join(usual[:3])}", fix)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, dict):  # SQuAD's answers, of which the first is taken
        texts = cast("Json", value).get("text")
        if isinstance(texts, list):
            return _text(next(iter(cast("list[Any]", texts)), None))
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
    heads: defaultdict[Any, list[tuple[set[str], list[list[str]]]]] = defaultdict(list)
    for words, group in same.items():
        numbers = tuple(word for word in words if word.isdecimal())
        own = set(words)
        places = [(golds[group[0]], numbers, word) for word in sorted(own, key=len)[-3:]]
        candidates = [cluster for place in places for cluster in heads[place][-MOST_COMPARED:]]
        for others, near in candidates:
            if are_alike(own, others):
                near.append(group)
                break
        else:
            clusters.append([group])
            for place in places:
                heads[place].append((own, clusters[-1]))
    groups: list[list[str]] = []
    for cluster in clusters:
        is_form = len(cluster) > MOST_ALIKE
        groups += cluster if is_form else [list(itertools.chain.from_iterable(cluster))]
    return groups


def _jsonl(rows: Iterable[Mapping[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
