"""serve and supervise: programs that stay; token: what HTTP clients need."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from flash_mcp.cli.output import answer, render_all
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, Option, flag, option, repeated
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import LOOPBACK, check_port, in_url
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import without_none
from flash_mcp.state import tokens
from flash_mcp.state.owners import Quotas
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import supervised
from flash_mcp.tools.shared.truncation import utc

PORT_FIX = "choose another --port, or end the program that holds this one"


def _limit(name: str, default: int, what: str) -> Option:
    return option(name, f"at most N {what} (default {default})", "N", type=int, default=default)


def serve(arguments: Arguments) -> None:
    """Speak MCP on stdin and stdout, or over HTTP.

    Agents start the server themselves on stdin and stdout; `flash-mcp install` configures them.
    With --http one server serves many clients until Ctrl-C."""
    if arguments.http:
        _serve_http(arguments)
        return
    from anyio import BrokenResourceError  # noqa: PLC0415

    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    with supervised():
        try:
            server.run()
        except* (BrokenPipeError, BrokenResourceError):  # its client has vanished
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _serve_http(arguments: Arguments) -> None:
    host, port = arguments.host, arguments.port
    # Options with which it would refuse everybody
    for name in arguments.allow_host:
        if "/" in name:
            fix = "leave out the scheme and the path: --allow-host flash.example.com"
            raise FlashError("invalid_argument", "a Host is no URL", allow_host=name, fix=fix)
    if (limit := arguments.requests_per_minute) < 1:
        what = "every request would be refused"
        fix = f"allow at least 1; by default it is {Quotas.requests_per_minute}"
        raise FlashError("invalid_argument", what, requests_per_minute=limit, fix=fix)
    store = open_store()
    # With a reverse proxy in front, others reach the loopback address too.
    on_loopback = host in LOOPBACK and not arguments.allow_host
    authenticate = not arguments.unauthenticated
    if authenticate and not on_loopback and not tokens.list_tokens(store):
        fix = (
            "make a token with `flash-mcp token create NAME` and start again, listen on 127.0.0.1 "
            "and reach it through `ssh -L`, or accept the risk with --unauthenticated"
        )
        what = "anyone who can reach this address could run code as you"
        raise FlashError("invalid_argument", what, host=host, fix=fix)
    # Before the tools are loaded: the answer comes in a moment.
    check_port(host, port, PORT_FIX)
    from flash_mcp.server import http_server  # noqa: PLC0415
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    note = "Anyone who can connect acts as you: without --unauthenticated it asks for a token."
    if authenticate:
        note = (
            "Every request needs `Authorization: Bearer TOKEN`; `flash-mcp token create NAME`, on "
            "this machine, makes a token."
        )
    if authenticate and on_loopback:
        note += where_token_is(store.base)
    sys.stderr.write(f"flash-mcp listens on http://{in_url(host)}:{port}/mcp\n{note}\n")
    limits = Quotas(
        arguments.requests_per_minute,
        arguments.queued_runs,
        arguments.environment_mib << 20,
        arguments.deployments,
        arguments.chats,
    )
    hosts = arguments.allow_host
    origins = arguments.allow_origin
    admission = http_server.Admission(authenticate, on_loopback, hosts, limits, origins=origins)
    with supervised():
        http_server.serve(server, host, port, admission)


def where_token_is(base: Path) -> str:
    """Where the token of the machine's own user is; FlashError(invalid_argument) as local_token."""
    tokens.local_token(base)
    file = base / tokens.LOCAL_TOKEN
    if file.stat().st_mode & 0o077:
        return f" Yours is in {file}. Others may read it: `chmod 600 {file}`, or remove it."
    return f" Yours is in {file}, which only you can read."


def supervise(arguments: Arguments) -> int:
    """Look after the runs in the foreground (train starts this by itself).

    Replaces one that hangs, or that is of an older version and not in a terminal. Exits with 1 if
    another supervisor looks after this state directory."""
    from flash_mcp.supervisor.attempt import Timeouts  # noqa: PLC0415
    from flash_mcp.supervisor.loop import Supervisor  # noqa: PLC0415
    from flash_mcp.supervisor.loop import supervise as run  # noqa: PLC0415
    from flash_mcp.supervisor.process import replace_unfit, unfit  # noqa: PLC0415

    logging.getLogger().setLevel(logging.INFO)
    idle_s = arguments.idle_exit_s
    timeouts = Timeouts(**without_none({"idle_exit_s": idle_s, "warm_s": idle_s}))
    replace_unfit(home())
    is_foreground = sys.stdin.isatty()  # False for a service
    if run(home(), lambda base: Supervisor(base, timeouts=timeouts), is_foreground=is_foreground):
        return 0
    sys.stderr.write("another supervisor already looks after this state directory\n")
    if result := unfit(home()):
        sys.stderr.write(f"{result.what}: {result.fix}\n")
    return 1


def _access(name: str, access: str, text: str) -> Option:
    settings = {"dest": "access", "const": access, "default": "write"}
    return flag(name, text, action="store_const", **settings)


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
    # Beside the result: what is piped on is the token alone.
    sys.stderr.write(
        f"{token['id']} of {token['owner']} ({token['access']}). It is not shown again: keep it "
        "now. Restart a server that was started before the first token was made.\n"
    )


def list_tokens(arguments: Arguments) -> None:
    """List all tokens, without their text."""
    result = tokens.list_tokens(open_store())
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


COMMANDS: dict[str, Command | Group] = {
    "serve": Command(
        serve,
        ("flash-mcp serve", "flash-mcp serve --http --port 9000"),
        (
            flag("--http", "Streamable HTTP at http://HOST:PORT/mcp"),
            option("--host", "address to listen on (default 127.0.0.1)", default="127.0.0.1"),
            option("--port", "port to listen on (default 8765)", type=int, default=8765),
            flag("--unauthenticated", "ask for no token: anyone who reaches HOST runs code as you"),
            repeated("--allow-host", "another Host to accept, such as a reverse proxy's", "NAME"),
            repeated("--allow-origin", "an Origin that may call /mcp in a browser", "ORIGIN"),
            _limit("--requests-per-minute", Quotas.requests_per_minute, "for each token"),
            _limit("--queued-runs", Quotas.queued_runs, "for each owner"),
            _limit("--environment-mib", Quotas.environment_bytes >> 20, "MiB for each owner"),
            _limit("--deployments", Quotas.deployments, "for each owner"),
            _limit("--chats", Quotas.chats, "at once for each owner"),
        ),
    ),
    "supervise": Command(
        supervise,
        ("flash-mcp supervise --idle-exit-s 60",),
        (option("--idle-exit-s", "exit after S seconds without work", "S", type=float),),
    ),
    "token": Group(
        "Make, list and revoke the tokens that HTTP clients need.",
        ("flash-mcp token create alice --read-only", "flash-mcp token revoke alice"),
        {
            "create": Command(
                create_token,
                ("flash-mcp token create ci --expires-days 30 --secret HF_TOKEN",),
                (
                    option("owner", "its owner; all tokens of a name see the same runs", "NAME"),
                    option(
                        "--expires-days", "days until it expires (default: never)", "N", type=float
                    ),
                    repeated(
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
                (option("reference", "id of a token, or name of an owner", "ID_OR_NAME"), JSON),
            ),
        },
    ),
}
