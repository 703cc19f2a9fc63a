"""Where the stages of scripts/gpu-check work, and their clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_results import MODELS, Results

GIB = 2**30
RANK = 32


@dataclass(frozen=True)
class Place:
    """Where a stage works: a folder of its own, and where its figures go."""

    scratch: Path
    results: Results
    cpu: bool

    def tiny(self) -> Path:
        """The tests' model, made once for all stages."""
        folder = self.results.out / "tiny"
        if not (folder / "config.json").is_file():
            from tests.tiny import make_tiny_model  # noqa: PLC0415

            make_tiny_model(folder)
        return folder

    def small(self) -> dict[str, Any]:
        """Fields of a run on the CPU, whose figures say nothing."""
        return {"batch_size": 1, "group_size": 2, "max_tokens": 4} if self.cpu else {}

    def model(self, size: str) -> Path:
        """A model of random weights; on the CPU the tiny one."""
        if self.cpu:
            return self.tiny()
        from bench.random_model import make_model  # noqa: PLC0415

        folder = self.results.out / MODELS / size
        if not folder.is_dir():
            make_model(folder.with_suffix(".new"), size).rename(folder)
        return folder


def synchronize() -> None:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], repeat: int = 3) -> float:
    """The median; the first run, which compiles and allocates, does not count."""
    run()
    times: list[float] = []
    for _ in range(repeat):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
