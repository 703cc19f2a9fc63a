"""`flash-mcp exam`: for the operator alone. No tool of an agent does any of it."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from types import ModuleType

from flash_mcp.cli.output import answer, say
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, option, repeated
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.state.store import open_store


def _exams() -> ModuleType:
    """Loaded late: no other command has to wait for it."""
    from flash_mcp.exam import exams  # noqa: PLC0415

    return exams


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
    exam = _exams().create(
        home(),
        arguments.name,
        Path(arguments.folder),
        looks=arguments.looks,
        owners=arguments.owner,
        passphrase=None if arguments.key_file else _passphrase(again=True),
        key_file=arguments.key_file and Path(arguments.key_file),
    )
    answer(arguments, _shown(exam))


def _shown(exam: object) -> dict[str, object]:
    fields = dict(vars(exam))
    del fields["order"], fields["salt"]
    return {**fields, "key_file": fields["key_file"] or "a passphrase"}


def list_exams(arguments: Arguments) -> None:
    """List exams: their tasks, looks and owners."""
    answer(arguments, {"exams": [_shown(exam) for exam in _exams().exams(home())]})


def show(arguments: Arguments) -> None:
    """Show every look of every owner at an exam, or the transcripts of one with --transcripts."""
    from flash_mcp.exam import looks  # noqa: PLC0415

    exam = _exams().find_exam(home(), arguments.name)
    if arguments.transcripts:
        key = exam.key(None if exam.key_file else _passphrase())
        say(json.dumps(looks.transcripts(open_store().run(arguments.transcripts), key)))
        return
    answer(arguments, {**_shown(exam), "taken": looks.results(open_store(), exam)})


def remove(arguments: Arguments) -> None:
    """Delete an exam with its sealed files. Runs that took it keep their totals."""
    _exams().remove(home(), arguments.name)


def unlock(arguments: Arguments) -> None:
    """Hand an exam's passphrase to the supervisor, so that agents may take the exam.

    The key stays in its memory until `flash-mcp exam lock` or the end of the supervisor. An exam
    with a key file needs none of this."""
    _exams().unlock(home(), arguments.name, _passphrase())


def lock(arguments: Arguments) -> None:
    """Let the supervisor forget an exam's key."""
    _exams().lock(home(), arguments.name)


NAME = option("name", "the exam's name, without exam:", "NAME")
NEW = (
    NAME,
    option("folder", "the folder with environment.py", "FOLDER"),
    option("--looks", "looks of each owner (default: 5)", "N", type=int, default=5),
    repeated("--owner", "who may look (default: all)", "NAME"),
    option("--key-file", "write a random key there, and use no passphrase", "FILE"),
    JSON,
)
TRANSCRIPTS = option("--transcripts", "a look's run, of which all is shown", "RUN")
COMMANDS: dict[str, Command | Group] = {
    "exam": Group(
        "Make, show and remove exams that agents take and never see.",
        ("flash-mcp exam create sums ./sums --looks 5", "flash-mcp exam list"),
        {
            "create": Command(create, ("flash-mcp exam create sums ./sums --looks 5",), NEW),
            "list": Command(list_exams, ("flash-mcp exam list",), (JSON,)),
            "show": Command(show, ("flash-mcp exam show sums",), (NAME, TRANSCRIPTS, JSON)),
            "unlock": Command(unlock, ("flash-mcp exam unlock sums",), (NAME,)),
            "lock": Command(lock, ("flash-mcp exam lock sums",), (NAME,)),
            "remove": Command(remove, ("flash-mcp exam remove sums",), (NAME,)),
        },
    )
}
