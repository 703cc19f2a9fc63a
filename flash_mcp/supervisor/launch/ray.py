"""Attempts as jobs of Ray, through its Jobs API over HTTP. It needs no package of Ray's here.

An attempt's key is its submission id, by which Ray refuses a second one. Ray may call a job failed
that still trains behind a cut link, or running although it ended: the run folder decides. Ray gives
up a job that waits for more than 15 minutes; it is submitted anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.api import ApiLauncher, commands
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch

TIMEOUT_S = 10.0
NO_AGENT = "No available agent"
"""What Ray answers, as an error of its own, while none of its nodes takes jobs."""
NO_OUTPUT = " >/dev/null 2>&1"
OWN_FAULT = "JOB_ENTRYPOINT_COMMAND"
"""How the type of the error begins if the attempt itself failed."""
TAG = "flash-mcp"
"""The entry of a job's metadata that names its state directory."""


class RayLauncher(ApiLauncher):
    """The address is the URL of Ray's dashboard. An attempt takes one CPU and what else `resources`
    name: GPU, or a cluster's own.
    """

    engine = "Ray"
    root = "/api/jobs/"
    unreachable = "check that Ray's head node runs and can be reached from here; the run waits"

    @classmethod
    def check(cls, settings: TargetSettings) -> None:
        super().check(settings)
        for name, value in settings.resources.items():
            if not isinstance(value, int | float):
                raise ValueError(f"resources: Ray takes numbers, and {name} is {value!r}")

    def submit(self, launch: Launch) -> Handle:
        named = dict(self.resources)
        if launch.gpus > 1:
            named["GPU"] = launch.gpus
        body: Json = {
            "submission_id": launch.key,
            # Ray sets OMP_NUM_THREADS to 1, and a working directory of its own.
            "entrypoint": "; ".join(["unset OMP_NUM_THREADS", *commands(launch, NO_OUTPUT)]),
            "entrypoint_num_cpus": named.pop("CPU", 1),
            "entrypoint_num_gpus": named.pop("GPU", 0),
            "entrypoint_resources": named,
            "metadata": {TAG: self.tag},
        }
        answer = self._ask("POST", "", body)
        if NO_AGENT in answer.text:
            what = "Ray has no agent that takes jobs: it has just started, or is busy"
            # Its agent goes on without the port if another program has it.
            fix = (
                "wait; if it stays so, another program has the agent's port, 52365: start Ray's "
                "head with another --dashboard-agent-listen-port"
            )
            raise FlashError("target_unreachable", what, fix=fix)
        if answer.is_error and "already exists" in answer.text:
            key = launch.key
            job = self._list().get(key)
            if job and not self._is_ours(job):
                what = f"Ray has a job {key} already, which another state directory submitted"
                fix = f"cancel the run, or `ray job delete {key}` if no copy of this directory "
                fix += "needs it"
                raise FlashError("target_refused", what, fix=fix)
            return Handle(key, key)
        if answer.is_error:
            said = answer.text.strip().splitlines()[-1:]
            fix = "correct the target's resources in targets.toml"
            raise FlashError("target_refused", f"Ray refused: {' '.join(said)[-500:]}", fix=fix)
        self.json_of(answer)
        return Handle(launch.key, launch.key)

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        try:
            jobs = self._list() if handles else {}
        except FlashError as error:
            return {handle.key: JobStatus("unknown", error.what) for handle in handles}
        return {handle.key: _hint(jobs.get(handle.id)) for handle in handles}

    def cancel(self, handle: Handle) -> None:
        """Ray ends the job's processes within some seconds."""
        if handle.id:  # another state directory may have a job of that key
            self._ask("POST", f"{handle.id}/stop")

    def addresses_of(self, handle: Handle) -> list[str] | None:
        agent = urlsplit(self._list().get(handle.id, {}).get("driver_agent_http_address") or "")
        return [agent.hostname] if agent.hostname else None

    def under_way(self) -> list[Handle]:
        live = {key: job for key, job in self._list().items() if _hint(job).state != "gone"}
        return [Handle(key, key) for key, job in live.items() if self.tag and self._is_ours(job)]

    def _is_ours(self, job: Json) -> bool:
        marks = cast("dict[str, str]", job["metadata"] or {})
        return marks.get(TAG) == self.tag

    def _list(self) -> dict[str, Json]:
        """All jobs by submission id. Those of programs that connect by themselves have none."""
        answer = self._ask("GET", "")
        if answer.is_error:
            what = f"Ray answered {answer.status_code}: {answer.text[:200]}"
            raise FlashError("target_unreachable", what, fix=self.unreachable)
        jobs = cast("list[Json]", self.json_of(answer))
        return {job["submission_id"]: job for job in jobs if job["submission_id"]}

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self.ask(method, path, body, TIMEOUT_S)


def _hint(job: Json | None) -> JobStatus:
    if job is None:
        return JobStatus("gone", "Ray does not list its job")
    message = " ".join(str(job["message"]).split())[:300]
    state = str(job["status"])
    if state == "PENDING":
        return JobStatus("pending", f"Ray: {message}")
    if state == "RUNNING":
        return JobStatus("alive")
    is_own = state == "SUCCEEDED" or str(job["error_type"]).startswith(OWN_FAULT)
    detail = f"Ray job {state}: {message}"
    return JobStatus("gone", detail, not is_own, is_by_hand=state == "STOPPED")
