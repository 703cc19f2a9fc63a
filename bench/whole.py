"""Whole runs of the calculator: the worker, and the worker with TRL's own training step in place of
ours.

Both are attempts of a real run in a process of their own, with the same engine, scheduler,
environment and seeds; the figures are those that the run folder holds. `python -m bench.whole
FOLDER --attempt 1` is the attempt on plain TRL."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import read_toml, resolve, validate

Json = dict[str, Any]
CALCULATOR = Path(__file__).parents[1] / "environments" / "examples" / "calculator"
MODULES = {"ours": "worker.main", "plain trl": "bench.whole"}
OF_TRL = ("rollouts_of", "output_dir", "max_completion", "callbacks")
"""What the worker gives its trainer and TRL's takes too."""
TIMEOUT_S = 1800


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """{"systems": {name: {...}}, "over_trl", "sync_share", "start_s"}; every repeat has a seed of
    its own.
    """
    steps = 2 if quick else 6
    attempts: dict[str, list[Json]] = {name: [] for name in MODULES}
    for seed in range(repeat):
        for name in list(MODULES) if seed % 2 == 0 else list(MODULES)[::-1]:
            attempts[name].append(attempt(MODULES[name], model_path, seed, steps))
    ours, theirs = attempts["ours"], attempts["plain trl"]
    return {
        "steps": steps,
        "attempts": attempts,
        "over_trl": statistics.median(
            their["step_s"] / mine["step_s"] for their, mine in zip(theirs, ours, strict=True)
        ),
        "sync_share": statistics.median(mine["sync_s"] / mine["step_s"] for mine in ours),
        "start_s": statistics.median(mine["start_s"] for mine in ours),
    }


def attempt(
    module: str,
    model_path: Path,
    seed: int,
    steps: int,
    environment: Path = CALCULATOR,
    **overrides: Any,
) -> Json:
    """A run of `environment` with the calculator's config but for `overrides`. Means over the steps
    but the first, which has nothing to sync and allocates; `start_s` ends with the first.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        fields = {"model": str(model_path), "seed": seed, "steps": steps, **overrides}
        folder = _folder(Path(scratch, "run"), fields, environment)
        log = Path(folder.path("log.1"))
        started = time.time()
        with log.open("wb") as stream:
            command = [sys.executable, "-m", module, folder.url, "--attempt", "1"]
            try:
                subprocess.run(
                    command, stdout=stream, stderr=stream, timeout=TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise FlashError(
                    "stalled", f"{module} did not finish {steps} steps", timeout_s=TIMEOUT_S
                ) from error
        result = folder.result()
        if result is None or result["state"] != "succeeded":
            raise FlashError(
                "worker_failed", f"{module} ended with {result}: {log.read_text()[-2000:]}"
            )
        found = [folder.metrics(step) for step in range(1, steps + 1)]
    written = [entry for entry in found if entry is not None]
    metrics: list[Json] = [entry["metrics"] for entry in written]
    means = {
        name: statistics.fmean(step[f"time/{name}"] for step in metrics[1:])
        for name in ("step_s", "rollout_s", "sync_s", "train_s")
    }
    return {
        **means,
        "start_s": written[0]["time"] - started,
        "reward": [step["reward/mean"] for step in metrics],
        "metrics": metrics,
    }


def _folder(path: Path, overrides: Json, environment: Path) -> RunFolder:
    """A run as the calculator's own config asks for it, but shorter and without evaluation."""
    fields = read_toml(CALCULATOR / "configs" / "rl.toml") | {"save_every": overrides["steps"]}
    fields |= {"eval_before": False, "eval_after": False, **overrides}
    resolved = resolve(validate(fields))
    folder = RunFolder(path)
    folder.create(
        {
            "run_id": path.name,
            "spec": resolved.spec.model_dump(),
            "sources": resolved.sources,
            "environment": {"name": environment.name, "digest": "", "path": str(environment)},
            "model": fields["model"],
            "init_adapter": None,
            "created": time.time(),
        }
    )
    return folder


def rows(result: Json) -> Iterator[list[str]]:
    """The table, its header first."""
    yield [
        "calculator on",
        "step s",
        "rollouts s",
        "sync s",
        "training s",
        "start to first step s",
        "reward by step",
    ]
    for name, attempts in result["attempts"].items():
        medians = [
            statistics.median(each[part] for each in attempts)
            for part in ("step_s", "rollout_s", "sync_s", "train_s", "start_s")
        ]
        rewards = zip(*(each["reward"] for each in attempts), strict=True)
        yield [
            name,
            *(f"{value:.2f}" for value in medians),
            " ".join(f"{statistics.fmean(step):.2f}" for step in rewards),
        ]
    over = f"plain trl over ours {result['over_trl']:.2f}"
    yield [over, "", "", f"{100 * result['sync_share']:.1f} % of a step", "", "", ""]


def _attempt_on_trl() -> int:
    """worker.main with TRL's trainer for ours."""
    from worker import main as worker  # noqa: PLC0415

    worker.prepare_process()
    # torch reads the environment that was just prepared
    from bench.step import plain_trainer  # noqa: PLC0415
    from worker.training import grpo  # noqa: PLC0415

    def trainer(*arguments: Any, **options: Any) -> Any:
        return plain_trainer(*arguments, **{name: options[name] for name in OF_TRL})

    grpo.Trainer = trainer
    return worker.main()


if __name__ == "__main__":
    code = _attempt_on_trl()
    sys.stderr.flush()
    os._exit(code)  # as the worker does: engine threads may outlive it
