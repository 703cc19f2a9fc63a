"""A look at a sealed exam: the plain files are there for this attempt alone, and only totals leave
it. What the operator may want to read later is sealed with the exam's key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash_mcp.protocol import exams
from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunFolder, RunWriter

BASE_STEP = 10**9
"""Where attempts of the base model are kept, beside those of the model."""
OWN_WORDS = {"disk_full", "engine_missing", "device_unsupported", "preempted", "secret_missing"}
"""Errors that hold nothing of an environment."""
REMOVED_AT_END = 'read _; rm -rf -- "$0"'


def writer_of(job: Json, folder: RunFolder, attempt: int) -> RunWriter:
    """FlashError(fenced)."""
    if str(job.get("environment", {}).get("name")).startswith(exams.REFERENCE):
        return ExamWriter(folder, attempt)
    return RunWriter(folder, attempt)


class ExamWriter(RunWriter):
    """Totals in the clear; all else sealed, or not at all."""

    key = b""
    exam_id = ""
    base: Sequence[Json] = ()
    """Attempts of the base model at the same tasks."""
    _seen: int | None = None
    _moves = 0

    def event(self, kind: str, message: str, **values: Any) -> None:
        """Nothing: messages quote environments."""

    def beat(self, step: int, phase: str, progress: int = 0, steps: int | None = None) -> None:
        """That it moves, and not how many tasks are done."""
        self._moves += progress + step != self._seen
        self._seen = progress + step
        super().beat(0, phase.partition(" ")[0], self._moves)

    def attempts(self, step: int, rollouts: Sequence[Json]) -> None:
        super().attempts(step, [{"index": rollouts[0]["index"], "sealed": self._sealed(rollouts)}])

    def recorded(self, step: int) -> list[Json]:
        rows: list[Json] = []
        for part in super().recorded(step):
            rows += exams.unseal_json(self.key, part["sealed"], self.exam_id)
        return rows

    def evaluation(self, step: int, summary: Json, rollouts: Sequence[Json]) -> None:
        solved = [bool(row["success"]) for row in rollouts]
        totals = {"tasks": len(solved), "solved": sum(solved)}
        if self.base:
            pairs = list(zip(solved, (bool(row["success"]) for row in self.base), strict=True))
            totals |= {"base_solved": sum(before for _, before in pairs)}
            totals |= {"wins": pairs.count((True, False)), "losses": pairs.count((False, True))}
        rows = {"model": rollouts, "base": self.base}
        self._write(f"evals/{step}.{self.epoch}.sealed", self._sealed(rows).encode())
        super().evaluation(step, totals, [])
        self.folder.remove("evals", str(BASE_STEP))

    def commit_result(
        self, state: str, step: int, error: FlashError | None = None, **values: Any
    ) -> None:
        if error and error.code not in OWN_WORDS:
            what = f"the look ended with {error.code}: {CODES[error.code]}; it is not spent"
            fix = "call evaluate again; if it stays so, the exam's operator has to look"
            error = FlashError("exam_failed", what, fix=fix, cause=error.code)
        super().commit_result(state, step if state == "succeeded" else 0, error, **values)

    def _sealed(self, body: Any) -> str:
        return exams.seal_json(self.key, body, self.exam_id)


@contextmanager
def opened(job: Json, writer: RunWriter, scratch: Path) -> Generator[Json]:
    """The job with the exam's plain folder; any other job as it is."""
    if not isinstance(writer, ExamWriter):
        yield job
        return
    place = job["environment"]
    writer.exam_id = place["digest"]
    writer.key = bytes.fromhex(os.environ.pop(exams.variable_of(writer.exam_id)))
    # From here on nothing of this process and its children is logged: environments print tasks.
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(null, stream.fileno())
    folder = scratch / "exam"
    folder.mkdir(mode=0o700)
    # It ends with this process, also by a signal that kills.
    command = ["/bin/sh", "-c", REMOVED_AT_END, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={}):
        sealed = Path(place["path"], exams.SEALED).read_bytes()
        exams.unpack(exams.unseal(writer.key, sealed, writer.exam_id), folder)
        yield {**job, "environment": {**place, "path": str(folder)}}
