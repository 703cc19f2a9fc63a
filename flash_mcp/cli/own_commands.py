"""Commands that are no tools. A command is a function of its parsed arguments; its docstring is its
help, and COMMANDS holds its options and an example."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from flash_mcp.cli.install import CLIENTS, check_name
from flash_mcp.cli.install import install as install_server
from flash_mcp.cli.output import answer, render, render_all, say, to_json
from flash_mcp.cli.parsing import Parser, add_command, commands_of, example
from flash_mcp.cli.service import LINGER, install_service, remove_service
from flash_mcp.cli.tool_commands import add_tool, stay
from flash_mcp.judgement import curve as drawing
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.exports import ExportKind
from flash_mcp.protocol.paths import home
from flash_mcp.state import backup as archives
from flash_mcp.state import tokens
from flash_mcp.state.owners import Limits
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.keeper import kept
from flash_mcp.tools.shared.truncation import utc

Arguments = argparse.Namespace
Run = Callable[[Arguments], int | None]
Option = tuple[str, dict[str, Any]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


# -- serving ---------------------------------------------------------------------------------------


def serve(arguments: Arguments) -> None:
    """Speak MCP on stdin and stdout, or over HTTP.

    Agents start the server themselves on stdin and stdout; `flash-mcp install` configures them.
    With --http one server serves many clients until Ctrl-C."""
    if arguments.http:
        _serve_http(arguments)
        return
    from anyio import BrokenResourceError  # noqa: PLC0415

    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    with kept():
        try:
            server.run()
        except* (BrokenPipeError, BrokenResourceError):  # its client has vanished
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _serve_http(arguments: Arguments) -> None:
    host = str(arguments.host)
    port = int(arguments.port)
    store = open_store()
    on_loopback = host in LOOPBACK and not arguments.allow_host
    authenticate = not arguments.unauthenticated
    if authenticate and not on_loopback and not tokens.made(store):
        fix = (
            "make a token with `flash-mcp token create NAME` and start again, listen on 127.0.0.1 "
            "and reach it through `ssh -L`, or accept the risk with --unauthenticated"
        )
        what = "anyone who can reach this address could run code as you"
        raise FlashError("invalid_argument", what, host=host, fix=fix)
    _check_port(host, port)
    from flash_mcp.server import http_server  # noqa: PLC0415
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    note = "Anyone who can connect acts as you: without --unauthenticated it asks for a token."
    if authenticate:
        note = (
            "Every request needs `Authorization: Bearer TOKEN`; `flash-mcp token create NAME`, on "
            "this machine, makes a token."
        )
    if authenticate and on_loopback:
        tokens.local_token(store.base)
        note += f" Yours is in {store.base / tokens.LOCAL_TOKEN}, which only you can read."
    sys.stderr.write(f"flash-mcp listens on http://{host}:{port}/mcp\n{note}\n")
    limits = Limits(
        arguments.requests_per_minute, arguments.queued_runs, arguments.environment_mib << 20
    )
    allow_hosts = arguments.allow_host
    with kept():
        http_server.serve(
            server,
            host,
            port,
            authenticate=authenticate,
            on_loopback=on_loopback,
            allow_hosts=allow_hosts,
            limits=limits,
        )


def ui(arguments: Arguments) -> None:
    """Show runs, curves, transcripts and deployments in a browser, as they change.

    Only you can open the pages: the address that is printed signs you in, once. `serve --http` has
    the same pages at /ui, behind its tokens."""
    host, port = LOOPBACK[0], int(arguments.port)
    _check_port(host, port)
    from flash_mcp.server import http_server  # noqa: PLC0415
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    code = secrets.token_urlsafe()
    address = f"http://{host}:{port}/ui?code={code}"
    by_token = f"It signs one browser in; in others paste {tokens.LOCAL_TOKEN} of FLASH_HOME."
    sys.stderr.write(f"Open {address}\n{by_token}\nCtrl-C ends it.\n")
    if not arguments.no_browser:
        webbrowser.open(address)
    with kept():
        http_server.serve(server, host, port, authenticate=True, on_loopback=True, code=code)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"cannot listen there: {error.strerror}"
            fix = "choose another --port, or end the program that holds this one"
            raise FlashError("port_taken", what, host=host, port=port, fix=fix) from error


def create_token(arguments: Arguments) -> None:
    """Make a token and show it, this once.

    HTTP clients send it as `Authorization: Bearer TOKEN`. The token is the one line on stdout."""
    token, text = tokens.create(
        open_store(),
        arguments.owner,
        arguments.access,
        expires_days=arguments.expires_days,
        secret_names=arguments.secret,
    )
    answer(arguments, {**token, "token": text}, text)
    sys.stderr.write(
        f"{token['id']} of {token['owner']} ({token['access']}). It is not shown again: keep it "
        "now. Restart a server that was started before the first token was made.\n"
    )


def list_tokens(arguments: Arguments) -> None:
    """List all tokens, without their text."""
    result = tokens.made(open_store())
    if not result and not arguments.json:
        sys.stderr.write("no tokens: `flash-mcp token create NAME` makes one\n")
        return
    rows: list[dict[str, Any]] = []
    for token in result:
        row: dict[str, Any] = {**token}
        for name in ("created", "used", "expires", "revoked"):
            row[name] = "-" if row[name] is None else utc(row[name])
        rows.append(row)
    answer(arguments, result, "\n".join(render_all(rows, "")) if rows else "")


def revoke_tokens(arguments: Arguments) -> None:
    """Revoke a token, or all of an owner.

    A running server refuses it from the next request on."""
    result = tokens.revoke(open_store(), arguments.reference)
    answer(arguments, result, "\n".join(f"revoked {token['id']}" for token in result))


def supervise(arguments: Arguments) -> int:
    """Look after the runs in the foreground (train starts this by itself).

    Replaces one that hangs, or that is of an older version and not in a terminal. Exits with 1 if
    another supervisor looks after this state directory."""
    from flash_mcp.supervisor.attempt import Timeouts  # noqa: PLC0415
    from flash_mcp.supervisor.loop import Supervisor  # noqa: PLC0415
    from flash_mcp.supervisor.loop import supervise as run  # noqa: PLC0415
    from flash_mcp.supervisor.process import replace_unfit, unfit  # noqa: PLC0415

    logging.getLogger().setLevel(logging.INFO)
    patience = Timeouts()
    if arguments.idle_exit_s is not None:
        patience = Timeouts(idle_exit_s=arguments.idle_exit_s)
    replace_unfit(home())
    is_foreground = sys.stdin.isatty()  # False for a service
    if run(home(), lambda base: Supervisor(base, patience=patience), is_foreground=is_foreground):
        return 0
    sys.stderr.write("another supervisor already looks after this state directory\n")
    if result := unfit(home()):
        sys.stderr.write(f"{result.what}: {result.fix}\n")
    return 1


# -- this machine ----------------------------------------------------------------------------------


def demo(arguments: Arguments) -> int:
    """Play the whole loop on a small real model, in minutes.

    Does what an agent would do, through a real MCP client over stdio: writes the calculator
    environment, publishes and checks it, trains, watches, reads rollouts, compares the base model
    with the trained one on held-out tasks, deploys the adapter and talks to it. State is kept in
    FLASH_HOME, so that every flash-mcp command shows the run afterwards.

    With --agent it trains a program that calls OpenAI's API with a tool of its own, as it is. With
    --target it trains and serves on nodes of Slurm or Ray."""
    from flash_mcp.cli.demo import play  # noqa: PLC0415

    choices = {"model": arguments.model, "target": arguments.target}
    overrides = {name: value for name, value in choices.items() if value}
    chosen = (arguments.json, arguments.curve, overrides, arguments.environment)
    return play(*chosen, agent=arguments.agent)


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
    for command in commands_of(parser):
        for action in command._actions:
            if action.choices is None and str(action.metavar).startswith("{"):
                action.choices = str(action.metavar).strip("{}").split(",")
    sys.stdout.write(shtab.complete(parser, arguments.shell))


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
    answer(arguments, [vars(finding) for finding in findings], "\n".join(lines), indent=2)
    return int(any(finding.level == "problem" for finding in findings))


def install(arguments: Arguments) -> None:
    """Add this server to a coding agent's configuration, or continue runs after a reboot.

    An agent's other settings and comments stay, and a copy of the old file is kept. `service` makes
    a systemd user service of the supervisor."""
    if arguments.client == "service":
        _install_service(arguments)
        return
    if arguments.remove:
        fix = "remove the server's entry from the agent's configuration by hand"
        raise FlashError("invalid_argument", "only a service can be removed", fix=fix)
    done = install_server(arguments.client, name=arguments.name, write=not arguments.only_print)
    lines = [f"wrote {done.path}", f"restart {done.client}, and ask it to train a model"]
    if done.backup:
        lines[0] += f"; the old one is {done.backup}"
    if not done.changed:
        lines = [f"{done.path} has it already"]
    if arguments.only_print:
        lines = [done.text.rstrip()]
    answer(arguments, dataclasses.asdict(done), "\n".join(lines))


def _install_service(arguments: Arguments) -> None:
    check_name(arguments.name)
    act = remove_service if arguments.remove else install_service
    done = act(arguments.name, write=not arguments.only_print)
    lines = [f"{done.path} is there already; it is enabled and started", LINGER]
    if done.changed:
        lines[0] = f"wrote {done.path}; it is enabled and started"
    if arguments.remove:
        lines = [f"removed {done.path}" if done.changed else f"there is no {done.path}"]
        if done.changed and arguments.only_print:
            lines = [f"would remove {done.path}"]
    elif arguments.only_print:
        lines = [done.text.rstrip()]
    answer(arguments, dataclasses.asdict(done), "\n".join(lines))


def backup(arguments: Arguments) -> None:
    """Save runs, environments and the database to one file, while in use."""
    _show_archive(arguments, archives.backup(home(), arguments.file.absolute()))


def restore(arguments: Arguments) -> None:
    """Restore a backup into an empty state directory; runs go on from there."""
    _show_archive(arguments, archives.restore(home(), arguments.file.absolute()))


def _show_archive(arguments: Arguments, held: archives.Summary) -> None:
    answer(arguments, vars(held), "\n".join(render(vars(held))))


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


def remove(arguments: Arguments) -> None:
    """Delete runs, exports, environment versions and datasets that nothing else depends on.

    On a terminal, and for --older-than and --failed, it shows first what goes and asks; --yes
    answers. With these options it leaves out what is in use. Afterwards the database shrinks."""
    from flash_mcp.cli.remove import remove_all  # noqa: PLC0415

    remove_all(arguments)


def _targets() -> Any:
    """Imported when needed: it talks to engines."""
    from flash_mcp.cli import targets  # noqa: PLC0415

    return targets


def add_target(arguments: Arguments) -> None:
    """Add a place beyond this machine where runs may train, and prove it with a job of a second.

    The job starts on a node, claims a folder of the storage, and reports its version of flash-mcp,
    its devices and missing packages. If it fails, nothing is added."""
    _targets().add(arguments)


def list_targets(arguments: Arguments) -> None:
    """List the targets of targets.toml."""
    _targets().show(arguments)


def check_target(arguments: Arguments) -> None:
    """Prove a target with a job of a second, as `target add` does."""
    _targets().check(arguments)


def remove_target(arguments: Arguments) -> None:
    """Remove a target. Its active runs wait until it is added again, or they are cancelled."""
    _targets().remove(arguments)


# -- runs ------------------------------------------------------------------------------------------


def curve(arguments: Arguments) -> None:
    """Draw a run's reward curve in the terminal or as a picture.

    Shows mean reward and success of the training rollouts, and held-out evaluations."""
    points = open_store().curve(arguments.run_id)
    if arguments.png is not None:
        _write(arguments.png, drawing.png(points), "--png")
    if arguments.json:
        say(to_json(dataclasses.asdict(points)))
    else:
        say(str(arguments.png or drawing.terminal(points)))


def report(arguments: Arguments) -> None:
    """Write a run as one HTML page: health, curves, rollouts, lineage, values.

    The page needs no network and no other file."""
    from flash_mcp.pages.report import html  # noqa: PLC0415

    out = arguments.out or Path(f"{arguments.run_id}.html")
    _write(out, html(open_store(), arguments.run_id).encode(), "--out")
    answer(arguments, {"path": str(out.absolute())}, str(out))


def _write(path: Path, content: bytes, option: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        fix = f"choose a file that you may write with {option}"
        what = f"cannot write there: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error


def export(arguments: Arguments) -> None:
    """Write a checkpoint as files that other programs read, with a model card.

    merged: safetensors with tokenizer and chat template. gguf-f16 and gguf-q8_0: one file for
    llama.cpp. adapter: PEFT, for the base model. All but the adapter are read back, and greedy
    answers are compared."""
    from flash_mcp.cli import export as exports  # noqa: PLC0415

    written = None
    if arguments.push_to and arguments.to:
        written = exports.found(arguments.to.absolute())
    if written is None:
        written = exports.export(open_store(), arguments.reference, arguments.format, arguments.to)
    if arguments.push_to:
        written = exports.pushed(written, arguments.push_to)
    body: dict[str, Any] = {"folder": str(written.folder)}
    if written.result:
        body |= written.result.model_dump()
    if written.pushed:
        body["pushed"] = written.pushed
    body["warnings"] = written.warnings
    answer(arguments, body, "\n".join(render(body)))


def wait(arguments: Arguments) -> int:
    """Return when a run has ended; the exit code says how.

    0 succeeded, 3 failed, 4 cancelled, 5 --timeout-s passed. Prints the run's report."""
    return stay(arguments.run_id, arguments.json, timeout_s=arguments.timeout_s, quiet=True)


