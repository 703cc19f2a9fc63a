"""The command line: serving, looking after this machine, looking at runs, and every tool as a
command.

Results go to stdout, everything else to stderr; with --json both are JSON. Exit codes: 0 done, 1
refused or failed, 2 wrong usage; with --follow, and of wait, 3 when the run failed, 4 when it was
cancelled and 5 when --timeout-s passed; 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from flash_mcp import __version__
from flash_mcp.cli.output import VisibleFormatter, render, render_all, say, to_json, visible
from flash_mcp.cli.tool_commands import add_tool, stay
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.owners import LOCAL_OWNER, Limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(given)
    arguments, arguments.rest = parser.parse_known_args(given, argparse.Namespace())
    if "run" not in arguments:
        parser.print_help(sys.stderr)
        return 2
    try:
        if arguments.rest and arguments.run is not demo:
            raise _unknown(arguments, given[0])
        code = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from flash_mcp.protocol.errors import as_flash_error  # noqa: PLC0415

        known = as_flash_error(" ".join(given[:1]), error)
        text = to_json({"error": known.to_dict()}, default=str) if "--json" in given else str(known)
        sys.stderr.write(f"{visible(text)}\n")
        return 2 if known.code in ("invalid_argument", "unknown_argument") else 1


def _unknown(arguments: argparse.Namespace, command: str) -> FlashError:
    from flash_mcp.protocol.errors import nearest  # noqa: PLC0415

    option = str(arguments.rest[0]).partition("=")[0]
    if not option.startswith("-") and hasattr(arguments, "words"):
        takes = ", ".join(f"one {name.upper()}" for name in arguments.words) or "options only"
        told = "".join(f"; the {name} is --{name}" for name in arguments.named)
        what = f"{option!r} is a word too many: {command} takes {takes}{told}"
        return FlashError(
            "unknown_argument",
            what,
            fix=f"give it by its option, a list as A,B; see flash-mcp {command} --help",
        )
    near = nearest(option, getattr(arguments, "options", []), count=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return FlashError(
        "unknown_argument", f"there is no {option}{guess}", fix=f"see flash-mcp {command} --help"
    )


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-mcp",
        description="Train language models on your own hardware.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flash-mcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    own_commands = (
        _add_serve,
        _add_token,
        _add_supervise,
        _add_demo,
        _add_doctor,
        _add_curve,
        _add_report,
        _add_backup,
        _add_remove,
        _add_restore,
        _add_wait,
        _add_install,
    )
    for add in own_commands:
        add(commands)
    own = set(cast("dict[str, Any]", commands.choices))
    if next((word for word in given if not word.startswith("-")), None) not in own:
        # It takes half a second that `serve` need not spend twice.
        from flash_mcp.tools.registry import TOOLS  # noqa: PLC0415

        for tool in TOOLS.values():
            add_tool(commands, tool)
    return parser


# -- commands of their own -------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="speak MCP on stdin and stdout, or over HTTP")
    parser.add_argument(
        "--http", action="store_true", help="Streamable HTTP at http://HOST:PORT/mcp"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8765, help="port to listen on (default 8765)")
    parser.add_argument(
        "--unauthenticated",
        action="store_true",
        help="let everyone who reaches HOST run code as you; never on its own",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name that requests may give as their Host, such as a reverse proxy's; may be repeated",
    )
    for name, default, whose in (
        ("requests-per-minute", Limits.requests_per_minute, "token"),
        ("queued-runs", Limits.queued_runs, "owner"),
        ("environment-mib", Limits.environment_bytes >> 20, "owner"),
    ):
        text = f"at most so many for each {whose} (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> None:
    """Run the MCP server until its client leaves, or over HTTP until it is told to end."""
    if arguments.http:
        _serve_http(arguments)
        return
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415
    from flash_mcp.supervisor.keeper import kept  # noqa: PLC0415

    with kept():
        server.run()


def _serve_http(arguments: argparse.Namespace) -> None:
    from flash_mcp.state import tokens  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    host, port = str(arguments.host), int(arguments.port)
    has_tokens = bool(tokens.made(open_store()))
    if (
        not has_tokens
        and not arguments.unauthenticated
        and (host not in LOOPBACK or arguments.allow_host)
    ):
        fix = (
            "make a token with `flash-mcp token create NAME` and start again, listen on 127.0.0.1 and reach it through "
            "`ssh -L`, or accept the risk with --unauthenticated"
        )
        raise FlashError(
            "invalid_argument",
            "whoever can reach this address could run code as you",
            host=host,
            fix=fix,
        )
    _check_port(host, port)
    from flash_mcp.server import http_server  # noqa: PLC0415
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415
    from flash_mcp.supervisor.keeper import kept  # noqa: PLC0415

    authenticate = has_tokens and not arguments.unauthenticated
    if authenticate:
        note = "Every request needs `Authorization: Bearer TOKEN`; `flash-mcp token create NAME`, here, makes a token."
    else:
        note = (
            "No token is asked for: whoever can connect acts as you. `flash-mcp token create NAME` makes a token; with "
            "one, a server that is started without --unauthenticated lets nobody else in."
        )
    sys.stderr.write(f"flash-mcp listens on http://{host}:{port}/mcp\n{note}\n")
    limits = Limits(
        arguments.requests_per_minute, arguments.queued_runs, arguments.environment_mib << 20
    )
    with kept():
        http_server.serve(
            server,
            host,
            port,
            authenticate=authenticate,
            allow_hosts=arguments.allow_host,
            limits=limits,
        )


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            fix = "choose another --port, or end the program that holds this one"
            raise FlashError(
                "port_taken",
                f"cannot listen there: {error.strerror}",
                host=host,
                port=port,
                fix=fix,
            ) from error


def _add_token(commands: Any) -> None:
    parser = commands.add_parser(
        "token", help="make, list and revoke the tokens that HTTP clients need"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a token and show it, this once")
    create.add_argument(
        "owner", metavar="NAME", help="whose it is; all tokens of a name see the same runs"
    )
    kinds = create.add_mutually_exclusive_group()
    kinds.add_argument(
        "--read-only", action="store_const", dest="access", const="read", help="changes nothing"
    )
    kinds.add_argument(
        "--metrics-only",
        action="store_const",
        dest="access",
        const="metrics",
        help="opens /metrics only",
    )
    create.add_argument(
        "--expires-days", type=float, default=None, metavar="N", help="default: never"
    )
    create.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="VARIABLE",
        help="a variable of the server's environment that its runs may name as a secret; may be repeated",
    )
    create.set_defaults(run=create_token, access="write")
    shown = actions.add_parser("list", help="list all tokens, without their text")
    shown.set_defaults(run=list_tokens)
    revoke = actions.add_parser("revoke", help="end a token, or all of an owner, at once")
    revoke.add_argument("reference", metavar="ID_OR_NAME")
    revoke.set_defaults(run=revoke_tokens)
    for action in (create, shown, revoke):
        action.add_argument("--json", action="store_true", help="print JSON")


def create_token(arguments: argparse.Namespace) -> None:
    """Make a token. Its text is the one line on stdout."""
    from flash_mcp.state import tokens  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    token, text = tokens.create(
        open_store(),
        arguments.owner,
        arguments.access,
        expires_days=arguments.expires_days,
        secret_names=arguments.secret,
    )
    say(to_json({**token, "token": text}) if arguments.json else text)
    sys.stderr.write(
        f"{token['id']} of {token['owner']} ({token['access']}). It is not shown again: keep it now. A server that was "
        "started before the first token has to be started again.\n"
    )


def list_tokens(arguments: argparse.Namespace) -> None:
    """Print every token that was made."""
    from flash_mcp.state import tokens  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    found = tokens.made(open_store())
    if arguments.json:
        say(to_json(found))
    elif found:
        times = ("created", "used", "expires", "revoked")
        rows = [{**token, **{name: _date(token[name]) for name in times}} for token in found]
        say("\n".join(render_all(rows, "")))
    else:
        sys.stderr.write("no tokens: `flash-mcp token create NAME` makes one\n")


def revoke_tokens(arguments: argparse.Namespace) -> None:
    """End tokens; a server that runs refuses them from the next request on."""
    from flash_mcp.state import tokens  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    found = tokens.revoke(open_store(), arguments.reference)
    say(
        to_json(found) if arguments.json else "\n".join(f"revoked {token['id']}" for token in found)
    )


def _date(unix_s: float | None) -> str:
    from flash_mcp.tools.shared.fitting import utc  # noqa: PLC0415

    return "-" if unix_s is None else utc(unix_s)


def _add_supervise(commands: Any) -> None:
    parser = commands.add_parser(
        "supervise", help="look after the runs in the foreground (train starts this by itself)"
    )
    parser.add_argument(
        "--idle-exit-s", type=float, default=None, help="leave after so many seconds without work"
    )
    parser.set_defaults(run=supervise)


def supervise(arguments: argparse.Namespace) -> int:
    """Be the state directory's supervisor; 1 where another one is already."""
    from flash_mcp.protocol.paths import home  # noqa: PLC0415
    from flash_mcp.supervisor.loop import Patience, Supervisor  # noqa: PLC0415
    from flash_mcp.supervisor.loop import supervise as run  # noqa: PLC0415

    logging.getLogger().setLevel(logging.INFO)
    patience = (
        Patience() if arguments.idle_exit_s is None else Patience(idle_exit_s=arguments.idle_exit_s)
    )
    if run(home(), lambda base: Supervisor(base, patience=patience)):
        return 0
    sys.stderr.write("another supervisor looks after this state directory already\n")
    return 1


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="the whole loop on a small real model, in minutes", add_help=False
    )
    parser.set_defaults(run=demo)


