"""Rows of a user's file or of a dataset at the hub, as the tasks of an environment or as
conversations to learn: columns recognised, copies dropped, split."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from environments.messages import MASKS, THOUGHTS, Unlearnable, learnable, thought_of
from environments.tools import as_list, as_object
from flash_mcp.judgement.curation import Counts, is_held_back
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import Json
from flash_mcp.state import datasets
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.owners import refuse_server_side
from flash_mcp.tools.shared.row_columns import (
    CHATS,
    PARTS,
    RENAME,
    chat_of,
    check_columns,
    conversation_of,
    fields_of,
    pair_of,
)
from flash_mcp.tools.shared.rows import Origin, Row, read_rows, refusal
from flash_mcp.tools.shared.splitting import Split, split_tasks

ASK_TOGETHER = (
    ("context", "question"),
    ("passage", "question"),
    ("instruction", "input"),
    ("instruction", "context"),
)
"""Columns that are one question where all of them exist."""
QUESTIONS = (
    *("question", "input", "prompt", "instruction", "text", "query", "problem"),
    *("message", "sentence", "review", "comment", "utterance"),
)
ANSWERS = (
    "answer",
    "answerkey",
    "output",
    "target",
    "response",
    "completion",
    "solution",
    "result",
    "answers",
    *("category", "class", "intent", "sentiment"),
    "label",  # last: beside another answer it says how good that is
)
CHOICES = ("choices", "options")
UNCHOSEN = (*CHOICES, *THOUGHTS)
"""Columns that belong to a question and its answer under other names."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FINAL = "####"
"""What stands before the answer itself where the rows hold its derivation too, as GSM8K's do."""
FROM_ROWS = "rows"
"""Stands for the environment's digest in the manifest of a dataset that no run made."""
NAME_COLUMNS = "name two columns, question=... and answer=..., or give one that is called messages"
FEWEST_ROWS = 10


@dataclass(frozen=True)
class Table:
    """The tasks of a file, as rows of train.jsonl and eval.jsonl."""

    train: list[Json]
    held_out: list[Json]
    columns: list[str]
    question: str
    """The column of the questions, or the columns that together are one."""
    answer: str
    """The column of the answers."""
    split: Split
    """How the rows were divided, and which were left out."""
    origin: Origin | None
    """Of a dataset at the hub: which."""

    def files(self) -> dict[str, bytes]:
        return {
            "datasets/train.jsonl": _jsonl(self.train),
            "datasets/eval.jsonl": _jsonl(self.held_out),
        } | ({"datasets/source.json": _jsonl([asdict(self.origin)])} if self.origin else {})


def read_table(source: str, question: str | None, answer: str | None) -> Table:
    """The tasks of a file or of a dataset at the hub. Nearly equal questions come into the same
    split, which is the same every time. FlashError(invalid_argument).
    """
    rows, columns, origin = read_rows(source)
    asking = _asking(source, columns, question, "name it: question=...")
    answer = _column(source, columns, answer, ANSWERS, "name it: answer=...")
    prompts: list[str] = []
    golds: list[str] = []
    thoughts: list[str | None] = []
    for number, row in enumerate(rows, start=1):
        prompt, gold = _task(source, asking, answer, number, row)
        thought, gold = _answer(source, number, row, {*_used(asking, answer), *MASKS}, gold)
        prompts.append(prompt)
        golds.append(gold)
        thoughts.append(thought)
    if all(FINAL in gold for gold in golds if gold):
        golds = [gold.rpartition(FINAL)[2].strip() for gold in golds]
    is_choice = any(column.strip().casefold() in CHOICES for column in columns)
    split = split_tasks(prompts, golds, may_be_labels=not is_choice)
    count = len(split.train) + len(split.held_out)
    if count < FEWEST_ROWS:
        what = f"there are {count} different questions with an answer"
        raise refusal(source, what, f"give at least {FEWEST_ROWS}, better some hundreds")

    def rows_of(name: str, places: Sequence[int]) -> list[Json]:
        kept: list[Json] = []
        for number, place in enumerate(places):
            task: Json = {"input": prompts[place], "output": split.golds[place]}
            if thoughts[place]:
                task[THOUGHTS[0]] = thoughts[place]
            kept.append({"id": f"{name}-{number:05}", **task})
        return kept

    train, held_out = rows_of("train", split.train), rows_of("eval", split.held_out)
    return Table(train, held_out, columns, ", ".join(asking), answer, split, origin)


