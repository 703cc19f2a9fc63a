"""Whether a process runs, and what a worker holds while it does, seen from outside."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flash_mcp.protocol.run_folder import RunFolder
from tests.attempts import Attempt

MIB = 2**20


@dataclass(frozen=True)
class Held:
    """Between two steps: `step` are done. The environment's process counts as a child."""

    step: int
    rss_mib: float
    threads: int
    files: int
    children: int


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended. A zombie has, even where nobody ever reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def outer_pid(ancestor: int, inner: int) -> int:
    """The pid, for us, of the descendant that calls itself `inner` in its PID namespace."""
    for process in psutil.Process(ancestor).children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        names = status.partition("NSpid:")[2].split("\n")[0].split()
        if int(names[-1]) == inner:
            return process.pid
    raise LookupError(inner)


def listening_ports(group: int) -> list[int]:
    """The TCP ports that the processes of a process group listen on."""
    ports: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                connections = process.net_connections("tcp")
                ports += [each.laddr[1] for each in connections if each.status == "LISTEN"]
    return ports


def watch(run: RunFolder, attempt: Attempt, timeout_s: float) -> tuple[list[Held], float]:
    """What the attempt held after each step, and the peak of its resident memory in MiB, until it ends."""
    process, held, peak_mib = psutil.Process(attempt.process.pid), list[Held](), 0.0
    deadline = time.monotonic() + timeout_s
    while attempt.process.poll() is None:
        assert time.monotonic() < deadline, attempt.log_path.read_text()
        try:
            peak_mib = max(peak_mib, _peak_mib(process.pid))
            step = max(run.metric_steps(), default=0)
            if step > (held[-1].step if held else 0):
                children = len(process.children(recursive=True))
                rss = process.memory_info().rss / MIB
                held.append(Held(step, rss, process.num_threads(), process.num_fds(), children))
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.02)
    return held, peak_mib


def slope(held: list[Held]) -> float:
    """MiB a step by which resident memory grows: least squares."""
    steps, sizes = [h.step for h in held], [h.rss_mib for h in held]
    mean_step, mean_size = sum(steps) / len(steps), sum(sizes) / len(sizes)
    along = sum((step - mean_step) * (size - mean_size) for step, size in zip(steps, sizes, strict=True))
    return along / sum((step - mean_step) ** 2 for step in steps)


def _peak_mib(pid: int) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024 if "VmHWM" in status else 0.0