def demo(arguments: argparse.Namespace) -> int:
    """Hand everything after the command to flash_mcp.cli.demo."""
    return int(importlib.import_module("flash_mcp.cli.demo").main(arguments.rest) or 0)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="say what is wrong with this machine and how to mend it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=doctor)


def doctor(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 where one is a problem."""
    from flash_mcp.cli.doctor import examine  # noqa: PLC0415

    findings = examine()
    if arguments.json:
        say(to_json([vars(finding) for finding in findings], indent=2))
    else:
        signs = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}
        for finding in findings:
            say(f"{signs[finding.level]}  {finding.name}: {finding.detail}")
            if finding.fix:
                say(f"         Fix: {finding.fix}")
    return int(any(finding.level == "problem" for finding in findings))


def _add_curve(commands: Any) -> None:
    parser = commands.add_parser(
        "curve", help="a run's reward curve in the terminal or as a picture"
    )
    parser.add_argument("run_id", metavar="RUN_ID")
    parser.add_argument(
        "--png", type=Path, default=None, metavar="FILE", help="write a picture instead"
    )
    parser.add_argument("--json", action="store_true", help="print the points as JSON")
    parser.set_defaults(run=curve)


def curve(arguments: argparse.Namespace) -> None:
    """Draw the run's rewards, success and held-out evaluations."""
    from flash_mcp.judgement import curve as drawing  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    points = open_store().curve(arguments.run_id)
    if arguments.png is not None:
        _write(arguments.png, drawing.png(points), "--png")
    if arguments.json:
        say(to_json(dataclasses.asdict(points)))
    else:
        say(str(arguments.png or drawing.terminal(points)))


def _add_wait(commands: Any) -> None:
    parser = commands.add_parser("wait", help="return when a run has ended; the exit code says how")
    parser.add_argument("run_id", metavar="RUN_ID")
    parser.add_argument(
        "--timeout-s", type=float, default=None, metavar="S", help="give up waiting after so long"
    )
    parser.add_argument("--json", action="store_true", help="print the run's report as JSON")
    parser.set_defaults(run=wait)


def wait(arguments: argparse.Namespace) -> int:
    """Wait without a word, then print the run's report."""
    return stay(arguments.run_id, arguments.json, timeout_s=arguments.timeout_s, quiet=True)


def _add_install(commands: Any) -> None:
    parser = commands.add_parser(
        "install", help="tell a coding agent of this server, in its own configuration"
    )
    parser.add_argument("client", choices=("claude", "cursor", "codex"))
    parser.add_argument(
        "--name", default="flash", help="what the agent calls the server (default flash)"
    )
    parser.add_argument(
        "--print",
        action="store_true",
        dest="only_print",
        help="print the new file, and write nothing",
    )
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.set_defaults(run=install)


def install(arguments: argparse.Namespace) -> None:
    """Add this server to an agent's configuration and say what was done."""
    from flash_mcp.cli.install import install as run  # noqa: PLC0415

    done = run(arguments.client, name=arguments.name, write=not arguments.only_print)
    if arguments.json:
        say(to_json(dataclasses.asdict(done), default=str))
    elif arguments.only_print:
        say(done.text.rstrip())
    elif not done.changed:
        say(f"{done.path} has it already")
    else:
        say(f"wrote {done.path}" + (f"; the old one is {done.backup}" if done.backup else ""))
        say(f"start {done.client} anew, and ask it to train a model")


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="a run as one HTML page: health, curves, rollouts, lineage, values"
    )
    parser.add_argument("run_id", metavar="RUN_ID")
    parser.add_argument(
        "--out", type=Path, default=None, metavar="FILE", help="where to; default: ./RUN_ID.html"
    )
    parser.add_argument("--json", action="store_true", help="print where it was written as JSON")
    parser.set_defaults(run=report)


