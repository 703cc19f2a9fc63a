"""settings.toml, with an error that says who can correct it."""

from __future__ import annotations

from pathlib import Path

from environments.settings import FILE, Settings, load_settings
from flash_mcp.protocol.errors import FlashError


def operator_settings(base: Path) -> Settings:
    """FlashError(invalid_argument) if the file cannot be used."""
    try:
        return load_settings(base)
    except ValueError as error:
        raise settings_error(base, error) from error


def settings_error(base: Path, why: Exception) -> FlashError:
    what = f"the settings of this server cannot be used: {why}"
    fix = f"the server's operator corrects {base / FILE}"
    return FlashError("invalid_argument", what, fix=fix)