# -- the table -------------------------------------------------------------------------------------


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


def _option(name: str, text: str, metavar: str | None = None, **settings: Any) -> Option:
    named = {} if metavar is None else {"metavar": metavar}
    return name, {"help": text, **named, **settings}


def _flag(name: str, text: str, **settings: Any) -> Option:
    return name, {"help": text, "action": "store_true", **settings}


def _repeated(name: str, text: str, metavar: str) -> Option:
    settings: dict[str, Any] = {"action": "append", "default": []}
    return _option(name, f"{text}; may be repeated", metavar, **settings)


def _limit(name: str, default: int, what: str) -> Option:
    return _option(name, f"at most N {what} (default {default})", "N", type=int, default=default)


def _access(name: str, access: str, text: str) -> Option:
    kept: dict[str, Any] = {"dest": "access", "const": access, "default": "write"}
    return _option(name, text, action="store_const", **kept)


CURVE = Path("reward-curve.png")
JSON = _flag("--json", "print the result as JSON")
REFERENCES = (
    "RUN_ID, the folder's name of an export, or NAME@DIGEST of an environment or dataset; another "
    "owner's is OWNER/NAME@DIGEST"
)
ENGINES = ("slurm", "ray", "sky")
SETUPS = ("path", "image", "uv")
PACKAGES = ("install", "node")
TARGET = _option("name", "name of the target, as train's target", "NAME")
WAIT = _option("--wait-s", "seconds for the job (default 120)", "S", type=float, default=120.0)
RUN_ID = _option("run_id", "run id, as returned by train", "RUN_ID")

