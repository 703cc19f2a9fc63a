"""Every tool as a command: its arguments are the options."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin

from flash_mcp.cli.output import say, show, visible
from flash_mcp.protocol.errors import FlashError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from flash_mcp.tools.shared.frame import Tool


POSITIONAL = {
    "chat": "message",
    "env_push": "folder",
    "env_test": "folder",
    "evaluate": "environment",
    "status": "run_id",
    "train": "config",
    "undeploy": "deployment",
}
"""The argument that reads better without its name; for other tools the one that they cannot do
without.
"""


HELP_WIDTH = 100


def add_tool(commands: Any, tool: Tool) -> None:
    summary = " ".join(tool.description.split("\n\n")[0].split())
    command = tool.name.replace("_", "-")
    aliases = [tool.name] if command != tool.name else []
    parser = commands.add_parser(
        command,
        aliases=aliases,
        help=summary.split(". ")[0].replace("%", "%%"),
        description=filled(tool.description).replace("%", "%%"),
        epilog="@FILE in place of a text is that file's text; a text that begins with @ is written @@...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for parameter in tool.signature.parameters.values():
        _add_argument(parser, tool.name, parameter)
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print the result as JSON"
    )
    if tool.name == "train":
        text = "any field, as in the TOML file: --set steps=300 --set train.temperature=0.8"
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            dest="assignments",
            metavar="FIELD=VALUE",
            help=text,
        )
    if tool.name == "rollouts":
        for which in ("worst", "best"):
            text = (
                f"the N transcripts with the {'lowest' if which == 'worst' else 'highest'} reward"
            )
            parser.add_argument(f"--{which}", type=int, default=None, metavar="N", help=text)
    if tool.name in ("train", "status", "evaluate"):
        parser.add_argument(
            "--follow",
            action="store_true",
            help="stay until the run has ended; Ctrl-C only detaches",
        )
    options = [f"--{name.replace('_', '-')}" for name in tool.signature.parameters]
    required = [
        name for name, each in tool.signature.parameters.items() if each.default is each.empty
    ]
    words = [POSITIONAL[tool.name]] if tool.name in POSITIONAL else required
    named = [name.replace("_", "-") for name in required if name not in words]
    parser.set_defaults(
        run=functools.partial(_run_tool, tool), options=options, words=words, named=named
    )


def _add_argument(parser: argparse.ArgumentParser, tool: str, parameter: inspect.Parameter) -> None:
    text = _description(parameter.annotation).replace("%", "%%")
    kind = _bare(parameter.annotation)
    flag = f"--{parameter.name.replace('_', '-')}"
    required = parameter.name if parameter.default is parameter.empty else None
    if POSITIONAL.get(tool, required) == parameter.name:
        # Either way of giving it is right: the flag stands for those who are used to it from the
        # tool's argument.
        metavar, reader = parameter.name.upper(), _reader(kind)
        parser.add_argument(
            parameter.name,
            metavar=metavar,
            nargs="?",
            default=argparse.SUPPRESS,
            help=text,
            type=reader,
        )
        parser.add_argument(
            flag,
            default=argparse.SUPPRESS,
            dest=parameter.name,
            help=argparse.SUPPRESS,
            type=reader,
        )
    elif kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        parser.add_argument(flag, default=None, metavar="VALUE", help=text, type=_reader(kind))


def _description(annotation: Any) -> str:
    fields = [item for item in get_args(annotation)[1:] if getattr(item, "description", None)]
    if not fields:
        return ""
    text = str(fields[0].description)
    shown: Any = fields[0].json_schema_extra  # of an argument that itself has no default
    return f"{text} Default: {json.dumps(shown['default'])}." if shown else text


def _bare(annotation: Any) -> Any:
    """The type without Annotated and `| None`."""
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (types.UnionType, typing.Union):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return _bare(options[0]) if len(options) == 1 else annotation
    return annotation


def _reader(kind: Any) -> Callable[[str], Any]:
    """Text is read by `_text`; all else is JSON, and a list may be written with commas."""
    if kind is str:
        return _text

    def read(text: str) -> Any:
        if text is argparse.SUPPRESS:  # argparse reads the default of an optional positional, too
            return text
        try:
            return json.loads(text)
        except ValueError:
            return text.split(",") if get_origin(kind) is list else text

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
        raise argparse.ArgumentTypeError(
            f"{error}; a text that begins with @ is written @{word}"
        ) from error


def _run_tool(tool: Tool, arguments: argparse.Namespace) -> int:
    from flash_mcp.judgement import curve as drawing  # noqa: PLC0415
    from flash_mcp.tools.shared.frame import illustrations  # noqa: PLC0415

    names = list(tool.signature.parameters)
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    given |= _assignments(getattr(arguments, "assignments", []))
    for which in ("worst", "best"):
        if (count := getattr(arguments, which, None)) is not None:
            given |= {"which": which, "limit": count}
    curves = illustrations()
    try:
        result = call(tool, given)
    except KeyboardInterrupt:
        if not tool.read_only:
            sys.stderr.write(
                "\nleft; what was started goes on. See: flash-mcp status, flash-mcp catalog\n"
            )
        raise
    follow, run_id = getattr(arguments, "follow", False), _run_of(result)
    if follow and run_id is None:
        fix = "name a run: flash-mcp status RUN_ID --follow"
        raise FlashError("invalid_argument", "there is no one run to follow", fix=fix)
    if follow and run_id:
        return stay(run_id, arguments.as_json)
    show(result, arguments.as_json)
    for points in [] if arguments.as_json else curves:
        say(drawing.terminal(points))
    return 0


def stay(run_id: str, as_json: bool, **options: Any) -> int:
    from flash_mcp.cli.follow import until_ended  # noqa: PLC0415

    code, report = until_ended(run_id, **options)
    if report is not None:
        show(report, as_json)
    return code


def call(tool: Tool, given: dict[str, Any]) -> BaseModel:
    """Check the arguments and run the tool, as the server does. FlashError for every failure that
    was foreseen.
    """
    from pydantic import ValidationError  # noqa: PLC0415

    from flash_mcp.cli import follow  # noqa: PLC0415
    from flash_mcp.protocol.spec import explain  # noqa: PLC0415
    from flash_mcp.tools.shared.frame import check_arguments, listen  # noqa: PLC0415

    check_arguments(tool, given)
    try:
        checked = tool.arguments(**given)
    except ValidationError as error:
        raise FlashError(
            "invalid_argument", explain(error), fix=f"see flash-mcp {tool.name} --help"
        ) from error
    values = {name: getattr(checked, name) for name in given}
    if not inspect.iscoroutinefunction(tool.function):
        return cast("BaseModel", tool.function(**values))

    async def run() -> BaseModel:
        listen(_tell)
        return cast("BaseModel", await tool.function(**values))

    return follow.run(run)


async def _tell(message: str, share: float | None) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(
            f"\r\033[K{visible(message)}" + (f" {share:.0%}" if share is not None else "")
        )
        sys.stderr.write("\r\033[K" if share == 1.0 else "")


def _assignments(texts: Sequence[str]) -> dict[str, Any]:
    """`a.b=3` as {"b": 3}: tables only group fields, as in the TOML file. A value that is no TOML
    is text.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise FlashError(
                "invalid_argument", f"--set {text}: there is no '='", fix="write --set steps=300"
            )
        try:
            found[name.strip().rpartition(".")[2]] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.strip().rpartition(".")[2]] = value
    return found


def _run_of(result: BaseModel) -> str | None:
    view = getattr(result, "run", None) or result
    return cast("str | None", getattr(view, "run_id", None))


def filled(text: str) -> str:
    """`text` with its paragraphs broken into lines of HELP_WIDTH."""
    return "\n\n".join(textwrap.fill(paragraph, HELP_WIDTH) for paragraph in text.split("\n\n"))
