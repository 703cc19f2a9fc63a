"""The tasks extension, io.modelcontextprotocol/tasks: a call that starts long work returns a task
to poll.

A task's id is the id of a run or a deployment. Its state is read from the store, so it survives the
server. Clients that do not declare the extension get the plain results. Protocol:
https://modelcontextprotocol.io/extensions/tasks/overview"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from anyio.to_thread import run_sync
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver.server import require_client_extension
from mcp.shared.exceptions import MCPError
from mcp_types import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    RequestParams,
    TextContent,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE, Deployment, Json, Run, without_none
from flash_mcp.state import queue
from flash_mcp.state.owners import refuse_reader
from flash_mcp.state.serving import request_stop
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import ensure_supervised
from flash_mcp.tools.deploy import Deployed, describe, failure
from flash_mcp.tools.shared.next_steps import next_of
from flash_mcp.tools.shared.run_view import RunReport
from flash_mcp.tools.shared.scores import scores
from flash_mcp.tools.shared.truncation import RESULT_CHARACTERS, fit, to_text
from flash_mcp.tools.shared.waiting import obstacle, obstacles
from flash_mcp.tools.status import status

IDENTIFIER = "io.modelcontextprotocol/tasks"
POLL_INTERVAL_MS = 5_000


@dataclass(frozen=True)
class TaskState:
    """The state of a task, with Unix seconds; `result` is set once it is completed."""

    status: Literal["working", "completed", "cancelled"]
    created: float
    updated: float
    message: str | None = None
    result: CallToolResult | None = None


class Jobs(Protocol):
    """A kind of work that tasks refer to. `look` and `cancel` raise FlashError for unknown ids."""

    tools: frozenset[str]

    async def begin(self, tool: str, result: Json) -> str | None:
        """Store what a task needs; the id of the unfinished work, or None if nothing is left."""
        ...

    async def look(self, task_id: str) -> TaskState: ...

    async def cancel(self, task_id: str) -> None: ...


class TaskParams(RequestParams):
    task_id: str


class Tasks(Extension):
    """tasks/get, tasks/cancel and tasks/update. The first kind of jobs that knows an id answers."""

    identifier = IDENTIFIER

    def __init__(self, *jobs: Jobs) -> None:
        self.jobs = jobs

    def methods(self) -> Sequence[MethodBinding]:
        versions = frozenset(MODERN_PROTOCOL_VERSIONS)
        return [
            MethodBinding("tasks/get", TaskParams, self.get, versions),
            MethodBinding("tasks/cancel", TaskParams, self.cancel, versions),
            MethodBinding("tasks/update", TaskParams, self.update, versions),
        ]

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        """Run the tool. If it left work behind, and the client knows tasks, return the task."""
        result = await call_next(ctx)
        if not isinstance(result, CallToolResult) or not _understands(ctx):
            return result
        body = result.structured_content
        for jobs in self.jobs:
            if not body or params.name not in jobs.tools:
                continue
            if task_id := await jobs.begin(params.name, body):
                return {**_wire(task_id, await jobs.look(task_id)), "resultType": "task"}
        return result

    async def get(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        _, job = await self._find(ctx, params.task_id)
        result = _wire(params.task_id, job)
        if job.result is not None:
            result["result"] = job.result.model_dump(mode="json", by_alias=True, exclude_none=True)
        return result

    async def cancel(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        jobs, job = await self._find(ctx, params.task_id)
        try:
            refuse_reader("tasks/cancel")
        except FlashError as error:
            raise MCPError(code=INVALID_PARAMS, message=str(error)) from error
        if job.status == "working":
            try:
                await jobs.cancel(params.task_id)
            except FlashError as error:
                if error.code != "run_finished":  # it ended meanwhile
                    raise
        return {"resultType": "complete"}

    async def update(
        self, ctx: ServerRequestContext[Any, Any], params: TaskParams
    ) -> HandlerResult:
        """Answers to a task's questions: ignored, since no task asks any."""
        await self._find(ctx, params.task_id)
        return {"resultType": "complete"}

    async def _find(
        self, ctx: ServerRequestContext[Any, Any], task_id: str
    ) -> tuple[Jobs, TaskState]:
        require_client_extension(ctx, IDENTIFIER)
        # Only requests over HTTP have headers.
        if ctx.request is not None and ctx.request.headers.get("mcp-name") != task_id:
            message = "Mcp-Name header does not match the request body's taskId"
            raise MCPError(code=HEADER_MISMATCH, message=message)
        for jobs in self.jobs:
            try:
                return jobs, await jobs.look(task_id)
            except FlashError as error:
                if not error.code.startswith("unknown_"):
                    raise
        raise MCPError(code=INVALID_PARAMS, message=f"There is no task {task_id!r}")


