"""Every tool as a command: its arguments are the options."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin

from flash_mcp.cli import follow
from flash_mcp.cli.output import say, visible
from flash_mcp.cli.parsing import JSON, Parser, add_command, example, toml_value
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import percent

if TYPE_CHECKING:
    from pydantic import BaseModel

    from flash_mcp.tools.shared.tool_base import Tool

TEST_EXIT = "Exits with 1 if a check failed, or had no time."
FILES = "@FILE in place of a text is that file's text; a text that begins with @ is written @@..."
VALUE_TABLES = ("environment_args", "mixture", "slurm")
"""Fields of a run whose value is a table."""
CLEAR_LINE = "\r\033[K"
METAVARS = {int: "INT", float: "NUMBER", str: "TEXT"}


def add_tool(commands: Any, tool: Tool) -> None:
    name = tool.name.replace("_", "-")
    aliases = [tool.name] if name != tool.name else []
    ending = f"{example(f'flash-mcp {tool.example or tool.name}')}\n\n{FILES}"
    if tool.name == "env_test":
        ending = f"{ending}\n{TEST_EXIT}"
    run = functools.partial(_run_tool, tool)
    parser = add_command(commands, name, tool.description, ending, run, aliases=aliases)
    parameters = tool.signature.parameters.values()
    required = tool.required
    words = [*(tool.words or required)]
    for parameter in parameters:
        _add_argument(parser, parameter, parameter.name in words)
    flag, settings = JSON
    parser.add_argument(flag, **settings)
    # Options of the command that the tool does not have
    if tool.name == "train":
        text = "another TOML file, whose fields win; may be repeated"
        parser.add_argument("--config", action="append", dest="files", metavar="FILE", help=text)
        text = "any field, as in the TOML file: --set steps=300 --set train.temperature=0.8"
        parser.add_argument(
            "--set", action="append", dest="assignments", metavar="FIELD=VALUE", help=text
        )
    if tool.name == "rollouts":
        for which, order in (("worst", "lowest"), ("best", "highest")):
            text = f"the N transcripts with the {order} reward"
            parser.add_argument(f"--{which}", type=int, metavar="N", help=text)
    if tool.name in ("train", "status", "evaluate"):
        text = "wait until the run has ended; Ctrl-C only detaches"
        parser.add_argument("--follow", action="store_true", help=text)
    parser.set_defaults(
        options=[_flag(item.name) for item in parameters],
        words=words,
        named=[item.replace("_", "-") for item in required if item not in words],
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_argument(parser: Parser, parameter: inspect.Parameter, positional: bool) -> None:
    text = _description(parameter).replace("%", "%%")
    kind = _bare(parameter.annotation)
    flag = _flag(parameter.name)
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    reader = _reader(kind)
    if not positional:
        parser.add_argument(flag, metavar=_metavar(kind), help=text, type=reader)
        return
    # It may be given by its flag too. Without SUPPRESS, the default of the one that is left out
    # would overwrite the other.
    parser.add_argument(
        parameter.name,
        metavar=parameter.name.upper(),
        nargs="?",
        default=argparse.SUPPRESS,
        help=text,
        type=reader,
    )
    hidden = argparse.SUPPRESS
    if parameter.name != "config":  # `add_tool` has that one
        parser.add_argument(flag, dest=parameter.name, default=hidden, help=hidden, type=reader)


def _description(parameter: inspect.Parameter) -> str:
    about = get_args(parameter.annotation)[1:]
    described = [item for item in about if getattr(item, "description", None)]
    if not described:
        return ""
    text = str(described[0].description)
    default = parameter.default
    if extra := described[0].json_schema_extra:  # of a field of RunSpec, whose own default is None
        default = extra["default"]
    if default in (None, "", parameter.empty):
        return text
    return f"{text} Default: {json.dumps(default)}."


def _metavar(kind: Any) -> str:
    if get_origin(kind) is typing.Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    if get_origin(kind) is list:
        item = _bare(get_args(kind)[0])
        if item is str or get_origin(item) is typing.Literal:
            return "A,B"
    return METAVARS.get(kind, "JSON")


def _bare(annotation: Any) -> Any:
    """The type without Annotated and `| None`."""
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    options = [option for option in get_args(annotation) if option is not type(None)]
    if len(options) == 1:
        return _bare(options[0])
    return annotation


def _reader(kind: Any) -> Callable[[str], Any]:
    """Reads an argument: text as `_text` does, all else as JSON; a list may have commas instead."""
    if kind is str:
        return _text

    def read(text: str) -> Any:
        if text is argparse.SUPPRESS:  # argparse also reads the default of an optional positional
            return text
        is_list = get_origin(kind) is list
        try:
            value = json.loads(text)
        except ValueError:
            if is_list:
                return text.split(",")
            return text
        if is_list and isinstance(value, str | int | float):
            return [text]  # a list of one, such as an answer that is a number
        return value

    return read


def _text(word: str) -> str:
    """Text stays text; `@FILE` is a file's text, and `@@` an @ at the beginning."""
    if not word.startswith("@"):
        return word
    if word.startswith("@@"):
        return word[1:]
    try:
        return Path(word[1:]).read_text()
    except (OSError, ValueError) as error:
        what = f"{error}; a text that begins with @ is written @{word}"
        raise argparse.ArgumentTypeError(what) from error


