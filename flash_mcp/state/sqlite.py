"""sqlite-utils, imported in a tenth of the time that it takes by itself."""

from __future__ import annotations

import sys

# sqlite-utils imports pandas and numpy where they are installed, which takes a second: hide them
# from it.
_HIDDEN = [name for name in ("numpy", "pandas") if name not in sys.modules]
sys.modules.update(dict.fromkeys(_HIDDEN))  # pyright: ignore[reportArgumentType, reportCallIssue]
try:
    from sqlite_utils import Database, Migrations
    from sqlite_utils.utils import sqlite3  # pyright: ignore[reportPrivateImportUsage]  # whichever it chose
finally:
    for _name in _HIDDEN:
        del sys.modules[_name]

__all__ = ["Database", "Migrations", "sqlite3"]
