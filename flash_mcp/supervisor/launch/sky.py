"""Attempts as managed jobs of SkyPilot, through its API server over HTTP. It needs no package of
SkyPilot's here.

An attempt's key is in its job's name, by which it is found again. SkyPilot starts a job anew whose
machine was taken away, and the run goes on as the next attempt."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.api import ApiLauncher, commands
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch

TIMEOUT_S = 60.0
"""Its API server starts a process for most requests, and the first ones after its start."""
LAUNCH_S = 300.0
"""For a job to be taken: before the first one SkyPilot may rent a machine for its controller."""
LIST_EVERY_S = 10.0
"""Between two lists of jobs: for each, SkyPilot starts a process of several CPU seconds."""
PENDING = ("PENDING", "SUBMITTED", "STARTING", "RECOVERING")
ALIVE = ("RUNNING", "WINDING_DOWN", "CANCELLING")
PREEMPTED = ("CANCELLED", "FAILED_CONTROLLER")
"""Ends that are no fault of the attempt."""
FIELDS = ("job_name", "details", "failure_reason")
"""Of a job, besides its job_id and status."""
NO_CARDS = "none"
"""The accelerators of a target without GPUs."""
LAUNCHES = "sky.jobs.launch"
"""The name of a request that launches a job."""
REQUEST = "X-Skypilot-Request-ID"
"""The header of an answer that names the request."""
NO_CONTROLLER = "ClusterNotUpError"
FORGOTTEN = JobStatus("gone", "SkyPilot does not list its job")


class SkyLauncher(ApiLauncher):
    """The address is the URL of SkyPilot's API server, the token a service account's. `resources`
    are those of a task of SkyPilot's: infra, use_spot, accelerators. Without accelerators a job
    gets the cheapest GPU that has the memory it needs.
    """

    engine = "SkyPilot"
    root = "/"
    unreachable = "check that SkyPilot's API server runs: `sky api info`; the run waits"
    reaches_nodes = False
    _hints: Mapping[str, JobStatus] = {}
    _listed_at = -math.inf

    @classmethod
    def chooses_cards(cls, settings: TargetSettings) -> bool:
        return "accelerators" not in settings.resources

    @property
    def _prefix(self) -> str:
        """How the names of its jobs begin."""
        if self.tag:
            return f"{self.tag}-"
        return ""

    def submit(self, launch: Launch) -> Handle:
        name = self._prefix + launch.key
        for job in self._list(name_match=name):
            if job["job_name"] == name:
                return Handle(launch.key, str(job["job_id"]))
        # Those that it still takes
        query = "api/status?fields=request_id&fields=name&fields=request_body"
        asked = cast("list[Json]", self.json_of(self.ask("GET", query, None, TIMEOUT_S)))
        bodies = [json.loads(item["request_body"]) for item in asked if item["name"] == LAUNCHES]
        if any(body and body["name"] == name for body in bodies):
            what = "SkyPilot has not taken the job yet: it may be starting its controller"
            raise FlashError("target_unreachable", what, fix=self.unreachable)
        task = {
            "name": name,
            "resources": resources_for(self.resources, launch),
            "run": "\n".join(commands(launch)),  # SkyPilot keeps its own log of the output
        }
        answer = self._ask("jobs/launch", {"name": name, "task": json.dumps(task)}, LAUNCH_S)
        (number,) = answer["job_id"]
        return Handle(launch.key, str(number))

    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        numbers = {handle.id for handle in handles if handle.id}
        try:
            if numbers - set(self._hints) or time.monotonic() - self._listed_at > LIST_EVERY_S:
                jobs = self._list(job_ids=sorted(map(int, numbers))) if numbers else []
                results = {str(job["job_id"]): _hint(job) for job in jobs}
                self._hints = {number: results.get(number, FORGOTTEN) for number in numbers}
                self._listed_at = time.monotonic()
        except FlashError as error:
            return {handle.key: JobStatus("unknown", error.what) for handle in handles}
        return {handle.key: self._hints.get(handle.id, FORGOTTEN) for handle in handles}

    def cancel(self, handle: Handle) -> None:
        """SkyPilot ends the job's machine within a minute or so."""
        if handle.id:
            self._ask("jobs/cancel", {"job_ids": [int(handle.id)]})
            self._listed_at = -math.inf

    def under_way(self) -> list[Handle]:
        if not self._prefix:
            return []
        handles: list[Handle] = []
        for job in self._list(name_match=self._prefix, skip_finished=True):
            name: str = job["job_name"]
            if name.startswith(self._prefix):
                handles.append(Handle(name.removeprefix(self._prefix), str(job["job_id"])))
        return handles

    def _list(self, **which: Any) -> list[Json]:
        """Jobs of this user of SkyPilot's; none if no controller was started for any."""
        try:
            answer = self._ask("jobs/queue/v2", {"fields": FIELDS, **which})
        except FlashError as error:
            if NO_CONTROLLER in error.what:
                return []
            raise
        return cast("list[Json]", answer["jobs"])

    def _ask(self, path: str, body: Json, timeout_s: float = TIMEOUT_S) -> Json:
        """What a request returns, once it has ended.

        FlashError(target_unreachable | target_refused).
        """
        posted = self.ask("POST", path, body, TIMEOUT_S)
        number = posted.headers.get(REQUEST)
        if posted.is_error or number is None:
            what = f"{posted.url} answered {posted.status_code}: {posted.text[:200]}"
            fix = "name the address of SkyPilot's API server: `sky api info` prints it"
            raise FlashError("target_refused", what, fix=fix)
        answer = self.ask("GET", f"api/get?request_id={number}", None, timeout_s)
        result = cast("Json", self.json_of(answer))
        if answer.is_success:
            return json.loads(result["return_value"] or "null") or {}
        said: Any = result["detail"]
        if isinstance(said, dict):
            error = json.loads(cast("Json", said)["error"])
            said = f"{error['type']}: {error['message']}"
        said = " ".join(str(said).split())[:500]
        fix = "correct the target's resources in targets.toml, or SkyPilot's set-up: `sky check`"
        raise FlashError("target_refused", f"SkyPilot refused: {said}", fix=fix)


def resources_for(resources: Mapping[str, Any], launch: Launch) -> Json:
    """The target's resources with the accelerators of this attempt: those that the target names, or
    any card with the memory that a card of the attempt needs. A job that needs none, such as the
    one that proves a target, gets none.
    """
    numbers = dict(resources)
    named = numbers.pop("accelerators", "")
    if named == NO_CARDS:
        return numbers
    if not named and launch.card_gib:
        named = f"{math.ceil(launch.card_gib)}GB+"
    if not named:
        return numbers
    card, _, count = str(named).rpartition(":")
    if not card or not count.isdigit():
        card, count = str(named), "1"
    return {**numbers, "accelerators": f"{card}:{launch.gpus if launch.gpus > 1 else count}"}


def _hint(job: Json) -> JobStatus:
    state = str(job["status"])
    said = " ".join(str(job.get("failure_reason") or job.get("details") or state).split())[:300]
    if state in PENDING:
        return JobStatus("pending", f"SkyPilot: {said}")
    if state in ALIVE:
        return JobStatus("alive")
    detail = f"SkyPilot job {job['job_id']}: {state}"
    if said != state:
        detail += f", {said}"
    return JobStatus("gone", detail, is_preempted=state in PREEMPTED)
