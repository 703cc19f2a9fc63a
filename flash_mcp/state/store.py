"""The store: every table behind one object."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flash_mcp.protocol.paths import home
from flash_mcp.state.environments import DeploymentTable, EnvironmentTable
from flash_mcp.state.history import HistoryTables


class Store(HistoryTables, EnvironmentTable, DeploymentTable):
    """All that is stored."""


def open_store() -> Store:
    """The store of FLASH_HOME; the same object for as long as that stays the same."""
    return _store_at(home())


@lru_cache(maxsize=8)
def _store_at(base: Path) -> Store:
    return Store(base)
