"""Attempts as jobs of Slurm, through sbatch, squeue and scancel: on this machine, or over ssh.

An attempt's key is its job's name, by which it is found again for as long as Slurm lists it: 300 s
after its end by default. Jobs get nothing of this process's environment."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flash_mcp.protocol.errors import FlashError
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher, exported

TIMEOUT_S = 10.0
CANCEL_S = 15.0
"""How long a cancelled job may take to leave its node. Fencing covers what takes longer."""
PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
PREEMPTED = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "CANCELLED", "TIMEOUT", "DEADLINE", "REVOKED")
"""Ends that are no fault of the attempt."""


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    id: str
    name: str
    state: str
    comment: str
    """The tag of the launcher that submitted it."""
    reason: str

    def hint(self) -> JobStatus:
        if self.state in PENDING:
            return JobStatus("pending", f"Slurm: {self.reason}")
        if self.state in ALIVE:
            return JobStatus("alive")
        detail = f"Slurm job {self.id}: {self.state}"
        return JobStatus("gone", detail, is_preempted=self.state in PREEMPTED)


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

    def submit(self, launch: Launch) -> Handle:
        for job in self._jobs():
            if job.name == launch.key:
                return Handle(launch.key, job.id)
        output = str(launch.log or os.devnull)
        if launch.log:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
        # A requeued job would be a second process of one attempt.
        own = ["--parsable", "--no-requeue", "--export=NIL", "--chdir=/", "--open-mode=append"]
        named = [f"--job-name={launch.key}", f"--comment={self.tag}", f"--output={output}"]
        options = [*with_gpus(self.options, launch.gpus), *own, *named]
        printed = self._run(["sbatch", *options], script(launch))
        return Handle(launch.key, printed.strip().split(";")[0])

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        try:
            jobs = {job.id: job for job in self._jobs()} if handles else {}
        except FlashError as error:
            return {handle.key: JobStatus("unknown", error.what) for handle in handles}
        forgotten = JobStatus("gone", "Slurm does not list its job")
        results = {handle.key: jobs.get(handle.id) for handle in handles}
        return {key: job.hint() if job else forgotten for key, job in results.items()}

    def under_way(self) -> list[Handle]:
        mine = [job for job in self._jobs() if self.tag and job.comment == self.tag]
        return [Handle(job.name, job.id) for job in mine if job.hint().state != "gone"]

    def cancel(self, handle: Handle) -> None:
        if not handle.id:
            return
        # The first ends its processes at once, the second one that is pending.
        self._run(["scancel", "--quiet", "--full", "--signal=KILL", handle.id])
        self._run(["scancel", "--quiet", handle.id])
        deadline = time.monotonic() + CANCEL_S
        while self.poll([handle])[handle.key].state != "gone" and time.monotonic() < deadline:
            time.sleep(0.1)

    def _jobs(self) -> list[Job]:
        """This user's jobs, and those that ended lately."""
        form = "--format=%i|%j|%T|%k|%r"
        listed = self._run(["squeue", "--me", "--states=all", "--noheader", form])
        return [Job(*line.split("|", 4)) for line in listed.splitlines() if line.count("|") >= 4]

    def _run(self, command: list[str], stdin: str = "") -> str:
        """What the command prints. FlashError(target_unreachable | target_refused)."""
        name = command[0]
        if self.ssh:
            options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={TIMEOUT_S / 2:.0f}"]
            command = ["ssh", *options, self.ssh, shlex.join(command)]
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
        if name == "squeue" or any(words in said for words in ABSENT):
            what = f"{name}: {said}"
            raise FlashError("target_unreachable", what, fix=UNREACHABLE)
        if name == "scancel":  # of a job that Slurm has forgotten
            return ""
        fix = "the run waits; if it stays so, correct the target's options in targets.toml"
        raise FlashError("target_refused", f"{name} refused: {said}", fix=fix)


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


GPUS = re.compile(r"(--(?:gres=gpu|gpus(?:-per-\w+)?)(?:[:=](?!\d+$)[\w.-]+)?[:=])\d+")
"""An option of sbatch that asks for GPUs, perhaps of a type: --gres=gpu:a100:1, --gpus=1."""


def with_gpus(options: Sequence[str], gpus: int) -> list[str]:
    """The target's options, which ask for one GPU, for an attempt of several."""
    if gpus == 1:
        return list(options)
    return [GPUS.sub(rf"\g<1>{gpus}", option) for option in options]


def script(launch: Launch) -> str:
    """The job: the attempt's environment, and its command in place of the shell."""
    lines = ["#!/bin/sh", *exported(launch.environment), f"exec {shlex.join(launch.command)}"]
    return "\n".join(lines) + "\n"
