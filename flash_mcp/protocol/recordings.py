"""What deployments were asked and answered, as files: FLASH_HOME/recordings/DEPLOYMENT/.

    limits.json       what is kept; without it nothing is recorded
    00000001.jsonl    a part: one answered choice of one request a line, or a rating

A rating, {"rates": ID, "rating": NUMBER}, follows the answers of that id; the last one counts.

The model server appends whole lines (`Recording.append`), so a crash loses at most the requests
under way, and at most the last line of a part is torn; it begins a new part when it starts. Parts
are removed as a whole, the oldest first, when all of them exceed `max_bytes` or when a part has
not been written to for `days`; a part is not written to for longer than a day. Deleting lines
writes parts anew, under the lock that appending takes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from environments.base import reward_of
from environments.locks import lock
from environments.untrusted_text import PatternRedactor
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Json, Rollout

FOLDER = "recordings"
LIMITS = "limits.json"
LOCK = "lock"
THUMBS = {"up": 1.0, "down": 0.0}
TOKENS = ("prompt_token_ids", "token_ids", "logprobs")
"""What spells a text out again: not kept of a line whose text was changed."""
PARTS = 8
"""One part has at most this share of `max_bytes`."""
DAY_S = 86_400.0


@dataclass(frozen=True)
class RecordingLimits:
    """How much of a deployment's requests is kept."""

    max_bytes: int
    days: float
    redact: Sequence[str] = ()
    """What is replaced in texts: names of environments.untrusted_text.PATTERNS, or patterns."""


class Recording:
    """The requests of one deployment. One process appends; any may read."""

    def __init__(self, home: Path, deployment: str) -> None:
        self.folder = home / FOLDER / deployment
        self._part: Path | None = None
        self._begun = 0.0

    def start(self, limits: RecordingLimits) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.folder / LIMITS, json.dumps(asdict(limits)))

    def stop(self) -> None:
        """End the recording. What was recorded stays until its time is over."""
        (self.folder / LIMITS).unlink(missing_ok=True)

    def is_on(self) -> bool:
        return (self.folder / LIMITS).is_file()

    def append(self, line: Json) -> None:
        """Add a line, redacted. Nothing is recorded once the recording was stopped, or if the line
        is longer than a part. Raises OSError.
        """
        try:
            limits = RecordingLimits(**json.loads((self.folder / LIMITS).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return
        redacted = _redactor(tuple(limits.redact)).value(line)
        # Ids are no texts, though a pattern may happen to match one.
        redacted |= {name: line[name] for name in ("id", "rates") if name in line}
        if redacted != line:
            for name in TOKENS:
                redacted[name] = []
        if redacted.get("user") != line.get("user"):
            redacted["user"] = pseudonym(line["user"])
        text = _packed(redacted)
        most = limits.max_bytes // PARTS
        if len(text) > most:
            return
        with self._locked():
            self._write(text, most, limits)

    @contextmanager
    def _locked(self) -> Generator[None]:
        with (self.folder / LOCK).open("ab") as file:
            lock(file)
            yield

    def _write(self, text: bytes, most: int, limits: RecordingLimits) -> None:
        part = self._part
        is_old = time.time() - self._begun > DAY_S
        if part is None or is_old or _size(part) + len(text) > most:
            numbers = [int(part.stem) for part in parts(self.folder)]
            self._part = self.folder / f"{max(numbers, default=0) + 1:08}.jsonl"
            self._begun = time.time()
            part = self._part
            prune(self.folder, limits.max_bytes - most, limits.days)
        descriptor = os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(descriptor, text) < len(text):  # the disk is full
                self._part = None
        finally:
            os.close(descriptor)

    def lines(self) -> Iterator[Json]:
        for part in parts(self.folder):
            yield from _lines(part)

    def answers(self) -> Iterator[Json]:
        """The lines of answers, oldest first, each with its last `rating`, or None."""
        ratings = self._ratings()
        for line in self.lines():
            if "rates" not in line:
                yield _with_rating(line, ratings)

    def rollouts(self) -> list[Rollout]:
        return [_rollout(index, line) for index, line in enumerate(self.answers())]

    def rate(self, identity: str, rating: float) -> bool:
        """Rate the answers with this id; False if there is none."""
        if not any(line.get("id") == identity for line in self.lines()):
            return False
        self.append({"rates": identity, "rating": rating, "time": time.time()})
        return True

    def delete(self, matches: Callable[[Json], bool]) -> int:
        """Delete the answers that match, with their ratings. Returns how many."""
        ratings = self._ratings()
        removed: list[str] = []

        def stays(line: Json) -> bool:
            if "rates" in line:
                return line["rates"] not in removed
            if is_gone := matches(_with_rating(line, ratings)):
                removed.append(line.get("id", ""))
            return not is_gone

        with self._locked():
            for part in parts(self.folder):
                kept = list(filter(stays, _lines(part)))
                if removed:
                    with suppress(FileNotFoundError):  # its time was over meanwhile
                        written = part.stat().st_mtime
                        write_private(part, b"".join(map(_packed, kept)))
                        os.utime(part, (written, written))  # its time is not over later
        return len(removed)

    def _ratings(self) -> dict[str, float]:
        return {line["rates"]: line["rating"] for line in self.lines() if "rates" in line}


def _lines(part: Path) -> Iterator[Json]:
    with suppress(FileNotFoundError):  # its time was over meanwhile
        for text in part.read_bytes().split(b"\n"):
            with suppress(ValueError):
                yield cast("Json", json.loads(text))


def _with_rating(line: Json, ratings: Mapping[str, float]) -> Json:
    return {**line, "rating": ratings.get(line.get("id", ""))}


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


def rating_of(value: Any) -> float | None:
    """A rating as a number: "up", "down", or a number, which may be written as text."""
    with suppress(ValueError, TypeError):
        number = THUMBS.get(value) if isinstance(value, str) else None
        return reward_of(float(value) if number is None else number)
    return None


def pseudonym(user: str) -> str:
    """What stands for a user whose name is redacted: their answers can still be found."""
    return f"user-{hashlib.sha256(user.encode()).hexdigest()[:16]}"


@functools.lru_cache(maxsize=8)
def _redactor(patterns: tuple[str, ...]) -> PatternRedactor:
    return PatternRedactor(patterns)


def _packed(line: Json) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _size(part: Path) -> int:
    with suppress(FileNotFoundError):
        return part.stat().st_size
    return 0


def _rollout(index: int, line: Json) -> Rollout:
    messages: list[Json] = [*line["messages"], line["answer"]]
    identity = json.dumps([line["messages"], line["tools"]], sort_keys=True)
    is_cut = line["finish"] == "length"
    rating = line.get("rating")
    return Rollout(
        index=index,
        task_id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        messages=messages,
        tools=line["tools"],
        reward=rating or 0.0,
        is_scored=rating is not None,
        success=rating is not None and rating >= 1,
        turns=1,
        prompt_tokens=line.get("prompt_tokens", len(line["prompt_token_ids"])),
        completion_tokens=line.get("completion_tokens", len(line["token_ids"])),
        truncated=is_cut,
        finish="length" if is_cut else "done",
        seconds=line["seconds"],
    )
