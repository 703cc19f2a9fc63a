"""Attempts as jobs of Ray, through its Jobs API over HTTP. It needs no package of Ray's here.

An attempt's key is its submission id, by which Ray refuses a second one. Ray may call a job failed
that still trains behind a cut link, or running although it ended: the run folder decides. Ray gives
up a job that waits for more than 15 minutes; it is submitted anew."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.supervisor.launch.base import Handle, Hint, Launch, Launcher, exported

TIMEOUT_S = 10.0
OWN_FAULT = "JOB_ENTRYPOINT_COMMAND"
"""How the type of the error begins if the attempt itself failed."""
TAG = "flash-mcp"
"""The entry of a job's metadata that names its state directory."""
UNREACHABLE = "check that Ray's head node runs and can be reached from here; the run waits"


class RayLauncher(Launcher):
    """`address` is the URL of Ray's dashboard, `token_file` holds its token. `resources` are what
    an attempt takes, in Ray's names: CPU, GPU, or a cluster's own.
    """

    def __init__(
        self,
        address: str,
        capacity: int = 1,
        resources: Mapping[str, float] | None = None,
        token_file: str | None = None,
        tag: str = "",
    ) -> None:
        self.jobs = f"{address.rstrip('/')}/api/jobs/"
        self.capacity = capacity
        self.resources = dict(resources or {})
        self.token_file = token_file
        self.tag = tag

    def submit(self, launch: Launch) -> Handle:
        named = dict(self.resources)
        if launch.gpus > 1:
            named["GPU"] = launch.gpus
        body: Json = {
            "submission_id": launch.key,
            "entrypoint": _entrypoint(launch),
            "entrypoint_num_cpus": named.pop("CPU", 1),
            "entrypoint_num_gpus": named.pop("GPU", 0),
            "entrypoint_resources": named,
            "metadata": {TAG: self.tag},
        }
        answer = self._ask("POST", "", body)
        if answer.is_error and "already exists" not in answer.text:
            said = answer.text.strip().splitlines()[-1:]
            fix = "correct the target's resources in targets.toml"
            raise FlashError("target_refused", f"Ray refused: {' '.join(said)[-500:]}", fix=fix)
        return Handle(launch.key, launch.key)

    def poll(self, handles: Sequence[Handle]) -> dict[str, Hint]:
        try:
            jobs = self._list() if handles else {}
        except FlashError as error:
            return {handle.key: Hint("unknown", error.what) for handle in handles}
        return {handle.key: _hint(jobs.get(handle.key)) for handle in handles}

    def cancel(self, handle: Handle) -> None:
        """Ray ends the job's processes within some seconds."""
        self._ask("POST", f"{handle.key}/stop")

    def under_way(self) -> list[Handle]:
        live = {key: job for key, job in self._list().items() if _hint(job).state != "gone"}
        return [Handle(key, key) for key, job in live.items() if self._is_ours(job)]

    def _is_ours(self, job: Json) -> bool:
        marks = cast("dict[str, str]", job["metadata"] or {})
        return bool(self.tag) and marks.get(TAG) == self.tag

    def _list(self) -> dict[str, Json]:
        """All jobs by submission id. Those of programs that connect by themselves have none."""
        answer = self._ask("GET", "")
        if answer.is_error:
            what = f"Ray answered {answer.status_code}: {answer.text[:200]}"
            raise FlashError("target_unreachable", what, fix=UNREACHABLE)
        jobs = cast("list[Json]", answer.json())
        return {job["submission_id"]: job for job in jobs if job["submission_id"]}

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """FlashError(target_unreachable | target_refused)."""
        try:
            token = Path(self.token_file).read_text().strip() if self.token_file else ""
        except OSError as error:
            fix = "correct token_file in targets.toml"
            raise FlashError("target_refused", f"no token of Ray: {error}", fix=fix) from error
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answer = httpx.request(
                method, self.jobs + path, json=body, headers=headers, timeout=TIMEOUT_S
            )
        except httpx.TransportError as error:
            what = f"Ray does not answer at {self.jobs}: {error or type(error).__name__}"
            raise FlashError("target_unreachable", what, fix=UNREACHABLE) from error
        if answer.status_code in (401, 403):
            fix = "name a file with the cluster's token: token_file in the target"
            raise FlashError("target_refused", f"Ray refused: {answer.text[:200]}", fix=fix)
        return answer


def _entrypoint(launch: Launch) -> str:
    """Ray sets OMP_NUM_THREADS to 1, and a working directory of its own."""
    lines = ["unset OMP_NUM_THREADS", "cd /", *exported(launch.environment)]
    output = "/dev/null"
    if launch.log:
        lines.append(f"mkdir -p {shlex.quote(str(launch.log.parent))}")
        output = shlex.quote(str(launch.log))
    command = f"exec {shlex.join(launch.command)} </dev/null >>{output} 2>&1"
    return "; ".join([*lines, command])


def _hint(job: Json | None) -> Hint:
    if job is None:
        return Hint("gone", "Ray does not list its job")
    message = " ".join(str(job["message"]).split())[:300]
    state = str(job["status"])
    if state == "PENDING":
        return Hint("pending", f"Ray: {message}")
    if state == "RUNNING":
        return Hint("alive")
    is_own = state == "SUCCEEDED" or str(job["error_type"]).startswith(OWN_FAULT)
    return Hint("gone", f"Ray job {state}: {message}", is_preempted=not is_own)