def report(arguments: argparse.Namespace) -> None:
    """Write the page and print where it lies."""
    from flash_mcp.cli import report as page  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    text = page.html(open_store(), arguments.run_id)
    out = arguments.out or Path(f"{arguments.run_id}.html")
    _write(out, text.encode(), "--out")
    say(to_json({"path": str(out.absolute())}) if arguments.json else str(out))


def _write(path: Path, content: bytes, option: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        fix = f"choose a file that you may write with {option}"
        raise FlashError(
            "invalid_argument", f"cannot write there: {error}", path=path, fix=fix
        ) from error


def _add_backup(commands: Any) -> None:
    parser = commands.add_parser(
        "backup", help="save runs, environments and the database to one file, while in use"
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="archive to write; compressed where it ends with .gz",
    )
    parser.add_argument("--json", action="store_true", help="print what it holds as JSON")
    parser.set_defaults(run=functools.partial(_archive, "backup"))


def _add_remove(commands: Any) -> None:
    parser = commands.add_parser(
        "remove",
        help="delete runs, versions of environments and datasets that nothing else stands on",
    )
    what = (
        "RUN_ID, or NAME@DIGEST of an environment or dataset; another owner's is OWNER/NAME@DIGEST"
    )
    parser.add_argument("references", nargs="+", metavar="REFERENCE", help=what)
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would go, and remove nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print {kind, reference, owner, freed_bytes} of each"
    )
    parser.set_defaults(run=_remove)


