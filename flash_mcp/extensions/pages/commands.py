"""report: a run as one file; ui: the live pages."""

from __future__ import annotations

import secrets
import sys
import webbrowser
from pathlib import Path

from flash_mcp.cli.output import answer, write_file
from flash_mcp.cli.parsing import JSON, RUN_ID, Arguments, Command, flag, option
from flash_mcp.cli.serving import PORT_FIX
from flash_mcp.protocol.listening import LOOPBACK, check_port
from flash_mcp.state import tokens
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import supervised


def report(arguments: Arguments) -> None:
    """Write a run as one HTML page: health, curves, rollouts, lineage, values.

    The page needs no network and no other file."""
    from flash_mcp.extensions.pages.report import html  # noqa: PLC0415

    out = arguments.to or Path(f"{arguments.run_id}.html")
    write_file(out, html(open_store(), arguments.run_id))
    answer(arguments, {"path": str(out.absolute())}, str(out))


def ui(arguments: Arguments) -> None:
    """Show runs, curves, transcripts and deployments in a browser, as they change.

    Only you can open the pages: the address that is printed signs you in, once. `serve --http` has
    the same pages at /ui, behind its tokens."""
    host, port = LOOPBACK[0], arguments.port
    check_port(host, port, PORT_FIX)
    from flash_mcp.server import http_server  # noqa: PLC0415
    from flash_mcp.server.mcp_server import server  # noqa: PLC0415

    code = secrets.token_urlsafe()
    name, pages_at = host, ""
    by_token = f"It signs one browser in; in others paste {tokens.LOCAL_TOKEN} of FLASH_HOME."
    if not arguments.by_number:
        # Browsers send cookies to all ports of a host: only this one knows the name.
        name = pages_at = f"flash-{secrets.token_hex(16)}.localhost"
        by_token += " A browser that does not know names below localhost needs --by-number."
    address = f"http://{name}:{port}/ui?code={code}"
    sys.stderr.write(f"Open {address}\n{by_token}\nCtrl-C ends it.\n")
    if not arguments.no_browser:
        webbrowser.open(address)
    admission = http_server.Admission(
        authenticate=True, on_loopback=True, hosts=[name], code=code, pages_at=pages_at
    )
    with supervised():
        http_server.serve(server, host, port, admission)


REPORT = Command(
    report,
    ("flash-mcp report run-2f9k1c8d --to report.html",),
    (RUN_ID, option("--to", "file to write (default ./RUN_ID.html)", "FILE", type=Path), JSON),
)
UI = Command(
    ui,
    ("flash-mcp ui",),
    (
        option("--port", "port to listen on (default 8766)", type=int, default=8766),
        flag("--no-browser", "only print the address"),
        flag("--by-number", "pages at 127.0.0.1: browsers send its cookies to every port"),
    ),
)
