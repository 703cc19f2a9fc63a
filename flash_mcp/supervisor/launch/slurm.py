"""Attempts as jobs of Slurm, through sbatch, squeue and scancel: on this machine, or over ssh.

An attempt's job is one of this account with the attempt's name and the launcher's tag as comment,
for as long as Slurm lists it: 300 s after its end by default. Names and comments may hold line ends
and whatever else their authors like. Jobs get nothing of this process's environment."""

from __future__ import annotations

import atexit
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Self

from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher, exported

TIMEOUT_S = 10.0
LIST_EVERY_S = 10.0
"""Between two lists of jobs."""
PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "RESV_DEL_HOLD")
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
PREEMPTED = (
    "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "TIMEOUT", "DEADLINE", "REVOKED",
    "REQUEUE_HOLD",
)  # fmt: skip
"""Ends that are no fault of the attempt."""
GIVEN_UP = ("JobHoldMaxRequeue", "launch failed requeued held")
"""Why Slurm starts a job no more, although it keeps it."""


FIELDS = ("%i", "%j", "%k", "%T", "%r", "%N")
"""Those of Job, as squeue calls them."""


@dataclass(frozen=True)
class SlurmJob:
    """What squeue says of one."""

    id: str
    name: str
    comment: str
    """The tag of the launcher that submitted it."""
    state: str
    reason: str
    nodes: str

    def status(self) -> JobStatus:
        if self.state in PENDING and self.reason not in GIVEN_UP:
            return JobStatus("pending", f"Slurm: {self.reason}")
        if self.state in ALIVE:
            return JobStatus("alive")
        detail = f"Slurm job {self.id}: {self.state}"
        is_preempted = self.state in (*PREEMPTED, *PENDING)
        return JobStatus("gone", detail, is_preempted, is_by_hand=self.state == "CANCELLED")


@dataclass
class Queue:
    """The account's jobs as listed last: one list serves all targets of a cluster."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    jobs: Sequence[SlurmJob] = ()
    listed_at: float = -math.inf


@cache
def _queue(ssh: str, config: str) -> Queue:
    return Queue()


class SlurmLauncher(Launcher):
    """`options` are arguments of sbatch, such as --partition=gpu; `ssh` names a host that has
    sbatch, squeue and scancel. `tag` marks the jobs of one state directory: others may have jobs of
    the same user.
    """

    def __init__(
        self, capacity: int = 1, options: Sequence[str] = (), ssh: str = "", tag: str = ""
    ) -> None:
        self.capacity = capacity
        self.options = tuple(options)
        self.ssh = ssh
        self.tag = tag
        self._queue = _queue(ssh, os.environ.get("SLURM_CONF", ""))
        self._began_at = time.monotonic()
        self._submitted_at: dict[str, float] = {}
        """By key, when its job was last handed to sbatch, which may have failed."""

    @classmethod
    def of(cls, settings: TargetSettings, tag: str = "") -> Self:
        return cls(settings.slots, settings.options, settings.ssh, tag)

    @classmethod
    def check(cls, settings: TargetSettings) -> None:
        if settings.address:
            raise ValueError("Slurm has no address: ssh names the host that has its commands")

    def submit(self, launch: Launch) -> Handle:
        # Nobody else submits: a list that is younger than our last try, or than this launcher, has
        # the job if there is one.
        for job in self._tagged(self._submitted_at.get(launch.key, self._began_at)):
            if job.name == launch.key and self._asked(handle := Handle(launch.key, job.id)):
                return handle
        self._submitted_at[launch.key] = time.monotonic()
        output = str(launch.log or os.devnull)
        if launch.log:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
        own = ["--parsable", "--requeue", "--export=NIL", "--chdir=/", "--open-mode=append"]
        named = [f"--job-name={launch.key}", f"--comment={self.tag}", f"--output={output}"]
        options = with_gpus((*self.options, *launch.options), launch.gpus)
        options += [*own, *named]
        printed = self._run(["sbatch", *options], script(launch))
        # A host's greeting may come before it.
        numbers = re.findall(r"^(\d+)(?:;.*)?$", printed, re.MULTILINE)
        if not numbers:
            what = f"sbatch printed no number of a job: {printed.strip()[-200:]!r}"
            raise FlashError("target_refused", what, fix="see that sbatch works on that host")
        return Handle(launch.key, numbers[-1])

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        try:
            listed = self._jobs(time.monotonic() - LIST_EVERY_S) if handles else ()
        except FlashError as error:
            return {handle.key: JobStatus("unknown", error.what) for handle in handles}
        jobs = {(job.id, job.name): job for job in listed if job.comment == self.tag}
        return {each.key: self._hint(each, jobs.get((each.id, each.key))) for each in handles}

    def _hint(self, handle: Handle, job: SlurmJob | None) -> JobStatus:
        if job:
            return job.status()
        if self._submitted_at.get(handle.key, -math.inf) >= self._queue.listed_at:
            return JobStatus("pending", "Slurm: submitted")
        return JobStatus("gone", "Slurm does not list its job")

    def addresses_of(self, handle: Handle) -> list[str]:
        if not (job := self._asked(handle)) or not job.nodes:
            return []
        nodes = self._run(["scontrol", "show", "node", "--oneliner", job.nodes])
        names = re.findall(r" NodeAddr=(\S+)", nodes)
        lines = self._run(["getent", "ahostsv4", *names]).splitlines()
        addresses = {line.split()[0] for line in lines}
        if any(address.startswith("127.") for address in addresses):  # the node is this machine
            addresses |= {"127.0.0.1", *self._run(["hostname", "-I"]).split()}
        return sorted(address for address in addresses if "." in address)

    def under_way(self) -> list[Handle]:
        jobs = self._tagged(time.monotonic() - LIST_EVERY_S)
        return [Handle(job.name, job.id) for job in jobs if job.status().state != "gone"]

    def cancel(self, handle: Handle) -> None:
        if not handle.id or not self._asked(handle):
            return
        # The first ends its processes at once, the second one that is pending.
        self._run(["scancel", "--quiet", "--full", "--signal=KILL", handle.id])
        self._run(["scancel", "--quiet", handle.id])

    def _tagged(self, since: float) -> list[SlurmJob]:
        return [job for job in self._jobs(since) if self.tag and job.comment == self.tag]

    def _jobs(self, since: float) -> Sequence[SlurmJob]:
        """The account's jobs, and those that ended lately, as a list has them that is not older."""
        with self._queue.lock:
            if self._queue.listed_at < since:
                began = time.monotonic()
                self._queue.jobs = self._listed()
                self._queue.listed_at = began
            return self._queue.jobs

    def _asked(self, handle: Handle) -> SlurmJob | None:
        """The attempt's job as Slurm has it now: Slurm gives the numbers of jobs again."""
        for job in self._listed(f"--jobs={handle.id}"):
            if (job.id, job.name, job.comment) == (handle.id, handle.key, self.tag):
                return job
        return None

    def _listed(self, *which: str) -> list[SlurmJob]:
        mark = secrets.token_hex(16)  # unknown to whoever chose a name or a comment
        form = "".join(mark + field for field in FIELDS) + mark
        command = ["squeue", "--me", *which, "--states=all", "--noheader", f"--format={form}"]
        printed = self._run(command)
        _, *fields = printed.split(mark)
        width = len(FIELDS) + 1  # and what stands between two jobs
        if len(fields) % width:
            what = f"squeue printed other fields than it was asked for: {printed[-200:]!r}"
            raise FlashError("target_unreachable", what, fix=UNREACHABLE)
        return [SlurmJob(*fields[at : at + width - 1]) for at in range(0, len(fields), width)]

    def _run(self, command: list[str], stdin: str = "") -> str:
        name = command[0]
        if self.ssh:
            command = ["ssh", *_ssh_options(), self.ssh, shlex.join(command)]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except FileNotFoundError as error:
            fix = "install Slurm's client commands, or name a host that has them: ssh in the target"
            raise FlashError("target_refused", f"there is no {command[0]} here", fix=fix) from error
        except subprocess.TimeoutExpired as error:
            what = f"{name} did not answer within {TIMEOUT_S:.0f} s"
            raise FlashError("target_unreachable", what, fix=UNREACHABLE) from error
        if done.returncode == 0:
            return done.stdout
        said = " ".join(done.stderr.split())[-500:]
        is_over = any(words in said for words in OVER)
        if (name in ("scancel", "squeue") and is_over) or (name == "scancel" and not said):
            return ""  # --quiet leaves some unsaid
        if name == "squeue" or any(words in said for words in ABSENT):
            what = f"{name}: {said}"
            raise FlashError("target_unreachable", what, fix=UNREACHABLE)
        fix = "the run waits; if it stays so, correct the target's options in targets.toml"
        raise FlashError("target_refused", f"{name} refused: {said}", fix=fix)