def _remove(arguments: argparse.Namespace) -> None:
    from flash_mcp.state.removal import remove  # noqa: PLC0415
    from flash_mcp.state.store import open_store  # noqa: PLC0415

    store, done = open_store(), "would remove" if arguments.dry_run else "removed"
    for reference in arguments.references:
        gone = remove(store, reference, dry_run=arguments.dry_run)
        whose = f" of {gone.owner}" if gone.kind == "run" and gone.owner != LOCAL_OWNER else ""
        text = f"{done} {gone.kind} {gone.reference}{whose}, {gone.freed_bytes / 1e6:.1f} MB"
        say(to_json(vars(gone)) if arguments.json else text)


def _add_restore(commands: Any) -> None:
    parser = commands.add_parser(
        "restore", help="bring a backup into an empty state directory; runs go on from there"
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="archive that `flash-mcp backup` wrote"
    )
    parser.add_argument("--json", action="store_true", help="print what it holds as JSON")
    parser.set_defaults(run=functools.partial(_archive, "restore"))


def _archive(command: str, arguments: argparse.Namespace) -> None:
    """Back up or restore FLASH_HOME and say what there was."""
    from flash_mcp.protocol.paths import home  # noqa: PLC0415
    from flash_mcp.state import backup  # noqa: PLC0415

    act = {"backup": backup.backup, "restore": backup.restore}[command]
    held = vars(act(home(), arguments.file.absolute()))
    say(to_json(held, default=str) if arguments.json else "\n".join(render(held)))


# -- tools as commands -----------------------------------------------------------------------------


# -- output ----------------------------------------------------------------------------------------
