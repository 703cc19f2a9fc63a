"""Failures that nobody foresaw: the traceback goes to a log file under an id, and only the id to the caller."""

from __future__ import annotations

import functools
import logging
import secrets
from logging.handlers import RotatingFileHandler
from pathlib import Path

from flash_mcp.errors import FlashError
from flash_mcp.home import home

MAX_LOG_BYTES = 4 << 20


def as_flash_error(where: str, error: BaseException) -> FlashError:
    """`error` itself if it was foreseen; else FlashError(internal) whose id finds the traceback in the log."""
    if isinstance(error, FlashError):
        return error
    identity, log = secrets.token_hex(4), home() / "logs" / "server.log"
    _logger(log).error("id=%s in %s", identity, where, exc_info=error)
    what = "flash-mcp failed in a way that it did not foresee"
    return FlashError(
        "internal", what, id=identity, fix=f"the traceback stands under this id in {log}; report it with it"
    )


@functools.cache
def _logger(path: Path) -> logging.Logger:
    path.parent.mkdir(exist_ok=True, mode=0o700)
    handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=2, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(f"flash_mcp.defects.{path}")
    logger.addHandler(handler)
    logger.propagate = False
    return logger