def _task(
    source: str, asking: Sequence[str], answer: str, number: int, row: Row
) -> tuple[str, str]:
    for column in (*asking, answer):
        value = row.get(column)
        if any({"role", "from"} & as_object(item).keys() for item in as_list(value) or [value]):
            fix = (
                "give a text; conversations to learn stand in messages, or in prompt and "
                "completion, of train(algorithm='sft', dataset=...)"
            )
            raise refusal(source, f"row {number}: the column {column} holds messages", fix)
    texts = list(map(_text, map(row.get, asking)))
    try:
        options = _options(row, (*asking, answer))
    except ValueError as error:
        other = "env_setup(question='question, options') shows another form as it is"
        fix = f"give a list, or {{letter: text}}; {other}"
        raise refusal(source, f"row {number}: {error}", fix) from error
    texts += (f"{letter}. {_text(option)}" for letter, option in options.items())
    return "\n\n".join(filter(None, texts)), _chosen(row.get(answer), options)


def _chosen(value: Any, options: Mapping[str, Any]) -> str:
    """The answer; of one to choose its letter. It may be that letter, the text or the place."""
    gold = _text(value)
    letters = [*options]
    shown = list(map(_text, options.values()))
    place = gold.removesuffix(".0")
    if not gold or gold in options:
        return gold
    # A number is a place among texts, even if one of these reads like it, as in MMLU.
    if value not in options.values() and place.isdecimal() and int(place) < len(letters):
        return letters[int(place)]
    if gold in shown:
        return letters[shown.index(gold)]
    return gold


def _options(row: Row, used: Sequence[str]) -> dict[str, Any]:
    """{letter: answer to choose} of a list, of {"text": [], "label": []} as the hub has them, of
    {letter: answer}, or of one of these written as text. Raises ValueError.
    """
    options: Any = None
    for column in row:
        # A column that was named as a question or an answer is a text.
        if column.strip().casefold() in CHOICES and column not in used:
            options = options or _listed(row[column])
    if not options:
        return {}
    shown = f"{options!r:.80}"
    letters: Sequence[Any] = LETTERS
    if isinstance(options, dict):
        by_letter = cast("Json", options)
        options = by_letter.get("text")
        if not isinstance(options, list):
            letters = [letter for letter, option in by_letter.items() if option is not None]
            options = list(map(by_letter.get, letters))
        elif isinstance(by_letter.get("label"), list):
            letters = by_letter["label"]
    if isinstance(options, list):
        options = cast("list[Any]", options)
        results = dict(zip(map(_text, letters), options, strict=False))
        is_flat = not any(isinstance(option, (list, dict)) for option in options)
        if is_flat and len(results) == len(options):
            return results
    raise ValueError(f"the answers to choose are {shown}")


def _listed(value: Any) -> Any:
    """The value; of text the list or object that it holds: as JSON, or as Python writes it."""
    if isinstance(value, float):  # pandas writes NaN where a value is missing
        return None
    if not isinstance(value, str):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        options = ast.literal_eval(value)
        if len(options) > 1:  # NumPy writes no commas, and ['x' 'y'] would be one answer
            return options
    return value.strip()


def read_conversations(
    source: str, question: str | None = None, answer: str | None = None
) -> tuple[list[Row], list[str], Counter[str], Origin | None]:
    """The rows as conversations to learn, the columns that were used, how many rows have each
    column or field that is ignored, and of a dataset at the hub which it was.
    FlashError(invalid_argument)."""
    rows, columns, origin = read_rows(source)
    by_name = _by_name(columns)
    filled = set[str]().union(*map(fields_of, rows))  # parquet has columns that no row fills
    parts = [by_name[part] for part in PARTS if part in by_name]
    is_chat = any(isinstance(row.get(part), list) for part in parts for row in rows)
    is_chat = is_chat or not filled.isdisjoint(CHATS)
    asking: list[str] = []
    if is_chat and (question or answer):
        what = "its rows are conversations, which have no columns of a question and an answer"
        raise refusal(source, what, "leave out question and answer, or remove the messages")
    if not is_chat:
        try:
            asking = _asking(source, columns, question, NAME_COLUMNS)
            answer = _column(source, columns, answer, ANSWERS, NAME_COLUMNS)
        except FlashError:
            for row in rows[:1]:  # one of preferences has no answer
                _answer(source, 1, row, ())
            raise
    results: list[Row] = []
    ignored: Counter[str] = Counter()
    said: set[str] = set()
    for number, row in enumerate(rows, start=1):
        pair = None if is_chat else _task(source, asking, answer or "", number, row)
        fields = fields_of(row)
        try:
            if pair:
                turns, prompt, read = pair_of(fields, *pair), None, _used(asking, answer or "")
            else:
                turns, prompt, read = chat_of(fields)
            result, unused = conversation_of(fields, turns, prompt, read)
        except (ValueError, TypeError) as error:
            fix = getattr(error, "fix", "give messages as [{'role': ..., 'content': ...}, ...]")
            raise refusal(source, f"row {number}: {error}", fix) from error
        results.append(result)
        ignored.update(unused)
        said.update(fields)
    used = [column for name, column in by_name.items() if name in said.difference(ignored)]
    return results, used, ignored, origin


