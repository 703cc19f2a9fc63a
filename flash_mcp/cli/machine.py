"""demo, doctor, install and what saves, mends or empties the state directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flash_mcp.cli.install import CLIENTS, install_skill, secrets_left_out
from flash_mcp.cli.install import install as install_server
from flash_mcp.cli.output import answer
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, flag, option
from flash_mcp.cli.remove import remove
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import without_none

CURVE = Path("reward-curve.png")
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
    environment = arguments.environment
    return play(arguments.json, arguments.curve, overrides, environment, agent=arguments.agent)


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
        (
            "flash-mcp demo",
            "flash-mcp demo --agent",
            "flash-mcp demo --json figures.json --curve curve.png",
        ),
        (
            option("--json", "write the figures to FILE", "FILE", type=Path),
            option("--curve", f"the picture (default {CURVE})", "FILE", type=Path, default=CURVE),
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
