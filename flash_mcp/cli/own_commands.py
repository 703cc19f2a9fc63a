"""Every command that is no tool. A command is a function of its parsed arguments; its docstring is
its help."""

from __future__ import annotations

import sys

from flash_mcp.cli import machine, run_commands, serving, targets, token_commands
from flash_mcp.cli.parsing import Arguments, Command, Group, Parser, add_own, commands_of, option
from flash_mcp.cli.tool_commands import add_tool


def completion(arguments: Arguments) -> None:
    """Print the script with which a shell completes commands and options.

    For bash, write it to ~/.local/share/bash-completion/completions/flash-mcp; for zsh, to
    _flash-mcp in a folder of $fpath."""
    import shtab  # noqa: PLC0415

    from flash_mcp.tools.registry import TOOLS  # noqa: PLC0415

    parser = Parser(prog="flash-mcp")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        add_own(commands, name, command)
    for tool in TOOLS.values():
        add_tool(commands, tool)
    # Values of tools are read as JSON, so argparse has no choices of them: their names in the
    # help are completed instead.
    for command in commands_of(parser):
        for action in command._actions:
            if action.choices is None and str(action.metavar).startswith("{"):
                action.choices = str(action.metavar).strip("{}").split(",")
    sys.stdout.write(shtab.complete(parser, arguments.shell))


COMMANDS: dict[str, Command | Group] = {
    **serving.COMMANDS,
    **token_commands.COMMANDS,
    **targets.COMMANDS,
    **run_commands.COMMANDS,
    **machine.COMMANDS,
    "completion": Command(
        completion,
        ("flash-mcp completion bash",),
        (option("shell", "bash, zsh or tcsh", choices=("bash", "zsh", "tcsh")),),
    ),
}