def _run_tool(tool: Tool, arguments: argparse.Namespace) -> int:
    from flash_mcp.cli.views import show  # noqa: PLC0415
    from flash_mcp.judgement import curve as drawing  # noqa: PLC0415
    from flash_mcp.tools.environments import EnvTest  # noqa: PLC0415
    from flash_mcp.tools.shared.tool_base import illustrations  # noqa: PLC0415

    curves = illustrations()
    try:
        result = call(tool, _given(tool, arguments))
    except KeyboardInterrupt:
        if not tool.read_only:
            sys.stderr.write(
                "\ndetached; what was started goes on. See: flash-mcp status, flash-mcp catalog\n"
            )
        raise
    if getattr(arguments, "follow", False):
        view = getattr(result, "run", None) or result
        run_id = cast("str | None", getattr(view, "run_id", None))
        if run_id is None:
            fix = "name a run: flash-mcp status RUN_ID --follow"
            raise FlashError("invalid_argument", "there is no one run to follow", fix=fix)
        # `stay`, one after the other, with each run that a call with seeds started; the worst exit
        # code
        from flash_mcp.state.store import open_store  # noqa: PLC0415

        store = open_store()
        run = store.run(run_id)
        runs = store.seed_runs(run) if run.seed_group else [run]
        codes: list[int] = []
        for run in runs:
            if len(runs) > 1:
                sys.stderr.write(f"seed {run.spec.seed}: {run.id}\n")
            codes.append(follow.stay(run.id, arguments.json))
            if codes[-1] == follow.INTERRUPTED:
                break
        return max(codes)
    show(result, arguments.json)
    if not arguments.json:
        for points in curves:
            say(drawing.terminal(points))
    # So that `flash-mcp env-test && flash-mcp train` does not go on.
    has_failed = isinstance(result, EnvTest) and (result.passed is False or result.unfinished)
    return int(bool(has_failed))


def _given(tool: Tool, arguments: argparse.Namespace) -> dict[str, Any]:
    values = vars(arguments)
    names = tool.signature.parameters
    chosen = {name: values[name] for name in names if values.get(name) is not None}
    if isinstance(chosen.get("config"), bool):
        word = json.dumps(chosen["config"])
        fix = "leave it out; --no- before a flag's name turns it off, as in --no-eval-before"
        raise FlashError("invalid_argument", f"{word} stands alone: a flag has no value", fix=fix)
    chosen = _assigned(chosen, values.get("assignments") or [])
    if files := values.get("files"):
        chosen["config"] = [*filter(None, [chosen.get("config")]), *files]
    for which in ("worst", "best"):
        if values.get(which) is not None:
            chosen |= {"which": which, "limit": values[which]}
    return chosen


def call(tool: Tool, arguments: dict[str, Any]) -> BaseModel:
    """Check the arguments and run the tool as the server does. FlashError for all foreseen."""
    from pydantic import ValidationError  # noqa: PLC0415

    from flash_mcp.protocol.spec import explain  # noqa: PLC0415
    from flash_mcp.tools.shared.tool_base import allow, check_arguments, listen  # noqa: PLC0415

    check_arguments(tool, arguments)
    if missing := [_flag(name) for name in tool.required if name not in arguments]:
        command = f"flash-mcp {tool.name.replace('_', '-')}"
        fix = f"for example: flash-mcp {tool.example or tool.name}; see {command} --help"
        raise FlashError("invalid_argument", f"{', '.join(missing)} is missing", fix=fix)
    try:
        checked = tool.arguments(**arguments)
    except ValidationError as error:
        fix = f"see flash-mcp {tool.name} --help"
        raise FlashError("invalid_argument", explain(error), fix=fix) from error
    values = {name: getattr(checked, name) for name in arguments}
    if not inspect.iscoroutinefunction(tool.function):
        return cast("BaseModel", tool.function(**values))

    async def run() -> BaseModel:
        listen(_show_progress)
        if tool.name == "env_test":
            allow(math.inf)  # what outlasts this process ends with it
        return cast("BaseModel", await tool.function(**values))

    return follow.run(run)


async def _show_progress(message: str, share: float | None) -> None:
    if not sys.stderr.isatty():
        return
    line = f"{visible(message)} {percent(share)}"
    sys.stderr.write(f"{CLEAR_LINE}{line.rstrip()}")
    if share == 1.0:
        sys.stderr.write(CLEAR_LINE)


def _assigned(values: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The values with `a.b=3` as {"b": 3}: tables only group fields, as in TOML, except those in
    VALUE_TABLES. Other values are text.
    """
    from flash_mcp.tools.shared.resolve import joined  # noqa: PLC0415

    for text in texts:
        name, equals, word = text.partition("=")
        if not equals:
            what = f"--set {text}: there is no '='"
            raise FlashError("invalid_argument", what, fix="write --set steps=300")
        *tables, field = name.strip().split(".")
        if tables and tables[0] not in VALUE_TABLES:
            tables = []
        fields = {field: toml_value(word)}
        for table in reversed(tables):
            fields = {table: fields}
        values = joined(values, fields)
    return values