def _used(asking: Sequence[str], answer: str) -> set[str]:
    """The columns of a question and its answer, as `fields_of` names them."""
    return {*_by_name((*asking, answer)), *UNCHOSEN}


def _answer(
    source: str, number: int, row: Row, used: Collection[str], gold: str = ""
) -> tuple[str | None, str]:
    """The thought and the text of a task's gold answer. FlashError(invalid_argument) of a column
    that is not `used` and says more than a task has."""
    fields = fields_of(row)
    try:
        check_columns(fields, used)
        thought, text = thought_of(learnable(pair_of(fields, "", gold)[1]))
    except Unlearnable as error:
        fix = error.fix
        if fix == RENAME:
            fix = "name it too, as question='system, question', or remove it"
        raise refusal(source, f"row {number}: {error}", fix) from error
    return thought, text.strip()


def split_conversations(
    source: str, holdout: float, question: str | None = None, answer: str | None = None
) -> tuple[list[Row], list[Row], Counts, Origin | None]:
    """The conversations of rows, without copies and empty answers: to train on, and held back.
    FlashError(invalid_argument | local_only).
    """
    refuse_server_side("rows of a file", "curate attempts of runs instead", dataset=source)
    rows: dict[str, Row] = {}
    conversations, used, ignored, origin = read_conversations(source, question, answer)
    counts = Counts(used=used, ignored=dict(ignored))
    for row in conversations:
        counts.attempts += 1
        # A question, or one of the answers to learn, that says nothing
        says_nothing = False
        for message in row["messages"][row["prompt_messages"] - 1 :]:
            said = str(message.get("content") or "").strip() or message.get("tool_calls")
            says_nothing |= message["role"] in ("user", "assistant") and not said
        if says_nothing:
            counts.truncated += 1
            continue
        text = json.dumps(row, sort_keys=True)
        task = hashlib.sha256(text.encode()).hexdigest()[:16]
        rows[task] = row | {"provenance": {"task_id": task}}
    if not rows:
        fix = "give each row a question and an answer"
        raise refusal(source, f"all of its {counts.attempts} rows are empty", fix)
    train: list[Row] = []
    held_out: list[Row] = []
    for task, row in rows.items():
        (held_out if is_held_back(task, holdout) else train).append(row)
    counts.tasks = len(rows)
    counts.duplicates = counts.attempts - counts.truncated - len(rows)
    counts.train_tasks = counts.train_rows = len(train)
    counts.holdout_tasks = counts.holdout_rows = len(held_out)
    return train, held_out, counts, origin


def keep_conversations(
    source: str,
    holdout: float,
    question: str | None = None,
    answer: str | None = None,
    name: str | None = None,
) -> Dataset:
    train, held_out, counts, origin = split_conversations(source, holdout, question, answer)
    stem = Path(source).stem.rpartition(":")[2]
    name = name or re.sub(r"[^a-z0-9_-]+", "-", stem.casefold()).strip("-_")[:64] or "rows"
    manifest: Json = {"runs": [], "allow_eval_tasks": False, "counts": counts.model_dump()}
    manifest |= {"environment": {"name": Path(source).name, "digest": FROM_ROWS, "args": {}}}
    if origin:
        manifest["source"] = {**asdict(origin), "said": str(origin)}
    version = datasets.register(name, train, held_out, manifest)
    return datasets.find(f"{version.name}@{version.digest}")


def _by_name(columns: Sequence[str]) -> dict[str, str]:
    """Columns by their names without case and spaces."""
    return {column.strip().casefold(): column for column in columns}


def _asking(source: str, columns: Sequence[str], names: str | None, fix: str) -> list[str]:
    by_name = _by_name(columns)
    for together in ASK_TOGETHER:
        if names is None and by_name.keys() >= set(together):
            return list(map(by_name.__getitem__, together))
    if names is None or names in columns:
        return [_column(source, columns, names, QUESTIONS, fix)]
    return [_column(source, columns, name.strip(), QUESTIONS, fix) for name in names.split(",")]


def _column(
    source: str, columns: Sequence[str], name: str | None, usual: Sequence[str], fix: str
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
    what = f"no column is called {' or '.join(usual[:3])}"
    raise refusal(source, what, f"{fix}; its columns are: {shown}")


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""  # pandas writes NaN where a value is missing
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, dict):  # SQuAD's answers, of which the first is taken
        texts = cast("Json", value).get("text")
        if isinstance(texts, list):
            return _text(next(iter(cast("list[Any]", texts)), None))
    return json.dumps(value, ensure_ascii=False)


def _jsonl(rows: Iterable[Mapping[str, str]]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
