"""`flash-mcp exam`: for the operator alone. No tool of an agent does any of it."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

from flash_mcp.cli.output import answer
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, option, repeated
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home


def _passphrase(*, again: bool = False) -> str:
    """Typed, or the first line of stdin."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    text = getpass.getpass("Passphrase: ")
    if again and text != getpass.getpass("The same again: "):
        raise FlashError("invalid_argument", "the two passphrases differ", fix="try again")
    return text


def create(arguments: Arguments) -> None:
    """Seal an environment's folder as an exam that agents may take and never see.

    Agents call evaluate(environment="exam:NAME") and learn totals. The folder is encrypted with a
    passphrase, which is asked for, or with the key in --key-file. Keep the folder itself where no
    agent reads it."""
    from flash_mcp.exam import exams  # noqa: PLC0415

    passphrase = None if arguments.key_file else _passphrase(again=True)
    exam = exams.create(
        home(),
        arguments.name,
        Path(arguments.folder),
        looks=arguments.looks,
        owners=arguments.owner,
        passphrase=passphrase,
        key_file=Path(arguments.key_file) if arguments.key_file else None,
    )
    body = {"exam": f"exam:{exam.name}", "tasks": exam.tasks, "looks": exam.looks}
    answer(arguments, {**body, "tasks_per_look": exam.per_look, "key_file": exam.key_file})


def list_exams(arguments: Arguments) -> None:
    """List exams: their tasks, looks and owners."""
    from flash_mcp.exam import exams  # noqa: PLC0415

    rows = [
        {
            "exam": f"exam:{exam.name}",
            "tasks": exam.tasks,
            "looks": exam.looks,
            "owners": ", ".join(exam.owners) or "all",
            "key": exam.key_file or "passphrase",
        }
        for exam in exams.exams(home())
    ]
    answer(arguments, {"exams": rows})


def remove(arguments: Arguments) -> None:
    """Delete an exam with its sealed files. Runs that took it keep their totals."""
    from flash_mcp.exam import exams  # noqa: PLC0415

    exams.remove(home(), arguments.name)
    answer(arguments, {"removed": arguments.name})


def unlock(arguments: Arguments) -> None:
    """Hand an exam's passphrase to the supervisor, so that agents may take the exam.

    The key stays in its memory until `flash-mcp exam lock` or the end of the supervisor. An exam
    with a key file needs none of this."""
    from flash_mcp.exam import exams  # noqa: PLC0415

    exams.unlock(home(), arguments.name, _passphrase())
    answer(arguments, {"unlocked": arguments.name})


def lock(arguments: Arguments) -> None:
    """Let the supervisor forget an exam's key."""
    from flash_mcp.exam import exams  # noqa: PLC0415

    exams.lock(home(), arguments.name)
    answer(arguments, {"locked": arguments.name})


NAME = option("name", "the exam's name, without exam:", "NAME")
COMMANDS: dict[str, Command | Group] = {
    "exam": Group(
        "Make, list and remove exams that agents take and never see.",
        ("flash-mcp exam create sums ./sums --looks 5", "flash-mcp exam list"),
        {
            "create": Command(
                create,
                ("flash-mcp exam create sums ./sums --looks 5 --key-file ../sums.exam-key",),
                (
                    NAME,
                    option("folder", "the folder with environment.py", "FOLDER"),
                    option(
                        "--looks",
                        "how often each owner may look (default: 5)",
                        "N",
                        type=int,
                        default=5,
                    ),
                    repeated("--owner", "who may look (default: all)", "NAME"),
                    option("--key-file", "write a random key there, and use no passphrase", "FILE"),
                    JSON,
                ),
            ),
            "list": Command(list_exams, ("flash-mcp exam list",), (JSON,)),
            "unlock": Command(unlock, ("flash-mcp exam unlock sums",), (NAME, JSON)),
            "lock": Command(lock, ("flash-mcp exam lock sums",), (NAME, JSON)),
            "remove": Command(remove, ("flash-mcp exam remove sums",), (NAME, JSON)),
        },
    )
}
