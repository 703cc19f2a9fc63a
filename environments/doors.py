"""What packages bring by entry points, ours and other people's alike (docs/extending.md)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint


OURS = {
    "flash_mcp.adapters": {
        "verifiers": "environments.adapters.verifiers:adapt",
        "inspect_ai": "environments.adapters.inspect_tasks:adapt",
    },
    "flash_mcp.checkpoints": {"export": "flash_mcp.extensions.export.background:export"},
    "flash_mcp.commands": {
        "certify": "flash_mcp.extensions.certificate.command:COMMAND",
        "export": "flash_mcp.extensions.export.command:COMMAND",
        "gateway": "flash_mcp.extensions.gateway.command:COMMAND",
        "recordings": "flash_mcp.extensions.recording.command:COMMAND",
        "report": "flash_mcp.extensions.pages.commands:REPORT",
        "ui": "flash_mcp.extensions.pages.commands:UI",
    },
    "flash_mcp.exports": {
        "merged": "worker.extensions.export.formats:merged",
        "adapter": "worker.extensions.export.formats:adapter",
        "gguf-f16": "worker.extensions.export.formats:F16",
        "gguf-q8_0": "worker.extensions.export.formats:Q8_0",
    },
    "flash_mcp.checks": {"hunt": "flash_mcp.extensions.hunt.search"},
    "flash_mcp.jobs": {"tour": "flash_mcp.extensions.tournament.rows"},
    "flash_mcp.pages": {"render": "flash_mcp.extensions.pages.render:render"},
    "flash_mcp.players": {"gateway": "worker.extensions.gateway"},
    "flash_mcp.recorders": {"chats": "worker.extensions.recording"},
    "flash_mcp.routes": {
        "gateway": "flash_mcp.extensions.gateway.relay",
        "ui": "flash_mcp.extensions.pages.ui",
    },
    "flash_mcp.targets": {
        "slurm": "flash_mcp.supervisor.launch.slurm:SlurmLauncher",
        "ray": "flash_mcp.supervisor.launch.ray:RayLauncher",
        "sky": "flash_mcp.supervisor.launch.sky:SkyLauncher",
    },
    "flash_mcp.tasks": {"harbor": "environments.agents.harbor:load"},
    "flash_mcp.tools": {"tournament": "flash_mcp.extensions.tournament.tool:TOOL"},
    "flash_mcp.versions": {"certificate": "flash_mcp.extensions.certificate.signing"},
}
"""What is found without metadata too: an environment's own interpreter has our files alone, and an
installation from a checkout knows what was there when it was made."""


OF_WORKERS = ("flash_mcp.exports", "flash_mcp.players", "flash_mcp.recorders")
"""Groups of what needs torch, and is never imported where the server runs."""


@functools.cache
def installed() -> list[EntryPoint]:
    """Every entry point for flash-mcp. It reads a file of each installed package, once."""
    # Loaded here: with the e-mail package that it needs it takes a tenth of an environment's start.
    metadata: Any = importlib.import_module("importlib.metadata")
    results: list[EntryPoint] = []
    for group, points in OURS.items():
        results += [metadata.EntryPoint(*item, group) for item in points.items()]
    existing = metadata.entry_points()
    for group in existing.groups:
        if group.startswith("flash_mcp."):
            results += existing.select(group=group)
    return results


@functools.cache
def brought(group: str) -> dict[str, list[EntryPoint]]:
    """What there is of a group, by name."""
    results: dict[str, list[EntryPoint]] = {}
    for point in installed():
        if point.group == group:
            named = results.setdefault(point.name, [])
            if point.value not in (other.value for other in named):  # a package may be found twice
                named.append(point)
    return results


TROUBLES: dict[tuple[str, str], str] = {}
"""{(group, name): why it cannot be had} of what was looked for."""


def each(group: str, own: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """`own`, and what packages bring beside it, by name. What cannot be had is left out, and in
    TROUBLES.
    """
    results = dict(own)
    for name in brought(group):
        try:
            if name in own:
                value = brought(group)[name][0].value
                raise ValueError(f"{value} brings {name!r} for {group}, which flash-mcp has itself")
            results[name] = find(group, name)
        except ValueError as error:
            TROUBLES[group, name] = str(error)
    return results


def troubles() -> list[str]:
    """Why what packages bring cannot be had, of each thing that cannot."""
    for group, name in {(point.group, point.name) for point in installed()}:
        if group not in OF_WORKERS:
            each(group)
            continue
        try:
            locate(group, name)
        except ValueError as error:
            TROUBLES[group, name] = str(error)
    return list(TROUBLES.values())


def locate(group: str, name: str) -> EntryPoint:
    """What leads to the object of that name, which is not imported. ValueError if no package brings
    it, if several do, or if its module is not there.
    """
    existing = brought(group).get(name, [])
    if not existing:
        names = ", ".join(sorted(brought(group))) or "none"
        raise ValueError(f"no installed package brings {name!r} for {group}; there are: {names}")
    if len(existing) > 1:
        values = " and ".join(point.value for point in existing)
        raise ValueError(f"several packages bring {name!r} for {group}: {values}; remove one")
    (point,) = existing
    try:
        if importlib.util.find_spec(point.module) is None:
            raise ModuleNotFoundError(f"No module named {point.module!r}")
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} of {group} cannot be imported: {error}") from error
    return point


def find(group: str, name: str) -> Any:
    """The object of that name. ValueError as of `locate`, or if it cannot be imported."""
    point = locate(group, name)
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} of {group} cannot be imported: {error}") from error
