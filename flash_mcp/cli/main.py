"""The command line: serving, maintenance of this machine, looking at runs, and every tool as a
command.

Results go to stdout, everything else to stderr; with --json both are JSON. Exit codes: 0 done, 1
refused or failed, 2 wrong usage; with --follow, and of wait, 3 when the run failed, 4 when it was
cancelled and 5 when --timeout-s passed; 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import locale
import logging
import os
import sys
from collections.abc import Sequence

from environments import doors
from flash_mcp import __version__
from flash_mcp.cli import follow, machine, serving, targets
from flash_mcp.cli.output import VisibleFormatter, to_json, visible
from flash_mcp.cli.parsing import Command, Group, Parser, add_own, check_known, example
from flash_mcp.cli.tool_commands import add_tool
from flash_mcp.exam import commands as exam_commands
from flash_mcp.protocol.errors import FlashError, as_flash_error, did_you_mean

OWN: dict[str, Command | Group] = {
    **serving.COMMANDS,
    **targets.COMMANDS,
    **follow.COMMANDS,
    **machine.COMMANDS,
    **exam_commands.COMMANDS,
}
COMMANDS: dict[str, Command | Group] = doors.each("flash_mcp.commands", OWN)
"""Every command that is no tool: a function of its parsed arguments; its docstring is its help."""
WRONG_USAGE = ("invalid_argument", "unknown_argument")


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None and not sys.flags.utf8_mode and locale.getencoding().lower() != "utf-8":
        # Texts and names of files are UTF-8 whatever the locale, here and in every child process.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_utf8(words)
        parser = parser_for(words)
        arguments, rest = parser.parse_known_args(words)
    except FlashError as error:
        raise SystemExit(_report(error, words)) from None
    if "run" not in arguments:
        parser.print_help(sys.stderr)
        return 2
    try:
        check_known(arguments, rest)
        code = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(as_flash_error(" ".join(words[:1]), error), words)


def _check_utf8(words: Sequence[str]) -> None:
    """FlashError(invalid_argument) for a word that no file and no database of ours can store."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            what = f"{word!r} is not UTF-8"
            raise FlashError("invalid_argument", what, fix="write it in UTF-8") from error


def parser_for(arguments: Sequence[str]) -> Parser:
    parser = Parser(
        prog="flash-mcp",
        description="Train language models on your own hardware.",
        epilog=example("flash-mcp doctor", "flash-mcp demo", "flash-mcp train --help"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flash-mcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        add_own(commands, name, command)
    requested = next((word for word in arguments if not word.startswith("-")), None)
    if requested not in COMMANDS:
        # Loading the tools takes half a second, which the server need not spend twice.
        from flash_mcp.tools.registry import TOOLS  # noqa: PLC0415

        for tool in TOOLS.values():
            add_tool(commands, tool)
    existing = list(commands.choices)
    if requested is not None and requested not in existing:
        what = f"there is no command {requested!r}{did_you_mean(requested, existing)}"
        raise FlashError("unknown_argument", what, fix="see flash-mcp --help")
    return parser


def _report(error: FlashError, arguments: Sequence[str]) -> int:
    text = str(error)
    if "--json" in arguments:
        text = to_json({"error": error.to_dict()}, default=str)
    sys.stderr.write(f"{visible(text)}\n")
    if error.code in WRONG_USAGE:
        return 2
    return 1
