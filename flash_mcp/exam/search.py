"""How many training rows ask what an exam asks. Only the number is told. The supervisor searches
for exams with a passphrase, since it alone has their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from environments.same_task import task_of
from flash_mcp.exam import exams, prompts
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.supervisor import secrets

AT_ONCE = 50
"""Texts of a request to the supervisor."""


def rows_by_exam(base: Path, questions: Iterable[str]) -> dict[str, int | None]:
    """Rows by the caller's exams whose tasks they ask; None for an exam that is locked. Without an
    exam nothing of `questions` is computed."""
    result: dict[str, int | None] = {}
    available = exams.exams(base)
    texts = list(questions) if available else []
    for exam in available:
        number: int | None = 0
        for start in range(0, len(texts), AT_ONCE):
            part = [text[: prompts.CHARACTERS] for text in texts[start : start + AT_ONCE]]
            try:
                if exam.key_file:
                    number += prompts.rows(base, exam.name, exam.id, exam.key(), part)
                else:
                    number += secrets.count_rows(base, exam.name, exam.id, part)
            except FlashError:
                number = None
                break
        result[exam.name] = number
    return result


def questions_of(rows: Iterable[Json]) -> Iterator[str]:
    """What rows of a dataset ask."""
    for row in rows:
        yield task_of(row["messages"][: row["prompt_messages"]]).text


def notes(rows: Mapping[str, int | None]) -> list[str]:
    """What `rows_by_exam` found, in words."""
    result: list[str] = []
    for name, number in rows.items():
        if number is None:
            result.append(f"exam:{name} is locked: the rows were not searched for its tasks")
        elif number:
            what = f"CONTAMINATED: {number} rows ask what exam:{name} asks"
            result.append(f"{what}, so it says little of a model that learns from them")
    return result
