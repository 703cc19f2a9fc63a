"""token: what HTTP clients need."""

from __future__ import annotations

import sys
from typing import Any

from flash_mcp.cli.output import answer, render_all
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, Option, flag, option, repeated
from flash_mcp.state import tokens
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.truncation import utc


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
    )
}
