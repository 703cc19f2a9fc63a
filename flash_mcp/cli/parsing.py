"""What all commands share: how their help looks, and how a wrong call is reported.

Built on argparse: pydantic-settings adds 0.1 seconds to every start, and has no near misses, no
option that may also be given by position, and no @FILE. click has no help for what is given by
position, and its decorators are as long as the tables of commands."""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.tools.shared.truncation import unwrapped

HELP_WIDTH = 100
Arguments = argparse.Namespace
Run = Callable[[Arguments], int | None]
Option = tuple[str, dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises FlashError for a wrong call."""

    def error(self, message: str) -> NoReturn:
        raise FlashError("invalid_argument", message, fix=f"see {self.prog} --help")


@dataclass(frozen=True)
class Command:
    """`run` takes the parsed arguments. At most one option of `exclusive` may be given."""

    run: Run
    examples: tuple[str, ...]
    options: tuple[Option, ...] = ()
    exclusive: tuple[Option, ...] = ()


@dataclass(frozen=True)
class Group:
    """A command with sub-commands."""

    text: str
    examples: tuple[str, ...]
    actions: dict[str, Command]


def option(name: str, text: str, metavar: str | None = None, **settings: Any) -> Option:
    return name, {"help": text, "metavar": metavar, **settings}


def flag(name: str, text: str, **settings: Any) -> Option:
    return name, {"help": text, "action": "store_true", **settings}


def repeated(name: str, text: str, metavar: str) -> Option:
    return option(name, f"{text}; may be repeated", metavar, action="append", default=[])


JSON = flag("--json", "print the result as JSON")
RUN_ID = option("run_id", "run id, as returned by train", "RUN_ID")


def add_command(
    commands: Any, name: str, text: str, examples: str, run: Run | None, **settings: Any
) -> Parser:
    """A command. `text` is its description; the list of commands shows the first sentence."""
    paragraphs = unwrapped(text).split("\n\n")
    first = paragraphs[0].split(". ")[0].removesuffix(".")
    folded = "\n\n".join(textwrap.fill(paragraph, HELP_WIDTH) for paragraph in paragraphs)
    parser: Parser = commands.add_parser(
        name,
        help=_literal(first),
        description=_literal(folded),
        epilog=_literal(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **settings,
    )
    parser.set_defaults(run=run, command=parser.prog.partition(" ")[2])
    return parser


def add_own(commands: Any, name: str, command: Command | Group) -> None:
    if isinstance(command, Group):
        parser = add_command(commands, name, command.text, example(*command.examples), None)
        actions = parser.add_subparsers(metavar="ACTION", required=True)
        for action, item in command.actions.items():
            add_own(actions, action, item)
        return
    text = command.run.__doc__ or ""
    parser = add_command(commands, name, text, example(*command.examples), command.run)
    if command.exclusive:
        group = parser.add_mutually_exclusive_group()
        for name, settings in command.exclusive:
            group.add_argument(name, **settings)
    for name, settings in command.options:
        parser.add_argument(name, **settings)
    names = [name for name, _ in (*command.exclusive, *command.options)]
    options = [name for name in names if name.startswith("-")]
    words = [name for name in names if not name.startswith("-")]
    parser.set_defaults(options=options, words=words, named=[])


def example(*lines: str) -> str:
    """The end of a command's help: calls that work."""
    return "\n".join(["Example:", *(f"  {line}" for line in lines)])


def check_known(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    """FlashError(unknown_argument) where the command does not take `rest`."""
    if not rest:
        return
    command: str = arguments.command
    option = rest[0].partition("=")[0]
    if option.startswith("-"):
        # The dashes that all options share are likeness too.
        near = did_you_mean(option, arguments.options, count=1, likeness=0.55)
        what = f"there is no {option}{near}"
        raise FlashError("unknown_argument", what, fix=f"see flash-mcp {command} --help")
    takes = ", ".join(f"one {name.upper()}" for name in arguments.words) or "options only"
    named = "".join(f"; the {name} is --{name}" for name in arguments.named)
    what = f"{option!r} is a word too many: {command} takes {takes}{named}"
    fix = f"give it by its option, a list as A,B; see flash-mcp {command} --help"
    raise FlashError("unknown_argument", what, fix=fix)


def toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _literal(text: str) -> str:
    return text.replace("%", "%%")
