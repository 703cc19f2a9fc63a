"""What every tool has: a typed function with annotations, and a result that ends with `next`.

Functions are sync (they run on a thread) or async (blocking work goes through anyio.to_thread). The
`Args:` of their docstrings describe the arguments. Every anticipated failure is a FlashError. The
server and the command line are both built on `registry.TOOLS`. Nothing here imports the MCP SDK."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
)

from flash_mcp.protocol.errors import MOST_PATH_BYTES, FlashError, did_you_mean
from flash_mcp.protocol.records import without_none
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.protocol.spec import OTHER_NAMES
from flash_mcp.tools.shared.truncation import unwrapped

if TYPE_CHECKING:
    from flash_mcp.judgement.curve import Curve

CALL_TIMEOUT_S = 45.0
MOST_NAMES = 8
"""How many of the names that a tool lacks an error shows."""
OTHER_ARGUMENTS = {
    **dict.fromkeys(
        (
            "n", "k", "num", "count", "top", "size", "max", "amount", "examples", "max_count",
            "max_examples", "max_items", "max_results", "max_rows", "max_tasks", "n_examples",
            "num_examples", "num_results", "num_samples", "num_tasks", "page_size", "per_page",
            "sample_size", "tasks",
        ),
        "limit",
    ),
    **dict.fromkeys(("after", "offset", "page", "page_token", "skip", "start"), "cursor"),
    **dict.fromkeys(("find", "grep", "pattern", "q", "query", "search", "text"), "contains"),
    **dict.fromkeys(("order", "order_by", "sort", "sort_by"), "which"),
    **dict.fromkeys(("id", "run", "job", "job_id"), "run_id"),
    **dict.fromkeys(("max_chars", "max_length", "characters"), "max_characters"),
    **dict.fromkeys(("dir", "directory", "path"), "folder"),
}  # fmt: skip
"""What other tools call arguments of ours."""
ROWS = ("dataset", "question", "answer")
MAKES_TASKS = "; env_setup(dataset=..., question=..., answer=...) makes an environment of rows"
TAKES_ROWS = "; runs=['rows.csv'] takes a file of rows"
"""What is said of ROWS to a tool without them."""
ANSWER_S = 2.0
"""What a call that waited needs to answer."""
ARGUMENTS = "\n\nArgs:\n"
CURSOR = re.compile(r"[0-9]{1,18}")
LONG_TEXTS = ("message", "system_prompt", "note", "reason", "filter", "server")
"""Arguments whose texts are no names, ids or paths."""
MOST_CHARACTERS = MOST_PATH_BYTES
ARGUMENT = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
""""    name: text" and the more deeply indented lines that continue it."""


class Result(ResultModel):
    """What a tool returns. `next` is sent last."""

    next: str
    """What to do next: the tool to call, or what to check."""
    cut: str | None = None
    """What was omitted to keep this result short."""

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = without_none(handler(self))
        last = {name: fields.pop(name) for name in ("cut", "next") if name in fields}
        return fields | last


@dataclass(frozen=True)
class Tool:
    """A tool function, and what a client should know before it calls it.

    `example`: what follows `flash-mcp` in its help. `words`: arguments that read better without
    their names, by default the required ones. `read_only`: changes nothing. `destructive`: may undo
    or delete. `idempotent`: calling again changes nothing more. `open_world`: reaches beyond this
    machine's state, for example to a model hub. `changes_with`: the arguments without which it
    changes nothing. `unlisted`: arguments that it accepts and its schema leaves out: its
    description, or another argument, names them."""

    function: Callable[..., Any]
    _: KW_ONLY
    title: str
    example: str = ""
    words: tuple[str, ...] = ()
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False
    changes_with: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    def is_reading(self, arguments: dict[str, Any]) -> bool:
        if self.changes_with:
            return not any(map(arguments.get, self.changes_with))
        return self.read_only

    @property
    def name(self) -> str:
        return self.function.__name__

    def __post_init__(self) -> None:
        # Move the `Args:` of the docstring into the annotations, where pydantic finds them
        _, _, section = (inspect.getdoc(self.function) or "").partition(ARGUMENTS)
        described = {name: unwrapped(text) for name, text in ARGUMENT.findall(section)}
        signature = inspect.signature(self.function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            annotation = parameter.annotation
            if name in described:
                annotation = Annotated[annotation, Field(description=described[name])]
            parameters.append(parameter.replace(annotation=annotation))
        signature = signature.replace(parameters=parameters)
        self.function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        returned = {"return": signature.return_annotation}
        self.function.__annotations__ = {
            item.name: item.annotation for item in parameters
        } | returned

    @property
    def description(self) -> str:
        return unwrapped((inspect.getdoc(self.function) or "").partition(ARGUMENTS)[0])

    @property
    def required(self) -> list[str]:
        parameters = self.signature.parameters.values()
        return [parameter.name for parameter in parameters if parameter.default is parameter.empty]

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function, eval_str=True)

    @cached_property
    def arguments(self) -> type[BaseModel]:
        fields: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            default = parameter.default
            if default is parameter.empty:
                default = ...
            fields[name] = (parameter.annotation, default)
        return create_model(
            f"{self.name}_arguments", __config__=ConfigDict(extra="forbid"), **fields
        )


def check_arguments(tool: Tool, arguments: dict[str, Any]) -> None:
    """FlashError(unknown_argument) for an argument that `tool` lacks, with the nearest name, and
    FlashError(invalid_argument) for values that no part of flash-mcp can keep.
    """
    for name, value in arguments.items():
        if why := _cannot_be_kept(value, MOST_CHARACTERS if name not in LONG_TEXTS else None):
            fix = "pass another value"
            raise FlashError("invalid_argument", f"{name:.100}: {why}; nothing was done", fix=fix)
    accepted = list(tool.signature.parameters)
    unknown = [name for name in arguments if name not in accepted]
    if not unknown:
        return
    also = OTHER_NAMES | OTHER_ARGUMENTS
    names = {other: name for other, name in also.items() if name in accepted}
    guesses = ""
    shown = unknown[:MOST_NAMES]
    for name in shown:
        meant = also.get(name, name)
        if meant in ROWS and meant not in accepted:
            guesses = MAKES_TASKS if "runs" not in accepted else TAKES_ROWS
        elif guess := did_you_mean(name, accepted, count=1, also=names):
            guesses += guess if len(unknown) == 1 else guess.replace("?", f" for {name!r}?")
    named = ", ".join(f"{name!r:.100}" for name in shown)
    if more := len(unknown) - len(shown):
        named += f" and {more:,} more"
    what = f"{tool.name} has no argument {named}; nothing was done{guesses}"
    fix = f"{tool.name} accepts: {', '.join(accepted) or 'no arguments'}"
    raise FlashError("unknown_argument", what, argument=unknown[0], fix=fix)


def _cannot_be_kept(value: Any, most: int | None = None) -> str:
    """Why neither the database nor a file name nor a float keeps the value; empty if they do."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [
                *cast("dict[Any, Any]", item).keys(),
                *cast("dict[Any, Any]", item).values(),
            ]
        elif isinstance(item, list):
            waiting += cast("list[Any]", item)
        elif isinstance(item, int) and not -(2**63) <= item < 2**63:
            return f"a whole number has at most 64 bits, and this one has {item.bit_length():,}"
        elif isinstance(item, float) and item and not (sys.float_info.min <= abs(item) < math.inf):
            return f"{item:g} is no number, or too close to 0"
        elif isinstance(item, str) and "\0" in item:
            return "a text holds a NUL character"
    if most and isinstance(value, str) and len(value) > most:
        return f"it has {len(value):,} characters; the most are {most:,}"
    return ""


