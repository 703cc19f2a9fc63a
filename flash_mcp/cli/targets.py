"""`flash-mcp target`: places beyond this machine where runs may train, written and proved."""

from __future__ import annotations

import argparse
import shlex
import tomllib
from typing import Any

from flash_mcp.cli.output import answer, render
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.state.targets import (
    FILE,
    Cards,
    TargetSettings,
    find_target,
    new_target,
    note_cards,
    remove_target,
    targets,
    write_target,
)
from flash_mcp.supervisor.probe import Probed, probe

SIMPLE = (
    "engine",
    "storage",
    "setup",
    "packages",
    "python",
    "home",
    "env_file",
    "ssh",
    "address",
    "token_file",
    "slots",
    "price_per_hour",
)
"""Options of `add` that are fields of a target as they are."""


def add(arguments: argparse.Namespace) -> None:
    """As `flash-mcp target add`."""
    fields: dict[str, Any] = {name: getattr(arguments, name) for name in SIMPLE}
    fields["options"] = shlex.split(" ".join(arguments.option))
    fields["env"] = dict(_pair("--env", text) for text in arguments.env)
    pairs = [_pair("--resource", text) for text in arguments.resource]
    fields["resources"] = {name: _value(text) for name, text in pairs}
    chosen = {name: value for name, value in fields.items() if value not in (None, [], {})}
    settings = new_target(home(), arguments.name, chosen)
    result = None if arguments.unproved else probe(arguments.name, settings, arguments.wait_s)
    if result and _shows_cards(settings):
        settings = settings.model_copy(update={"cards": Cards(**result.cards)})
    write_target(home(), arguments.name, settings)
    body = {"target": arguments.name, "file": str(home() / FILE), **_probed(result)}
    answer(arguments, body, "\n".join(render(body)))


def check(arguments: argparse.Namespace) -> None:
    """Prove a target with a job of a second, as `target add` does."""
    settings = find_target(home(), arguments.name)
    result = probe(arguments.name, settings, arguments.wait_s)
    if _shows_cards(settings):
        note_cards(home(), arguments.name, Cards(**result.cards))
    body = {"target": arguments.name, **_probed(result)}
    answer(arguments, body, "\n".join(render(body)))


def _shows_cards(settings: TargetSettings) -> bool:
    """Whether the probe says what the target's nodes have. SkyPilot chooses a card for each run,
    and the probe needs none.
    """
    chooses = settings.engine == "sky" and "accelerators" not in settings.resources
    return settings.cards is None and not chooses


def show(arguments: argparse.Namespace) -> None:
    """List the targets."""
    results = {
        name: item.model_dump(exclude_defaults=True) for name, item in targets(home()).items()
    }
    lines = [f"{name}  {item['engine']}  {item['storage']}" for name, item in results.items()]
    nothing = "no targets: `flash-mcp target add` makes one; runs train on this machine"
    answer(arguments, results, "\n".join(lines) or nothing)


def remove(arguments: argparse.Namespace) -> None:
    """Remove a target. Runs that are under way there are no longer looked after."""
    remove_target(home(), arguments.name)
    answer(arguments, {"removed": arguments.name}, f"removed {arguments.name}")


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        what = f"{option} takes NAME=VALUE, not {text!r}"
        raise FlashError("invalid_argument", what, fix=f"write it as {option} NAME=VALUE")
    return name, value


def _value(text: str) -> Any:
    """A number, true or false as targets.toml has them; all else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _probed(probed: Probed | None) -> dict[str, Any]:
    return {} if probed is None else vars(probed)
