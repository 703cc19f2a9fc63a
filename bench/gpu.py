"""Checks and measures everything that needs a GPU, for a person who has one.

    scripts/gpu-check [--cpu] [--out FOLDER] [--only STAGE ...]

Each stage is a process of its own with a time limit. It writes FOLDER/STAGE.json after each figure,
so that a stage that fails or hangs leaves what it found, and the next one runs all the same. With a
FOLDER of an earlier time, only stages that did not come to their end run, or those that are named.
At the end FOLDER/report.md holds all figures, to paste into an issue, and those that others
published beside ours. With --cpu, the same stages run a tiny
model on the CPU: that shows that the check works, and measures nothing."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import gpu_published
from bench.gpu_results import MODELS, Results
from bench.gpu_runners import RUNNERS, SWITCH

LIMITS_S = {
    "environment": 60,
    "trainer": 180,
    "engine": 300,
    "loop": 120,
    "big": 240,
    "serve": 120,
    "tests": 60,
    "peers": 120,
    "gsm8k": 300,
}
"""Stages in order, and the most seconds that each may take: 25 minutes for all."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: a new folder")
    parser.add_argument("--only", choices=LIMITS_S, action="append", metavar="STAGE")
    parser.add_argument("--stage", choices=LIMITS_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="flash-gpu-check-"))
    out.mkdir(parents=True, exist_ok=True)
    if args.stage:
        return run_stage(args.stage, out, cpu=args.cpu)
    times = 3 if args.cpu else 1  # which is slow, and may have other work
    missing = [name for name in LIMITS_S if Results(out, name).read().get("stage") != "ok"]
    failed = [
        name
        for name in args.only or missing
        if not start_stage(name, out.resolve(), LIMITS_S[name] * times, cpu=args.cpu)
    ]
    shutil.rmtree(out / MODELS, ignore_errors=True)
    text = report(out)
    (out / "report.md").write_text(text)
    sys.stdout.write(f"\n{text}\nPaste {out / 'report.md'} into an issue.\n")
    return 1 if failed else 0


def start_stage(name: str, out: Path, limit_s: float, *, cpu: bool) -> bool:
    """Whether the stage came to its end. What it says is in FOLDER/STAGE.log."""
    command = [sys.executable, "-m", "bench.gpu", "--stage", name, "--out", str(out)]
    environment = dict(os.environ)
    if cpu:
        command.append("--cpu")
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if Results(out, "engine").read().get("runner") == "first":
        environment[SWITCH] = RUNNERS["first"]
    started = time.monotonic()
    ended = "ok"
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            env=environment,
        )  # fmt: skip
        try:
            if code := process.wait(limit_s):
                ended = f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after its limit of {limit_s:.0f} s"
        finally:
            # The stage may have left engines and servers behind, whether or not it ended.
            with_group(process.pid, signal.SIGKILL)
            process.wait()
    Results(out, name).add(stage=ended, stage_s=round(time.monotonic() - started, 1))
    sys.stdout.write(f"{name}: {ended}, {time.monotonic() - started:.0f} s\n")
    sys.stdout.flush()
    return ended == "ok"


def with_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to the processes of a group, if any are left."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def run_stage(name: str, out: Path, *, cpu: bool) -> int:
    # Imported here: torch and vLLM are for the stages' own processes.
    from bench.gpu_place import Place  # noqa: PLC0415

    for module in ("gpu_stages", "gpu_model", "gpu_peers"):
        stage = getattr(importlib.import_module(f"bench.{module}"), name, None)
        if stage:
            break
    with tempfile.TemporaryDirectory(prefix="flash-gpu-check-") as scratch:
        stage(Place(Path(scratch), Results(out, name), cpu=cpu))
    return 0


def report(out: Path) -> str:
    """All figures as a Markdown table, and the ends of the logs of stages that failed."""
    lines = ["| stage | figure | value |", "|---|---|---|"]
    logs: list[str] = []
    for name in LIMITS_S:
        figures = Results(out, name).read()
        for figure, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            lines.append(f"| {name} | {figure} | {shown} |")
        if figures.get("stage", "ok") != "ok":
            tail = (out / f"{name}.log").read_text(errors="replace")[-3000:]
            logs += ["", f"The end of {name}.log:", "", "```", tail, "```"]
    return "\n".join([*lines, *gpu_published.table(out), *logs]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