_timeout_s: ContextVar[float] = ContextVar("timeout_s", default=CALL_TIMEOUT_S)


def allow(seconds: float) -> None:
    """Let the call of this context take so long: its client waits longer than others."""
    _timeout_s.set(seconds)


def longest_wait_s() -> float:
    """How long the call of this context may wait before it answers."""
    return _timeout_s.get() - ANSWER_S


Progress = Callable[[str, float | None], Awaitable[None]]
_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)


async def report(message: str, share: float | None = None) -> None:
    """Send progress of a long call to its client, if the client listens; `share` is in 0..1."""
    if listener := _progress.get():
        await listener(message, share)


def listen(listener: Progress) -> None:
    _progress.set(listener)


_illustrations: ContextVar[list[Curve] | None] = ContextVar("illustrations", default=None)


def illustrate(curve: Curve) -> None:
    """Add a curve to the result as a picture. It shows nothing that the result lacks."""
    if (kept := _illustrations.get()) is not None:
        kept.append(curve)


def illustrations() -> list[Curve]:
    """A new list that collects the curves of the next call in this context."""
    kept: list[Curve] = []
    _illustrations.set(kept)
    return kept


RunId = Annotated[str, Field(min_length=1, description="Run id.")]


def page_offset(cursor: str | None, tool: str) -> int:
    """The number in a cursor of `tool`; 0 without one."""
    if cursor is not None and not CURSOR.fullmatch(cursor):
        raise no_cursor(cursor, tool)
    return int(cursor or 0)


def no_cursor(cursor: str | None, tool: str) -> FlashError:
    fix = "pass it unchanged, or leave it out"
    return FlashError("invalid_argument", f"that is no cursor of {tool}", cursor=cursor, fix=fix)