def _understands(ctx: ServerRequestContext[Any, Any]) -> bool:
    capabilities = ctx.session.client_capabilities
    declared = (capabilities.extensions if capabilities else None) or {}
    return IDENTIFIER in declared and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS


def _wire(task_id: str, job: TaskState) -> Json:
    task = {
        "resultType": "complete",
        "taskId": task_id,
        "status": job.status,
        "statusMessage": job.message,
        "createdAt": _iso(job.created),
        "lastUpdatedAt": _iso(job.updated),
        "pollIntervalMs": POLL_INTERVAL_MS,
    }
    return without_none(task) | {"ttlMs": None}


def _iso(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


def completed(body: Json) -> CallToolResult:
    body = fit(body, RESULT_CHARACTERS)
    content = [TextContent(type="text", text=to_text(body))]
    return CallToolResult(content=[*content], structured_content=body)


def failed(error: FlashError) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)


# -- the kinds of tasks ----------------------------------------------------------------------------


async def _how_it_went(run: Run) -> Json:
    end = (await status(run.id)).model_dump(mode="json")
    return {"run": end["run"], "next": end["next"]}


async def _what_was_found(run: Run) -> Json:
    store = open_store()
    result = await run_sync(scores, store, run)
    near = await run_sync(store.near, run)
    shown = {} if result is None else {"scores": result.model_dump(mode="json")}
    return {"done": run.step, **shown, "next": next_of(RunReport(run=run, near=near))}


ENDINGS: dict[str, Callable[[Run], Awaitable[Json]]] = {
    "train": _how_it_went,
    "evaluate": _what_was_found,
}
"""Tools that start runs, and the fields that a success adds to their result or replaces."""


class Runs:
    """Runs started by a call. The run keeps the call's result until it is completed."""

    tools = frozenset(ENDINGS)

    async def begin(self, tool: str, result: Json) -> str | None:
        run_id = result.get("run_id")
        if run_id and await run_sync(self._begin, tool, run_id, result):
            return run_id
        return None

    def _begin(self, tool: str, run_id: str, result: Json) -> bool:
        store = open_store()
        kept = {"time": time.time(), "epoch": 0, "kind": "task", "message": tool, "result": result}
        store.put_event(run_id, "task", kept)
        return store.run(run_id).state in ACTIVE

    async def look(self, task_id: str) -> TaskState:
        run, tool, result = await run_sync(self._read, task_id)
        job = functools.partial(TaskState, created=run.created, updated=run.updated)
        if run.state in ACTIVE:
            blocked = await run_sync(obstacles, open_store(), run)
            at = f"{run.state}, step {run.step} of {run.steps or '?'}"
            return job("working", message=blocked[0] if blocked else at)
        if run.state == "cancelled":
            return job("cancelled", message=run.cancel_reason or None)
        if run.state == "failed" and run.error:
            return job("completed", result=failed(FlashError.from_dict(run.error)))
        ending = {"state": run.state, **await ENDINGS[tool](run)}
        return job("completed", result=completed(result | ending))

    def _read(self, task_id: str) -> tuple[Run, str, Json]:
        store = open_store()
        run = store.run(task_id)
        kept = store.events(task_id, 1, ["task"])
        if not kept:
            raise FlashError("unknown_run", "the run was not started as a task", run_id=task_id)
        return run, kept[0].message, kept[0].data["result"]

    async def cancel(self, task_id: str) -> None:
        store = open_store()
        await run_sync(queue.request_cancel, store, task_id)
        await run_sync(ensure_supervised, store)


class Deployments:
    """Deployments that were not ready when `deploy` had to return."""

    tools = frozenset({"deploy"})

    async def begin(self, tool: str, result: Json) -> str | None:
        if result["state"] == "starting":
            return result["deployment"]
        return None

    async def look(self, task_id: str) -> TaskState:
        row, result = await run_sync(self._read, task_id)
        job = functools.partial(TaskState, created=row.created, updated=row.updated)
        match row.state:
            case "starting":
                blocked = await run_sync(obstacle, open_store())
                return job("working", message=str(blocked or f"starting {row.model}"))
            case "ready":
                return job("completed", result=completed(result.model_dump(mode="json")))
            case "failed":
                return job("completed", result=failed(failure(row)))
            case _:
                return job("cancelled")

    def _read(self, task_id: str) -> tuple[Deployment, Deployed]:
        store = open_store()
        row = store.deployment(task_id)
        return row, describe(store, row)

    async def cancel(self, task_id: str) -> None:
        store = open_store()
        await run_sync(request_stop, store, task_id)
        await run_sync(ensure_supervised, store)
