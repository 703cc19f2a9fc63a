"""What deployments were asked and answered, as files: FLASH_HOME/recordings/DEPLOYMENT/.

    limits.json       how much is kept; without it nothing is recorded
    00000001.jsonl    a part: one answered choice of one request a line

The model server appends whole lines (`Recording.append`), so a crash loses at most the requests
under way, and at most the last line of a part is torn; it begins a new part when it starts. Parts
are removed as a whole, the oldest first, when all of them exceed `max_bytes` or when a part has
not been written to for `days`; a part is not written to for longer than a day."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Json, Rollout

FOLDER = "recordings"
LIMITS = "limits.json"
PARTS = 8
"""One part has at most this share of `max_bytes`."""
DAY_S = 86_400.0


@dataclass(frozen=True)
class Limits:
    """How much of a deployment's requests is kept."""

    max_bytes: int
    days: float


class Recording:
    """The requests of one deployment. One process appends; any may read."""

    def __init__(self, home: Path, deployment: str) -> None:
        self.folder = home / FOLDER / deployment
        self._part: Path | None = None
        self._begun = 0.0

    def start(self, limits: Limits) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.folder / LIMITS, json.dumps(asdict(limits)))

    def stop(self) -> None:
        """End the recording. What was recorded stays until its time is over."""
        (self.folder / LIMITS).unlink(missing_ok=True)

    def is_on(self) -> bool:
        return (self.folder / LIMITS).is_file()

    def append(self, line: Json) -> None:
        """Add a line. Nothing is recorded once the recording was stopped, or if the line is longer
        than a part. Raises OSError.
        """
        try:
            limits = Limits(**json.loads((self.folder / LIMITS).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        most = limits.max_bytes // PARTS
        if len(text) > most:
            return
        part = self._part
        is_old = time.time() - self._begun > DAY_S
        if part is None or is_old or _size(part) + len(text) > most:
            part = self._next_part()
            prune(self.folder, limits.max_bytes - most, limits.days)
        descriptor = os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(descriptor, text) < len(text):  # the disk is full
                self._part = None
        finally:
            os.close(descriptor)

    def _next_part(self) -> Path:
        numbers = [int(part.stem) for part in parts(self.folder)]
        self._part = self.folder / f"{max(numbers, default=0) + 1:08}.jsonl"
        self._begun = time.time()
        return self._part

    def lines(self) -> Iterator[Json]:
        """What is kept, oldest first. Torn lines are left out."""
        for part in parts(self.folder):
            with suppress(FileNotFoundError):  # its time was over meanwhile
                for text in part.read_bytes().split(b"\n"):
                    with suppress(ValueError):
                        yield cast("Json", json.loads(text))

    def rollouts(self) -> list[Rollout]:
        """The answers as conversations without a reward, oldest first."""
        return [_rollout(index, line) for index, line in enumerate(self.lines())]


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def prune(folder: Path, max_bytes: int, days: float) -> None:
    """Remove parts older than `days`, and the oldest until the rest has at most so many bytes."""
    total = 0
    for part in reversed(parts(folder)):
        total += _size(part)
        with suppress(FileNotFoundError):
            age = time.time() - part.stat().st_mtime
            if total > max_bytes or age > days * DAY_S:
                part.unlink()


def prune_all(home: Path, days: float) -> None:
    """Remove what is older than `days`, or than its own limit, of all deployments."""
    for folder in (home / FOLDER).glob("*"):
        kept = days
        with suppress(OSError, ValueError, KeyError):
            kept = float(json.loads((folder / LIMITS).read_text())["days"])
        prune(folder, 1 << 62, kept)


def remove(home: Path, deployment: str) -> None:
    shutil.rmtree(home / FOLDER / deployment, ignore_errors=True)


def _size(part: Path) -> int:
    with suppress(FileNotFoundError):
        return part.stat().st_size
    return 0


def _rollout(index: int, line: Json) -> Rollout:
    messages: list[Json] = [*line["messages"], line["answer"]]
    identity = json.dumps([line["messages"], line["tools"]], sort_keys=True)
    is_cut = line["finish"] == "length"
    return Rollout(
        index=index,
        task_id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        messages=messages,
        tools=line["tools"],
        turns=1,
        prompt_tokens=line.get("prompt_tokens", len(line["prompt_token_ids"])),
        completion_tokens=line.get("completion_tokens", len(line["token_ids"])),
        truncated=is_cut,
        finish="length" if is_cut else "done",
        seconds=line["seconds"],
    )