@cache
def _control_folder() -> Path:
    folder = Path(mkdtemp(prefix="flash-ssh-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _ssh_options() -> list[str]:
    """All commands share one connection, which ends a minute after the last of them."""
    folder = _control_folder()
    # What cleans temporary files may have removed it, and another user may have it now.
    if not folder.exists() or folder.stat().st_uid != os.getuid():
        _control_folder.cache_clear()
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": f"{TIMEOUT_S / 2:.0f}",
        "ControlMaster": "auto",
        "ControlPath": f"{_control_folder()}/%C",
        "ControlPersist": "60",
        "ServerAliveInterval": "5",
    }
    return [f"-o{name}={value}" for name, value in settings.items()]


UNREACHABLE = "check that Slurm's controller runs and can be reached from here; the run waits"
ABSENT = (
    "Unable to contact",
    "Zero Bytes were transmitted",
    "in standby mode",
    "Connection refused",
    "Connection timed out",
    "Communication connection failure",
    "Socket timed out",
    "Could not resolve hostname",
    "closed by remote host",
    "No route to host",
    "munge",
)
"""What Slurm and ssh say when the controller cannot be reached."""

OVER = ("Invalid job id", "already completing or completed", "Job is pending execution")
"""What Slurm says of a job that has ended or, to a signal, of one that has not begun."""


GPUS = re.compile(r"(--(?:gres=gpu|gpus(?:-per-\w+)?)(?:[:=](?!\d+$)[\w.-]+)?[:=])\d+")
"""An option of sbatch that asks for GPUs, perhaps of a type: --gres=gpu:a100:1, --gpus=1."""


def with_gpus(options: Sequence[str], gpus: int) -> list[str]:
    """The target's options, which ask for one GPU, for an attempt of several."""
    if gpus == 1:
        return list(options)
    return [GPUS.sub(rf"\g<1>{gpus}", option) for option in options]


def script(launch: Launch) -> str:
    """The job: the attempt's environment, and its command in place of the shell."""
    # What --export=NIL says of the job would hold for an srun in the command too.
    lines = ["#!/bin/sh", "unset SLURM_EXPORT_ENV", *exported(launch.environment)]
    lines.append(f"exec {shlex.join(launch.command)}")
    return "\n".join(lines) + "\n"
