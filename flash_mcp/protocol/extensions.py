"""What lies behind a door, for callers that are told by a FlashError if it is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from environments import doors
from flash_mcp.protocol.errors import FlashError


def find(group: str, name: str, look: Callable[[str, str], Any] = doors.find) -> Any:
    """What `look` finds. FlashError(extension_missing)"""
    try:
        return look(group, name)
    except ValueError as error:
        fix = "install the package that brings it, or do without; flash-mcp doctor names all"
        raise FlashError("extension_missing", str(error), fix=fix) from error


if TYPE_CHECKING:
    ExportKind = str
else:  # what is installed, as the schemas of tools list it
    ExportKind = Literal[tuple(doors.brought("flash_mcp.exports"))]
