"""Every anticipated failure: one class, a stable code, and what to do next.

An agent reads `str(error)`:  `[code key=value] what happened. Fix: what to do next.`
"""

from __future__ import annotations

import difflib
import functools
import logging
import secrets
from collections.abc import Iterable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path, PurePath
from typing import Any, cast

from flash_mcp.protocol.paths import home

CODES: dict[str, str] = {
    "invalid_argument": "an argument is of the wrong type, out of its range or does not fit another one",
    "unknown_argument": "a tool was given an argument that it does not have",
    "unknown_environment": "no environment of that name or digest was pushed",
    "unknown_model": "the model is neither in the catalog, nor a local folder, nor a reachable hub id",
    "unknown_run": "no run has that id",
    "unknown_checkpoint": "the run has no checkpoint at that step",
    "unknown_dataset": "no dataset of that name or digest was made",
    "unknown_deployment": "no deployment has that id",
    "environment_invalid": "environment.py does not import or does not follow the contract",
    "environment_error": "environment code raised, or too large a share of its calls failed",
    "environment_timeout": "a call into environment code passed its deadline",
    "environment_memory": "environment code used more memory than it may",
    "environment_processes": "environment code started more processes or threads than it may",
    "environment_file_size": "environment code wrote a larger file than it may",
    "environment_network": "environment code wanted the network without having asked for it",
    "environment_access": "environment code opened a file that is not its own",
    "secret_missing": "a run waits for values of secrets, which are kept in memory alone",
    "requirements_failed": "the packages of an environment's requirements.txt could not be installed",
    "dataset_invalid": "a dataset is missing, empty or has a malformed row",
    "upload_invalid": "a pushed folder or file breaks a limit or would leave its folder",
    "adapter_mismatch": "an adapter's base model, rank or alpha differs from the run's, or it is no plain LoRA",
    "prompt_too_long": "a prompt leaves no room for an answer within the context",
    "template_unsupported": "the tokenizer's chat template cannot be followed token by token",
    "checkpoint_corrupt": "a checkpoint's files do not match their checksums",
    "out_of_memory": "the machine's or the device's memory did not suffice",
    "in_use": "something stands on what was to be removed",
    "diverged": "a gradient was infinite or no number",
    "disk_full": "no space is left where state is written",
    "idempotency_conflict": "an idempotency key was used before with different arguments",
    "run_finished": "the run has already ended",
    "not_ready": "what was asked for is still starting",
    "deployment_failed": "the serving process ended or never answered",
    "port_taken": "another process listens on that port",
    "engine_missing": "the packages of the training side are not installed",
    "hub_unreachable": "a model has to be fetched and its source cannot be reached",
    "worker_failed": "an attempt of the run ended without a result",
    "stalled": "an attempt made no progress for too long",
    "fenced": "a newer attempt owns the run; this one changed nothing",
    "unauthenticated": "the request has no valid bearer token",
    "not_permitted": "the token does not allow this: it only reads, or only opens /metrics",
    "host_refused": "a request's Host or Origin header names another server than this one",
    "local_only": "an argument names a file, folder or port of the server's machine, which only its own users may",
    "rate_limited": "too many requests or uploads at once; the error says when to try again",
    "quota_exceeded": "the owner has as many queued runs, or as much stored, as is allowed",
    "too_large": "a request's body is larger than is allowed",
    "state_busy": "the state directory is locked by another program",
    "state_corrupt": "the database of the state directory is damaged",
    "store_unreachable": "the object store that holds a run folder does not answer",
    "internal": "a defect of flash-mcp itself; the id finds the traceback in the log",
}


class FlashError(Exception):
    """An anticipated failure.

    `code` is one of CODES; `values` are the wrong values, shown beside the code; `fix` says what to
    do next. Each may be another's text: it is made `encodable`."""

    def __init__(self, code: str, what: str, *, fix: str = "", **values: Any) -> None:
        if code not in CODES:
            raise ValueError(f"unregistered error code {code!r}")
        what, fix = encodable(what.rstrip()), encodable(fix.rstrip())
        super().__init__(what)
        self.code, self.what, self.fix, self.values = code, what, fix, encodable(values)

    def __str__(self) -> str:
        values = "".join(f" {name}={_short(value)}" for name, value in self.values.items())
        what = self.what if self.what.endswith((".", "!", "?")) else f"{self.what}."
        return f"[{self.code}{values}] {what}" + (f" Fix: {self.fix}" if self.fix else "")

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON, for result.json and the store."""
        return {"code": self.code, "what": self.what, "fix": self.fix, "values": self.values}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FlashError:
        """The inverse of `to_dict`."""
        return cls(data["code"], data["what"], fix=data.get("fix", ""), **data.get("values", {}))


def encodable(value: Any) -> Any:
    r"""The value with `\udc80` for every lone surrogate in its texts: a single one, in what
    environment code raises or in a file's name, has no UTF-8 form, and the whole answer could not
    be sent.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {
            encodable(key): encodable(item) for key, item in cast("dict[Any, Any]", value).items()
        }
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in cast("Sequence[Any]", value)]
    return encodable(str(value)) if isinstance(value, PurePath) else value


def _short(value: Any, limit: int = 120) -> str:
    text = encodable(
        repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
    )
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; empty where nothing resembles it."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """`; did you mean 'X' or 'Y'?`, or nothing where no known name resembles `wanted`."""
    near = nearest(wanted, known)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


MAX_LOG_BYTES = 4 << 20


def as_flash_error(where: str, error: BaseException) -> FlashError:
    """`error` itself if it was foreseen; else FlashError(internal) whose id finds the traceback in
    the log.
    """
    if isinstance(error, FlashError):
        return error
    identity, log = secrets.token_hex(4), home() / "logs" / "server.log"
    _logger(log).error("id=%s in %s", identity, where, exc_info=error)
    what = "flash-mcp failed in a way that it did not foresee"
    return FlashError(
        "internal",
        what,
        id=identity,
        fix=f"the traceback stands under this id in {log}; report it with it",
    )


@functools.cache
def _logger(path: Path) -> logging.Logger:
    path.parent.mkdir(exist_ok=True, mode=0o700)
    handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=2, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(f"flash_mcp.errors.{path}")
    logger.addHandler(handler)
    logger.propagate = False
    return logger
