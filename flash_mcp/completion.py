"""Completions for the addresses of resources: run ids, and the steps of a run that have rollouts."""

from __future__ import annotations

import contextlib

import anyio.to_thread
from mcp.server import MCPServer
from mcp_types import Completion, CompletionArgument, CompletionContext, PromptReference, ResourceTemplateReference

from flash_mcp.errors import FlashError
from flash_mcp.store import open_store

LIMIT = 100
"""The most that the protocol allows in one answer."""


def add_completion(server: MCPServer) -> None:
    @server.completion()
    async def complete(  # pyright: ignore[reportUnusedFunction]
        ref: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion:
        run_id = ((context.arguments if context else None) or {}).get("run_id", "")
        found = await anyio.to_thread.run_sync(_values, argument.name, run_id)
        matching = [value for value in found if value.startswith(argument.value)]
        return Completion(values=matching[:LIMIT], total=len(matching), has_more=len(matching) > LIMIT)


def _values(name: str, run_id: str) -> list[str]:
    store = open_store()
    if name == "run_id":
        return [run["id"] for run in store.runs(limit=1000)]
    if name == "step":
        with contextlib.suppress(FlashError):  # a run that does not exist has no steps
            return [str(step) for step in store.rollout_steps(store.run(run_id)["id"])]
    return []
