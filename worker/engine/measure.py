"""Which way of a sync suits a run: measured on its card, before its own model is loaded.

    python -m worker.engine.measure LOAD SYNC

With "adapter" a sync is cheap, and every token pays for the adapter's products. With "merged" a
sync rewrites the weights, and tokens cost what the base model's do. Which is faster depends on the
card, the model, the rank and the tokens of a step. Each way is measured in a process of its own,
with the engine that the run would have; the figures are kept for the next run of this kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flash_mcp.protocol.errors import FlashError
from worker.process import prepare_process

if TYPE_CHECKING:
    from worker.engine.vllm import Sync

WAYS: tuple[Sync, ...] = ("adapter", "merged")
LIMIT_S = 600.0
PROMPT = list(range(40, 104))
MEASURED_TOKENS = 64
"""Tokens that each sequence generates."""


@dataclass(frozen=True)
class Load:
    """The engine that is measured, and on what: `device` and `engine` are the names of the card and
    of vLLM's version.
    """

    model: str
    dtype: str
    max_length: int
    sequences: int
    rank: int
    device: str
    engine: str


@dataclass(frozen=True)
class Figures:
    """Seconds of a sync, and tokens that are generated in a second with all sequences under way."""

    sync_s: float
    tokens_per_s: float

    def step_s(self, tokens: int) -> float:
        """Seconds of a step that generates so many tokens, without its training."""
        return self.sync_s + tokens / self.tokens_per_s


@dataclass(frozen=True)
class Choice:
    """The faster way for a step of `tokens` tokens."""

    tokens: int
    figures: dict[Sync, Figures]

    @property
    def sync(self) -> Sync:
        return min(self.figures, key=lambda way: self.figures[way].step_s(self.tokens))

    def __str__(self) -> str:
        parts = [
            f"{way} {item.step_s(self.tokens):.2f} s ({1000 * item.sync_s:.0f} ms a sync, "
            f"{item.tokens_per_s:.0f} tokens/s)"
            for way, item in self.figures.items()
        ]
        return f"{self.sync}; a step of {self.tokens} tokens takes: {', '.join(parts)}"


def choose(
    load: Load,
    tokens: int,
    cache: Path,
    *,
    may_measure: bool,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Choice | None:
    """The faster way, by the figures that `cache` has of this load, or by measuring if that is
    allowed. None without figures, and after a cancel.

    FlashError(worker_failed) if a measurement fails."""
    existing = _read(cache)
    key = json.dumps(asdict(load), sort_keys=True)
    if key not in existing:
        if not may_measure:
            return None
        results: dict[str, dict[str, float]] = {}
        for way in WAYS:
            figures = _measured(load, way, is_cancelled)
            if figures is None:
                return None
            results[way] = asdict(figures)
        existing = _read(cache) | {key: results}
        part = cache.with_name(f".{cache.name}.{os.getpid()}")
        part.write_text(json.dumps(existing))
        part.replace(cache)
    return Choice(tokens, {way: Figures(**existing[key][way]) for way in WAYS})


def _read(cache: Path) -> dict[str, dict[str, dict[str, float]]]:
    try:
        return json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}


def _measured(load: Load, way: Sync, is_cancelled: Callable[[], bool]) -> Figures | None:
    command = [sys.executable, "-m", "worker.engine.measure", json.dumps(asdict(load)), way]
    deadline = time.monotonic() + LIMIT_S
    # A file: a pipe is held open by whatever the engine started and left.
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)
        while child.poll() is None:
            if is_cancelled() or time.monotonic() > deadline:
                child.kill()
            time.sleep(0.1)
        output.seek(0)
        printed = output.read().decode().splitlines()
    if is_cancelled():
        return None
    if child.returncode:
        what = f"the measurement of sync={way} ended with exit code {child.returncode}"
        raise FlashError("worker_failed", what, fix="read the attempt's log")
    return Figures(**json.loads(printed[-1]))


def measure(load: Load, way: Sync) -> Figures:
    """One way's figures, measured in this process, which afterwards is of no other use."""
    import torch  # noqa: PLC0415

    from worker.engine.vllm import VllmEngine  # noqa: PLC0415
    from worker.rollouts.turns import Sampling  # noqa: PLC0415
    from worker.training.policy import load_policy  # noqa: PLC0415

    path = Path(load.model)
    numbers: torch.dtype = getattr(torch, load.dtype)
    policy = load_policy(path, rank=load.rank, alpha=2 * load.rank, seed=0, dtype=numbers)
    engine = VllmEngine(
        path,
        max_length=load.max_length,
        max_num_seqs=load.sequences,
        lora_rank=load.rank,
        sync=way,
        dtype=load.dtype,
    )

    def generate(tokens: int) -> float:
        for number in range(load.sequences):
            engine.submit(f"{tokens}-{number}", PROMPT, Sampling(tokens, seed=number))
        created = 0
        started = time.monotonic()
        while engine.unfinished():
            created += sum(len(completion.token_ids) for _, completion in engine.step())
        return created / (time.monotonic() - started)

    engine.load_policy(policy)
    generate(2)  # compiles
    started = time.monotonic()
    engine.load_policy(policy)
    sync_s = time.monotonic() - started
    return Figures(sync_s, generate(MEASURED_TOKENS))


if __name__ == "__main__":
    prepare_process()  # with the settings of a worker, the engine is no process of its own
    given = Load(**json.loads(sys.argv[1]))
    found = measure(given, cast("Sync", sys.argv[2]))
    sys.stdout.write(f"{json.dumps(asdict(found))}\n")
    sys.stdout.flush()
    os._exit(0)  # the engine's threads are of no use any more
