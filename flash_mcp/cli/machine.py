"""demo, doctor, install and what saves, mends or empties the state directory."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from flash_mcp.cli.install import CLIENTS, install_skill, secrets_left_out
from flash_mcp.cli.install import install as install_server
from flash_mcp.cli.output import answer, say
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, flag, option
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import without_none
from flash_mcp.state import removal
from flash_mcp.state.disk import in_words, spend_reserve
from flash_mcp.state.owners import LOCAL_OWNER
from flash_mcp.state.removal import Removed, ended_runs
from flash_mcp.state.store import Store, open_store

# -- `flash-mcp remove`: what it would remove, the question, and the removal -----------------------

AGE = re.compile(r"(\d+)([hdw])")
SECONDS = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}
NAMED = 5
"""Ids that are named in a line."""


def remove(arguments: Arguments) -> None:
    """Delete runs, exports, environment versions and datasets that nothing else depends on.

    On a terminal, and for --older-than and --failed, it shows first what goes and asks; --yes
    answers. With these options it leaves out what is in use. Afterwards the database shrinks."""
    spend_reserve(home())
    store = open_store()
    age_s = _seconds(arguments.older_than)
    is_filtered = age_s is not None or arguments.failed
    if not arguments.references and not is_filtered:
        fix = "name what to remove, or pass --older-than or --failed; see flash-mcp remove --help"
        raise FlashError("invalid_argument", "nothing was named", fix=fix)
    results: list[str] = []
    if is_filtered:
        results = ended_runs(store, older_than_s=age_s, only_failed=arguments.failed)
    references = [*arguments.references, *results]
    asks = (is_filtered or sys.stdin.isatty()) and not arguments.yes
    if arguments.dry_run or asks:
        skips = references if is_filtered or asks else []
        count = _show(arguments, store, references, skips)
        if arguments.dry_run or not count:
            return
        _ask(len(references))
    freed = 0
    for gone in _removed(store, references, references if asks else results):
        freed += gone.freed_bytes
        answer(arguments, asdict(gone), f"removed {_line(gone)}")
    shrunk = store.shrink()
    if is_filtered and not arguments.json:
        say(f"freed {in_words(freed)}; the database shrank by {in_words(shrunk)}")


def _show(arguments: Arguments, store: Store, references: list[str], skips: list[str]) -> int:
    """Say what would be removed; how many that is."""
    sizes: list[int] = []
    for gone in _removed(store, references, skips, dry_run=True):
        sizes.append(gone.freed_bytes)
        answer(arguments, asdict(gone), f"would remove {_line(gone)}")
    if len(references) > 1 and not arguments.json:
        say(f"{len(sizes)} of {len(references)}, {in_words(sum(sizes))}")
    if not references:
        sys.stderr.write("no such run has ended\n")
    return len(sizes)


def _removed(
    store: Store, references: list[str], skips: list[str], *, dry_run: bool = False
) -> Iterator[Removed]:
    """Remove them one by one; say of those in `skips` that are in use that they stay."""
    for reference in references:
        try:
            gone = removal.remove(store, reference, dry_run=dry_run)
        except FlashError as error:
            if error.code != "in_use" or reference not in skips:
                raise
            sys.stderr.write(f"{error.what}\n")
        else:
            yield gone


def _ask(count: int) -> None:
    """FlashError(invalid_argument) unless a person says yes."""
    if sys.stdin.isatty():
        sys.stderr.write(f"Remove {'it' if count == 1 else 'these'} for good? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise FlashError("invalid_argument", "nothing was removed", fix="repeat it with --yes")


def _line(gone: Removed) -> str:
    whose = f" of {gone.owner}" if gone.kind == "run" and gone.owner != LOCAL_OWNER else ""
    text = f"{gone.kind} {gone.reference}{whose}, {in_words(gone.freed_bytes)}"
    if gone.used_by:
        more = f" and {len(gone.used_by) - NAMED} more" if len(gone.used_by) > NAMED else ""
        text += f"; {', '.join(gone.used_by[:NAMED])}{more} started from it"
    if gone.elsewhere:
        text += f"; its files stay at {gone.elsewhere}, which is not in the state directory"
    return text


def _seconds(age: str | None) -> float | None:
    if age is None:
        return None
    match = AGE.fullmatch(age)
    if match is None:
        fix = "write hours, days or weeks, as in 12h, 30d or 8w"
        raise FlashError("invalid_argument", f"--older-than cannot be {age!r:.100}", fix=fix)
    return int(match[1]) * SECONDS[match[2]]


REFERENCES = (
    "RUN_ID, the folder's name of an export, or NAME@DIGEST of an environment or dataset; another "
    "owner's is OWNER/NAME@DIGEST"
)


def demo(arguments: Arguments) -> int:
    """Play the whole loop on a small real model, in minutes.

    Does what an agent would do, through a real MCP client over stdio: writes the calculator
    environment, publishes and checks it, trains, watches, reads rollouts, compares the base model
    with the trained one on held-out tasks, deploys the adapter and talks to it. State is kept in
    FLASH_HOME, so that every flash-mcp command shows the run afterwards.

    With --agent it trains a program that calls OpenAI's API with a tool of its own, as it is. With
    --target it trains and serves on nodes of Slurm or Ray."""
    from flash_mcp.cli.demo import play  # noqa: PLC0415

    overrides = without_none({"model": arguments.model, "target": arguments.target})
    return play(arguments.json, overrides, arguments.environment, agent=arguments.agent)


def doctor(arguments: Arguments) -> int:
    """Check this machine and say how to fix what is wrong.

    Looks at Python, the state directory, disk, memory, GPU, training packages, SQLite, the sandbox
    and the supervisor. Exits with 1 if there is a problem."""
    from flash_mcp.cli.doctor import examine  # noqa: PLC0415

    findings = examine()
    signs = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{signs[finding.level]}  {finding.name}: {finding.detail}")
        if finding.fix:
            lines.append(f"         Fix: {finding.fix}")
    answer(arguments, list(map(vars, findings)), "\n".join(lines), indent=2)
    return int(any(finding.level == "problem" for finding in findings))


def install(arguments: Arguments) -> None:
    """Add this server to a coding agent.

    The agent's own command does it, where it has one that is on the PATH; else the entry is
    printed, with the file that it belongs to."""
    write = not arguments.only_print
    skill = install_skill(arguments.client, write=write) if arguments.skill else None
    names = {"name": arguments.name, "ssh": arguments.ssh, "url": arguments.url}
    added = install_server(arguments.client, write=write, **names)
    text = f"add this to {added.path}:\n\n{added.text.rstrip()}"
    if added.done:
        text = f"{added.client} has it; restart it, and ask it to train a model"
    if (left_out := secrets_left_out()) and not (arguments.ssh or arguments.url):
        text += f"\nleft out, for they hold secrets: {', '.join(left_out)}"
    if skill:
        text += f"\nskill: {skill.path}"
        if not write:
            text += f"\n{skill.text.rstrip()}"
    elif CLIENTS[arguments.client].skills and write:
        text += "\n--skill also writes a skill, which says when to use the tools"
    shown = dataclasses.asdict(added) | {"skill": skill and dataclasses.asdict(skill)}
    answer(arguments, shown, text)


def recover(arguments: Arguments) -> None:
    """Rebuild a lost or damaged database from the run folders.

    Takes in the runs and environments that the database does not know; rows that exist stay as they
    are. Runs that had not ended go on. A damaged database is moved aside."""
    from flash_mcp.supervisor.recovery import recover as rebuild  # noqa: PLC0415

    result = rebuild(home())
    taken = f"took in {len(result.runs)} runs and {len(result.environments)} environments"
    lines = [f"{taken}; {result.kept} were there already"]
    if result.damaged:
        lines.append(f"the damaged database is {result.damaged}; restart running servers")
    lines += [f"not taken in: {problem}" for problem in result.problems]
    lines += [f"lost: {what}" for what in result.lost]
    answer(arguments, dataclasses.asdict(result), "\n".join(lines))


COMMANDS: dict[str, Command | Group] = {
    "demo": Command(
        demo,
        ("flash-mcp demo", "flash-mcp demo --agent", "flash-mcp demo --json figures.json"),
        (
            option("--json", "write the figures to FILE", "FILE", type=Path),
            option("--model", "base model (default: the config's)"),
            option("--environment", "a published environment (default: the calculator)"),
            option("--target", "a target of Slurm or Ray (default: this machine)"),
            flag("--agent", "train an agent that uses OpenAI's package"),
        ),
    ),
    "doctor": Command(doctor, ("flash-mcp doctor",), (JSON,)),
    "install": Command(
        install,
        (
            "flash-mcp install claude",
            "flash-mcp install codex --print",
            "flash-mcp install claude --skill",
            "flash-mcp install claude --ssh user@box",
            "FLASH_TOKEN=... flash-mcp install claude --url https://box/mcp",
        ),
        (
            option("client", "agent to configure", choices=CLIENTS),
            option("--name", "what the agent calls the server (default flash)", default="flash"),
            flag("--skill", "also write a skill file that tells the agent when to use the tools"),
            flag("--print", "print the entry, and write nothing", dest="only_print"),
            JSON,
        ),
        (
            option("--ssh", "start the server of USER@HOST over ssh, or USER@HOST:COMMAND", "HOST"),
            option("--url", "use a server that listens, with the token in FLASH_TOKEN", "URL"),
        ),
    ),
    "recover": Command(recover, ("flash-mcp recover",), (JSON,)),
    "remove": Command(
        remove,
        (
            "flash-mcp remove run-2f9k1c8d calculator@3f2a9c --dry-run",
            "flash-mcp remove --failed --older-than 30d",
        ),
        (
            option("references", REFERENCES, "REFERENCE", nargs="*"),
            option("--older-than", "every run that ended so long ago: 12h, 30d or 8w", "AGE"),
            flag("--failed", "every run that failed"),
            flag("--dry-run", "say what would be removed, and remove nothing"),
            flag("--yes", "remove without asking"),
            flag("--json", "print {kind, reference, owner, freed_bytes, used_by} of each"),
        ),
    ),
}
