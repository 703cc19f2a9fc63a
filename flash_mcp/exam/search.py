"""How many training rows ask what an exam asks. Only the number is told. The supervisor searches
for exams with a passphrase, since it alone has their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from environments.same_task import SameTasks, TaskTexts, task_of
from flash_mcp.exam import exams
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.supervisor import secrets

CHARACTERS = 2000
"""Of a text that are compared."""
AT_ONCE = 50
"""Texts of a request to the supervisor."""


@lru_cache(4)
def _tasks(base: Path, name: str, key: bytes) -> SameTasks:
    prompts = exams.read_prompts(base, exams.find_exam(base, name), key)
    return SameTasks([TaskTexts(prompt[:CHARACTERS]) for prompt in prompts])


def hits(base: Path, name: str, key: bytes, texts: Sequence[str]) -> list[str]:
    """The texts that ask what a task asks. FlashError(exam_locked)."""
    tasks = _tasks(base, name, key)
    return [text for text in texts if tasks.find(TaskTexts(text))]


def found(base: Path, texts: Sequence[str]) -> dict[str, int | None]:
    """Rows by the caller's exams whose tasks they ask; None for an exam that is locked."""
    result: dict[str, int | None] = {}
    cut = [text[:CHARACTERS] for text in texts]
    for exam in exams.exams(base):
        try:
            numbers = [
                len(hits(base, exam.name, exam.key(), part))
                if exam.key_file
                else secrets.count_rows(base, exam.name, exam.variable, part)
                for part in (cut[start : start + AT_ONCE] for start in range(0, len(cut), AT_ONCE))
            ]
            result[exam.name] = sum(numbers)
        except FlashError:
            result[exam.name] = None
    return result


def asked_by(rows: Iterable[Json]) -> list[str]:
    """What rows of a dataset ask."""
    return [task_of(row["messages"][: row["prompt_messages"]]).text for row in rows]


def notes(rows: Mapping[str, int | None]) -> list[str]:
    """What `found` found, in words."""
    result: list[str] = []
    for name, number in rows.items():
        if number is None:
            result.append(f"exam:{name} is locked: the rows were not searched for its tasks")
        elif number:
            what = f"CONTAMINATED: {number} rows ask what exam:{name} asks"
            result.append(f"{what}, so it says little of a model that learns from them")
    return result
