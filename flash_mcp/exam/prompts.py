"""What an exam's tasks ask, and which texts ask the same, for who has its key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from environments.same_task import SameTasks, TaskTexts
from flash_mcp.protocol import exams as sealing

CHARACTERS = 2000
"""Of a text that are compared."""


def folder_of(base: Path, name: str) -> Path:
    return base / "exams" / name


def read(base: Path, name: str, exam_id: str, key: bytes) -> list[str]:
    """FlashError(exam_locked)."""
    sealed = (folder_of(base, name) / sealing.PROMPTS).read_bytes()
    return json.loads(sealing.unseal(key, sealed, f"{exam_id} prompts"))


@lru_cache(4)
def _tasks(base: Path, name: str, exam_id: str, key: bytes) -> SameTasks:
    prompts = read(base, name, exam_id, key)
    return SameTasks([TaskTexts(prompt[:CHARACTERS]) for prompt in prompts])


def rows(base: Path, name: str, exam_id: str, key: bytes, texts: Sequence[str]) -> int:
    """How many texts ask what a task asks. FlashError(exam_locked)."""
    tasks = _tasks(base, name, exam_id, key)
    return sum(bool(tasks.find(TaskTexts(text))) for text in texts)