COMMANDS: dict[str, Command | Group] = {
    "serve": Command(
        serve,
        ("flash-mcp serve", "flash-mcp serve --http --port 9000"),
        (
            _flag("--http", "Streamable HTTP at http://HOST:PORT/mcp"),
            _option("--host", "address to listen on (default 127.0.0.1)", default="127.0.0.1"),
            _option("--port", "port to listen on (default 8765)", type=int, default=8765),
            _flag(
                "--unauthenticated", "ask for no token: anyone who reaches HOST runs code as you"
            ),
            _repeated("--allow-host", "another Host to accept, such as a reverse proxy's", "NAME"),
            _limit("--requests-per-minute", Limits.requests_per_minute, "for each token"),
            _limit("--queued-runs", Limits.queued_runs, "for each owner"),
            _limit("--environment-mib", Limits.environment_bytes >> 20, "MiB for each owner"),
        ),
    ),
    "ui": Command(
        ui,
        ("flash-mcp ui",),
        (
            _option("--port", "port to listen on (default 8766)", type=int, default=8766),
            _flag("--no-browser", "only print the address"),
        ),
    ),
    "token": Group(
        "Make, list and revoke the tokens that HTTP clients need.",
        ("flash-mcp token create alice --read-only", "flash-mcp token revoke alice"),
        {
            "create": Command(
                create_token,
                ("flash-mcp token create ci --expires-days 30 --secret HF_TOKEN",),
                (
                    _option("owner", "its owner; all tokens of a name see the same runs", "NAME"),
                    _option(
                        "--expires-days", "days until it expires (default: never)", "N", type=float
                    ),
                    _repeated(
                        "--secret", "server variable that its runs may use as a secret", "NAME"
                    ),
                    JSON,
                ),
                (
                    _access("--read-only", "read", "may change nothing"),
                    _access("--metrics-only", "metrics", "may read /metrics only"),
                ),
            ),
            "list": Command(list_tokens, ("flash-mcp token list",), (JSON,)),
            "revoke": Command(
                revoke_tokens,
                ("flash-mcp token revoke alice",),
                (_option("reference", "id of a token, or name of an owner", "ID_OR_NAME"), JSON),
            ),
        },
    ),
    "target": Group(
        "Add, list, check and remove places beyond this machine where runs may train.",
        ("flash-mcp target add lab --engine slurm --storage s3://bucket/flash",),
        {
            "add": Command(
                add_target,
                (
                    "flash-mcp target add lab --engine slurm --storage /shared/flash "
                    "--python /opt/flash/bin/python --option=--gres=gpu:1",
                ),
                (
                    TARGET,
                    _option("--engine", "slurm, ray or sky", choices=ENGINES, required=True),
                    _option("--storage", "URL, or a folder that all nodes share", required=True),
                    _option("--setup", "how nodes get flash-mcp: path, image, uv", choices=SETUPS),
                    _option("--packages", "with uv: install or node", choices=PACKAGES),
                    _option("--python", "interpreter on the nodes", "PATH"),
                    _option("--home", "FLASH_HOME on the nodes (default: of each its own)", "DIR"),
                    _option("--ssh", "host that has the engine's commands", "HOST"),
                    _repeated("--option", "argument of sbatch, such as --gres=gpu:1", "ARGUMENT"),
                    _option("--address", "URL of Ray's dashboard or SkyPilot's API server", "URL"),
                    _option("--token-file", "file here with the token for this URL", "PATH"),
                    _repeated("--resource", "what an attempt takes: GPU=1, infra=aws", "NAME=N"),
                    _repeated("--env", "variable of the attempts", "NAME=VALUE"),
                    _option("--env-file", "shell file on the nodes that sets others", "PATH"),
                    _option("--slots", "attempts submitted at once (default 8)", "N", type=int),
                    _option("--price-per-hour", "price of an attempt's hour", "P", type=float),
                    _flag("--unproved", "add it without the job"),
                    WAIT,
                    JSON,
                ),
            ),
            "list": Command(list_targets, ("flash-mcp target list",), (JSON,)),
            "check": Command(check_target, ("flash-mcp target check lab",), (TARGET, WAIT, JSON)),
            "remove": Command(remove_target, ("flash-mcp target remove lab",), (TARGET, JSON)),
        },
    ),
    "supervise": Command(
        supervise,
        ("flash-mcp supervise --idle-exit-s 60",),
        (_option("--idle-exit-s", "exit after S seconds without work", "S", type=float),),
    ),
    "demo": Command(
        demo,
        (
            "flash-mcp demo",
            "flash-mcp demo --agent",
            "flash-mcp demo --json figures.json --curve curve.png",
        ),
        (
            _option("--json", "write the figures to FILE", "FILE", type=Path),
            _option("--curve", f"the picture (default {CURVE})", "FILE", type=Path, default=CURVE),
            _option("--model", "base model (default: the config's)"),
            _option("--environment", "a published environment (default: the calculator)"),
            _option("--target", "a target of Slurm or Ray (default: this machine)"),
            _option("--agent", "train an agent that uses OpenAI's package", action="store_true"),
        ),
    ),
    "completion": Command(
        completion,
        ("flash-mcp completion bash",),
        (_option("shell", "bash, zsh or tcsh", choices=("bash", "zsh", "tcsh")),),
    ),
    "doctor": Command(doctor, ("flash-mcp doctor",), (JSON,)),
    "curve": Command(
        curve,
        ("flash-mcp curve run-2f9k1c8d --png curve.png",),
        (RUN_ID, _option("--png", "write a picture instead", "FILE", type=Path), JSON),
    ),
    "report": Command(
        report,
        ("flash-mcp report run-2f9k1c8d --out report.html",),
        (
            RUN_ID,
            _option("--out", "file to write (default ./RUN_ID.html)", "FILE", type=Path),
            JSON,
        ),
    ),
    "export": Command(
        export,
        ("flash-mcp export run-2f9k1c8d@60 --format gguf-q8_0 --to calculator",),
        (
            _option("reference", "RUN_ID, or RUN_ID@STEP (default: the newest)", "RUN[@STEP]"),
            _option(
                "--format",
                "merged (default), adapter, gguf-f16 or gguf-q8_0",
                choices=get_args(ExportKind),
                default="merged",
            ),
            _option("--to", "new folder (default ./RUN-STEP-FORMAT)", "FOLDER", type=Path),
            _option("--push-to", "upload it to this private model at the hub", "OWNER/NAME"),
            JSON,
        ),
    ),
    "backup": Command(
        backup,
        ("flash-mcp backup flash.tar.gz",),
        (
            _option("file", "archive to write; compressed if it ends with .gz", "FILE", type=Path),
            JSON,
        ),
    ),
    "remove": Command(
        remove,
        (
            "flash-mcp remove run-2f9k1c8d calculator@3f2a9c --dry-run",
            "flash-mcp remove --failed --older-than 30d",
        ),
        (
            _option("references", REFERENCES, "REFERENCE", nargs="*"),
            _option("--older-than", "every run that ended so long ago: 12h, 30d or 8w", "AGE"),
            _flag("--failed", "every run that failed"),
            _flag("--dry-run", "say what would be removed, and remove nothing"),
            _flag("--yes", "remove without asking"),
            _flag("--json", "print {kind, reference, owner, freed_bytes, used_by} of each"),
        ),
    ),
    "restore": Command(
        restore,
        ("flash-mcp restore flash.tar.gz",),
        (_option("file", "archive that `flash-mcp backup` wrote", "FILE", type=Path), JSON),
    ),
    "recover": Command(recover, ("flash-mcp recover",), (JSON,)),
    "wait": Command(
        wait,
        ("flash-mcp wait run-2f9k1c8d --timeout-s 3600",),
        (RUN_ID, _option("--timeout-s", "stop waiting after S seconds", "S", type=float), JSON),
    ),
    "install": Command(
        install,
        (
            "flash-mcp install claude",
            "flash-mcp install codex --print",
            "flash-mcp install service",
        ),
        (
            _option("client", "agent to configure, or service", choices=(*CLIENTS, "service")),
            _option(
                "--name",
                "what the agent calls the server (default flash); a service is NAME-mcp.service",
                default="flash",
            ),
            _flag("--print", "print the new file, and write nothing", dest="only_print"),
            _flag("--dry-run", "as --print", dest="only_print"),
            _flag("--remove", "stop and remove the service; what it started goes on"),
            JSON,
        ),
    ),
}


def add_own(commands: Any, name: str, command: Command | Group) -> None:
    """Add a command of COMMANDS to the parser."""
    if isinstance(command, Group):
        parser = add_command(commands, name, command.text, example(*command.examples), None)
        actions = parser.add_subparsers(metavar="ACTION", required=True)
        for action, item in command.actions.items():
            add_own(actions, action, item)
        return
    text = command.run.__doc__ or ""
    parser = add_command(commands, name, text, example(*command.examples), command.run)
    _add_options(parser, command)


def _add_options(parser: Parser, command: Command) -> None:
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
