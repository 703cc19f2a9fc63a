"""The wrapper around an attempt on a machine that is not the supervisor's.

    python -m worker.node RUN_FOLDER --attempt N

Runs `worker.main` as a child and stores the end of its output in the run folder, for nobody reads
this machine's files. SIGTERM, with which engines announce the end, goes to the child, which saves
and leaves. Engines start jobs again whose machine they took away: such an attempt claims the next
number and goes on from the newest checkpoint. If the run has its result already, nothing is run."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from types import FrameType
from typing import IO
from uuid import uuid4

import psutil

from environments.sandbox.kernel import die_with_parent, signal_name
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.node_code import use_own_home
from flash_mcp.protocol.packages import missing_packages, nvidia_smi
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import LAUNCH, RunFolder, RunWriter, final_result

log = logging.getLogger("node")
SHIP_EVERY_S = 5.0
TAIL_BYTES = 64 << 10
HUB, HUB_S = "huggingface.co", 5.0
"""From where models come that are named by the hub, and how long a node may take to reach it."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the run folder: a path or any fsspec URL")
    what = parser.add_mutually_exclusive_group(required=True)
    help_text = "number of this attempt; a later one is claimed if an engine starts it again"
    what.add_argument("--attempt", type=int, help=help_text)
    parser.add_argument("--version", help="of flash-mcp, that the server has")
    what.add_argument("--probe", action="store_true", help="only say what is here")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    use_own_home()
    folder = RunFolder(args.folder)
    if args.probe:
        probe(folder)
        return 0
    if final_result(folder):
        log.info("the run has its result")
        return 0
    os.environ[LAUNCH] = str(args.attempt)
    attempt = folder.next_epoch(args.attempt)
    if args.version and args.version != version():
        refuse(folder, attempt, args.version)
        return 1
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-P", "-m", "worker.main", args.folder]
        code = attend([*command, "--attempt", str(attempt)], output, folder, attempt)
    return code if code >= 0 else 128 - code


def version() -> str:
    """Of flash-mcp, as it is installed here."""
    return metadata.version("flash-mcp")


def refuse(folder: RunFolder, attempt: int, requested: str) -> None:
    """End a run whose node has another version: it may read files in another way."""
    what = f"the node {socket.gethostname()} has flash-mcp {version()}; the server has {requested}"
    fix = 'install that version there, in its image if it has one, or use setup = "uv"'
    error = FlashError("target_refused", what, fix=fix)
    RunWriter(folder, attempt).commit_result("failed", 0, error)


def probe(folder: RunFolder) -> None:
    """Write probe.json: what this node is, for the one who adds a target. Claiming the folder shows
    that the storage lets one attempt own a run.
    """
    asked_at = folder.job()["time"]
    folder.claim(1)
    if folder.write_new("epoch/1", {"claim": uuid4().hex}):  # `claim` would look, and not try
        raise SystemExit("two attempts could claim one run: the storage has no exclusive create")
    # GPUs as nvidia-smi names them, and the processors
    cards = nvidia_smi(["--query-gpu=name,memory.total", "--format=csv,noheader"], 30.0)
    devices = [*cards, f"{len(os.sched_getaffinity(0))} CPUs"]
    # What an attempt computes with, as targets.toml has it
    memory = psutil.virtual_memory().total / 2**30
    computes: Json = {"kind": "cpu", "name": "processors", "memory_gib": round(memory, 1)}
    lines = [line for line in devices if line.endswith("MiB")]
    if lines:
        name, _, size = lines[0].rpartition(", ")
        memory_gib = round(float(size.split()[0]) / 1024, 1)
        computes = {"name": name, "memory_gib": memory_gib, "count": len(lines)}
    reaches_hub = False
    with suppress(OSError):
        socket.create_connection((HUB, 443), HUB_S).close()
        reaches_hub = True
    results: Json = {
        "host": socket.gethostname(),
        "version": version(),
        "devices": devices,
        "missing": missing_packages(),
        "cards": computes,
        "clock_s": round(time.time() - asked_at, 1),
        "reaches_hub": reaches_hub,
        "free_gib": round(shutil.disk_usage(tempfile.gettempdir()).free / 2**30, 1),
    }
    folder.put_probe(results)


def attend(command: list[str], output: IO[bytes], folder: RunFolder, attempt: int) -> int:
    """Run the command until it ends; its exit code."""
    parent = os.getpid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: die_with_parent(parent),
    )

    def forward(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    shipped = 0
    while True:
        ended_before = child.poll() is not None
        size = os.fstat(output.fileno()).st_size
        if size != shipped and ship(output, size, folder, attempt):
            shipped = size
        if ended_before:
            break
        with suppress(subprocess.TimeoutExpired):
            child.wait(SHIP_EVERY_S)
    code = child.returncode
    if code < 0:
        line = f"the worker was killed by signal {signal_name(-code)}\n"
        os.pwrite(output.fileno(), line.encode(), size)
        ship(output, size + len(line), folder, attempt)
    return code


def ship(output: IO[bytes], size: int, folder: RunFolder, attempt: int) -> bool:
    """Store the end of the output; whether that worked."""
    start = max(0, size - TAIL_BYTES)
    try:
        folder.put_log(attempt, os.pread(output.fileno(), size - start, start))
    except (FlashError, OSError) as error:
        log.warning("the log cannot be stored: %s", error)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
