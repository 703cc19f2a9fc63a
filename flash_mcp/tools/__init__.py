"""The frame of every tool: a typed function, its annotations, and a result model that ends with what to do next.

    def checkpoints(run_id: Annotated[str, Field(description="...")]) -> Checkpoints:
        \"\"\"What the tool does, for an agent to read. Use `status` for a run's progress.\"\"\"

    TOOLS = [Tool(checkpoints, title="List checkpoints", read_only=True)]

Functions may be sync (they run on a thread) or async (blocking work goes through anyio.to_thread). Every failure that
they foresee is a FlashError. server.py and cli.py both build on `all_tools()`; nothing here imports the MCP SDK.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    field_validator,
    model_serializer,
)

from flash_mcp.errors import FlashError, encodable

if TYPE_CHECKING:
    from flash_mcp.curve import Curve

CALL_TIMEOUT_S = 45.0
RESULT_CHARACTERS = 8_000
MODULES = ("catalog", "environments", "runs", "status", "rollouts", "evaluation", "curation", "serving")


class Part(BaseModel):
    """A piece of a result. Fields that are None are left out of what is sent."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        return encodable(value)  # environments and files of others may hold what has no UTF-8 form

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = cast("dict[str, Any]", handler(self))
        return {
            name: value for name, value in fields.items() if value is not None or name not in type(self).model_fields
        }


class Result(Part):
    """What a tool returns. `next` is sent last."""

    next: str = Field(description="What to do next: the tool to call, or what to look at.")
    cut: str | None = Field(default=None, description="What was left out to keep this result short.")

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = {name: value for name, value in cast("dict[str, Any]", handler(self)).items() if value is not None}
        last = {name: fields.pop(name) for name in ("cut", "next") if name in fields}
        return fields | last


@dataclass(frozen=True)
class Tool:
    """A tool function with what a client should know before it calls.

    `read_only`: changes nothing. `destructive`: may undo or delete. `idempotent`: calling again changes nothing more.
    `open_world`: reaches beyond this machine's state, for instance to a model hub.
    """

    function: Callable[..., Any]
    _: KW_ONLY
    title: str
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def description(self) -> str:
        return inspect.getdoc(self.function) or ""

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function, eval_str=True)

    @cached_property
    def arguments(self) -> type[BaseModel]:
        """The arguments as a pydantic model, in the function's order."""
        fields: dict[str, Any] = {
            name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
            for name, parameter in self.signature.parameters.items()
        }
        return create_model(f"{self.name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)


@cache
def all_tools() -> dict[str, Tool]:
    """Every tool by name, in the order in which an agent meets them."""
    modules = [importlib.import_module(f"{__name__}.{module}") for module in MODULES]
    tools = [tool for module in modules for tool in cast("list[Tool]", module.TOOLS)]
    return {tool.name: tool for tool in tools}


def check_arguments(tool: Tool, arguments: dict[str, Any]) -> None:
    """FlashError(unknown_argument) naming the nearest accepted one, where `tool` lacks one of `arguments`."""
    accepted = list(tool.signature.parameters)
    unknown = [name for name in arguments if name not in accepted]
    if not unknown:
        return
    guesses = [f"{name!r}{_did_you_mean(name, accepted)}" for name in unknown]
    raise FlashError(
        "unknown_argument",
        f"{tool.name} has no argument {', '.join(guesses)}; nothing was done",
        argument=unknown[0],
        fix=f"{tool.name} accepts: {', '.join(accepted) or 'no arguments'}",
    )


def _did_you_mean(name: str, accepted: list[str]) -> str:
    near = nearest(name, accepted, count=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


Progress = Callable[[str, float | None], Awaitable[None]]
_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)


async def report(message: str, share: float | None = None) -> None:
    """Tell the caller how far a long call has come; `share` is in 0..1. Does nothing where nobody listens."""
    if listener := _progress.get():
        await listener(message, share)


def listen(listener: Progress) -> None:
    """Make `listener` the one whom `report` tells, for the calls of this context."""
    _progress.set(listener)


_illustrations: ContextVar[list[Curve] | None] = ContextVar("illustrations", default=None)


def illustrate(curve: Curve) -> None:
    """Have a curve shown beside the result, by callers that can. It says nothing that the result does not."""
    if (kept := _illustrations.get()) is not None:
        kept.append(curve)


def illustrations() -> list[Curve]:
    """The list, empty as yet, of what the call that is about to be made in this context illustrates."""
    kept: list[Curve] = []
    _illustrations.set(kept)
    return kept


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; empty where nothing resembles it."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)


def to_text(body: Any) -> str:
    """Compact JSON, as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def utc(moment: float) -> str:
    """A time of time.time(), to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(moment))


def shorten(text: str, limit: int) -> str:
    """`text` within `limit` characters: its two ends, and between them how much was cut."""
    if len(text) <= limit:
        return text
    kept = max(limit - 40, 20)
    head = kept * 2 // 3
    return f"{text[:head]} …[{len(text) - kept} characters cut]… {text[len(text) - (kept - head) :]}"


def fit(body: dict[str, Any], limit: int) -> dict[str, Any]:
    """`body` as JSON within `limit` characters: the last guard, for tools that misjudged what they return.

    Shortens the longest text or list, again and again, and says so under `cut`.
    """
    if len(to_text(body)) <= limit:
        return body
    body = cast("dict[str, Any]", json.loads(to_text(body)))
    note = "this result was too long: long texts and lists were shortened; narrow the call, or use its cursor"
    next_step = body.pop("next", None)
    body["cut"] = f"{body['cut']}; {note}" if body.get("cut") else note
    body |= {} if next_step is None else {"next": next_step}
    while len(to_text(body)) > limit and (candidates := list(_cuttable(body))):
        _, _, holder, key = max(candidates, key=lambda candidate: candidate[:2])
        value = holder[key]
        holder[key] = shorten(value, len(value) // 2) if isinstance(value, str) else value[: len(value) // 2]
    return body


def _cuttable(holder: Any) -> Iterable[tuple[bool, int, Any, Any]]:
    """(is plain, size, container, key) of every long text and list. Lists of objects go last: they hold the answer."""
    items: Iterable[tuple[Any, Any]] = (
        cast("dict[str, Any]", holder).items() if isinstance(holder, dict) else enumerate(cast("list[Any]", holder))
    )
    for key, value in items:
        size = len(to_text(value))
        if isinstance(value, list):
            nested = any(isinstance(item, (dict, list)) for item in cast("list[Any]", value))
            if len(cast("list[Any]", value)) > 1 and (nested or size > 100):
                yield not nested, size, holder, key
        elif isinstance(value, str) and size > 100:
            yield True, size, holder, key
        if isinstance(value, (dict, list)):
            yield from _cuttable(value)
