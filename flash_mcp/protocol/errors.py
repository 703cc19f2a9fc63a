"""Every anticipated failure: one class with a stable code and a fix.

An agent reads `str(error)`:  `[code key=value] what happened. Fix: what to do next.`, and below it,
in marked lines, what an environment or a model's template wrote
(environments.untrusted_text).
"""

from __future__ import annotations

import difflib
import errno
import functools
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path, PurePath
from typing import Any, Self, cast

from environments.faults import EnvironmentFault
from environments.untrusted_text import quoted, visible
from flash_mcp.protocol.paths import HomeError, home

MOST_CHARACTERS = 4000
"""How much of each text an error holds."""
EVIDENCE_CHARACTERS = 900
"""How much of a traceback of environment code an error holds."""

CODES: dict[str, str] = {
    "invalid_argument": "an argument has the wrong type, is out of range or conflicts with another",
    "unknown_argument": "the tool has no argument of that name",
    "unknown_environment": "no environment of that name or digest was pushed",
    "unknown_model": "the model is no catalog model, local folder or reachable hub id",
    "model_unsupported": "a model of this architecture cannot be trained, or not on this machine",
    "unknown_run": "no run has that id",
    "unknown_checkpoint": "the run has no checkpoint at that step",
    "unknown_dataset": "no dataset of that name or digest exists",
    "unknown_deployment": "no deployment has that id",
    "unknown_tournament": "no tournament has that id",
    "unknown_exam": "there is no exam of that name that the caller may take",
    "exam_sealed": "an exam shows totals only, and its tasks are for evaluate alone",
    "exam_locked": "an exam's key is not known to this machine, or does not open it",
    "exam_spent": "the looks at an exam that its operator allowed are used up",
    "exam_failed": "a look at an exam failed; only its operator may learn where",
    "unknown_page": "flash-mcp ui has no page of that address",
    "gate_failed": "env_test found the environment faulty, and the run does not accept that",
    "environment_invalid": "environment.py does not import or does not follow the contract",
    "environment_unsupported": "an environment of another package needs what cannot run here",
    "environment_error": "environment code raised, or too many of its calls failed",
    "environment_timeout": "a call into environment code passed its deadline",
    "environment_memory": "environment code exceeded its memory limit",
    "environment_processes": "environment code exceeded its limit of processes or threads",
    "environment_file_size": "environment code exceeded its limit for the size of a file",
    "environment_network": "environment code needs network access that it did not ask for",
    "network_not_granted": "environment.toml asks for network, which settings.toml does not grant",
    "environments_busy": "as many environments run as settings.toml allows",
    "environment_unprotected": "this machine cannot keep environment code from the user's files",
    "environment_access": "environment code opened a file outside its sandbox",
    "secret_missing": "the run's secrets were lost in a restart; they are never written to disk",
    "requirements_failed": "packages of an environment's requirements.txt could not be installed",
    "dataset_invalid": "a dataset is missing, empty or has a malformed row",
    "upload_invalid": "a pushed folder or file exceeds a limit or has a path outside its folder",
    "certificate_invalid": "a certificate was changed, is of another key, or is about other files",
    "adapter_mismatch": "the adapter does not match the run's model, rank or alpha, or is no LoRA",
    "lost_call": "the model's answer to a request of an agent reached no client",
    "prompt_too_long": "a prompt leaves no room for an answer in the context",
    "template_unsupported": "the tokenizer's chat template cannot be reproduced token by token",
    "tools_unsupported": "the model's chat template shows no tools, or its calls cannot be read",
    "artifact_damaged": "a node found an artifact of a run missing or changed in the storage",
    "checkpoint_corrupt": "a checkpoint's files do not match their checksums",
    "device_unsupported": "a GPU is missing, or cannot compute in the model's precision",
    "out_of_memory": "the machine or the device ran out of memory",
    "in_use": "other runs or deployments depend on it",
    "diverged": "a gradient was infinite or not a number",
    "path_refused": "the system does not let flash-mcp enter, read or write a file or folder",
    "disk_full": "the disk of the state directory, or of a target's node, is full",
    "idempotency_conflict": "the idempotency key was used before with different arguments",
    "run_finished": "the run has already ended",
    "export_unsupported": "the model cannot be written in that form",
    "not_ready": "it is still starting",
    "deployment_failed": "the server of the deployment ended or did not answer",
    "unresponsive": "the server of the deployment, or at --url, hangs or is too slow",
    "port_taken": "another process uses that port",
    "engine_missing": "the packages for training are not installed",
    "extension_missing": "a part of flash-mcp, or of another package, is not installed",
    "pictures_missing": "matplotlib, which draws pictures, is not installed",
    "proxy_invalid": "a variable such as HTTPS_PROXY names no proxy that can be used",
    "hub_unreachable": "the source of a model that has to be fetched cannot be reached",
    "worker_failed": "an attempt of the run ended without a result",
    "held": "somebody ended an attempt by the commands of its engine; the run waits for a decision",
    "preempted": "an attempt's machine was taken away, let it wait too long, or started anew",
    "unknown_target": "targets.toml has no target of that name",
    "targets_invalid": "targets.toml cannot be read, or has a wrong name or value",
    "target_unreachable": "the engine of a target does not answer",
    "target_refused": "the engine of a target refused an attempt",
    "stalled": "an attempt made no progress for too long",
    "fenced": "a newer attempt owns the run; this attempt changed nothing",
    "unauthenticated": "the request has no valid bearer token",
    "not_permitted": "the token does not allow this: it only reads, or only opens /metrics",
    "host_refused": "the Host header of the request names another server",
    "origin_refused": "the request comes from a page or program that this server does not admit",
    "local_only": "only users of the server's machine may pass its files, folders or ports",
    "rate_limited": "too many requests, chats or uploads at once; the error says when to try again",
    "quota_exceeded": "the owner reached the limit of queued runs, deployments or stored data",
    "too_large": "the body of the request is too large",
    "state_busy": "another program has locked the state directory",
    "state_newer": "a newer version of flash-mcp has changed the database",
    "locks_unsupported": "the file system of the state directory refuses file locks",
    "state_corrupt": "the database of the state directory is damaged",
    "store_refused": "the object store of the run folder refuses the keys, or has no such bucket",
    "store_unreachable": "the object store that holds the run folder does not answer",
    "internal": "a defect of flash-mcp; its id finds the traceback in the log",
}


REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EROFS)
MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 4096
"""Of Linux and of its file systems."""
QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
SHOWN = re.compile(rf"\[(\w+)(?:(?:[^'\"]|{QUOTED})*?|.*?)\] (.*?)(?: Fix: (.*))?", re.DOTALL)
"""An error as text. Its values may hold brackets, in quotes and as lists."""
PLAIN = re.compile(r"[^\s\]'\"]+")
"""A text that is shown without quotes."""


class FlashError(Exception):
    """An anticipated failure.

    `code` is one of CODES. `values` are the wrong values; they are shown after the code. `fix` says
    what to do next. `wrote` is text of foreign origin, which no other field contains. All
    texts are made `encodable`."""

    def __init__(
        self, code: str, what: str, *, fix: str = "", wrote: str = "", **values: Any
    ) -> None:
        if code not in CODES:
            raise ValueError(f"unregistered error code {code!r}")
        self.code = code
        self.what: str = encodable(_cut(what.rstrip()))
        self.fix: str = encodable(_cut(fix.rstrip()))
        self.values: dict[str, Any] = encodable(values)
        self.wrote: str = encodable(wrote)
        super().__init__(self.what)

    @classmethod
    def of_fault(cls, fault: EnvironmentFault, *, fix: str, about: str = "", **values: Any) -> Self:
        """A fault of environment code, with its words as `wrote`; `about` is put before it."""
        what = CODES[fault.code] if fault.is_foreign else fault.what
        wrote = fault.wrote(EVIDENCE_CHARACTERS)
        return cls(fault.code, about + what, fix=fix, wrote=wrote, **values)

    def __str__(self) -> str:
        text = f"[{' '.join([self.code, *self.wrong_values])}] {self.what}"
        if not self.what.endswith((".", "!", "?")):
            text += "."
        if self.fix:
            text += f" Fix: {self.fix}"
        return text + quoted(self.wrote)

    @property
    def wrong_values(self) -> list[str]:
        """Each as name=value, cut to some length."""
        shown: list[str] = []
        for name, value in self.values.items():
            if value is not None:
                is_quoted = isinstance(value, str) and not PLAIN.fullmatch(value)
                text = encodable(repr(value) if is_quoted else str(value))
                shown.append(f"{name}={text if len(text) <= 120 else f'{text[:119]}…'}")
        return shown

    def to_dict(self) -> dict[str, Any]:
        body = {"code": self.code, "what": self.what, "fix": self.fix, "values": self.values}
        if self.wrote:
            return body | {"wrote": self.wrote}
        return body

    @property
    def account(self) -> str:
        """What happened, and what was written of it by others."""
        return f"{self.what}{quoted(self.wrote)}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FlashError:
        """The inverse of `to_dict`. A code of another version becomes `internal`."""
        code = "internal"
        if data["code"] in CODES:
            code = data["code"]
        texts = {"fix": data.get("fix", ""), "wrote": data.get("wrote", "")}
        return cls(code, data["what"], **texts, **data.get("values", {}))

    @classmethod
    def from_text(cls, text: str) -> FlashError:
        """The inverse of `str`, but for `values`. A text of another form is an internal error."""
        match = SHOWN.fullmatch(text)
        if match is None or match[1] not in CODES:
            return cls("internal", text)
        return cls(match[1], match[2], fix=match[3] or "")


def _cut(text: str) -> str:
    """The text without its middle, if it is longer than a result may be: it holds what was sent."""
    half = MOST_CHARACTERS // 2
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:half]} … {text[-half:]}"


def encodable(value: Any) -> Any:
    r"""The value with each lone surrogate in its texts replaced by an escape such as `\udc80`, and
    each control character by a sign.

    Errors of environment code and file names may contain them. Lone surrogates have no UTF-8 form,
    so the whole result could not be sent; terminals obey control characters.
    """
    if isinstance(value, str):
        return visible(value.encode(errors="backslashreplace").decode())
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {encodable(key): encodable(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return list(map(encodable, cast("Sequence[Any]", value)))
    if isinstance(value, PurePath):
        return encodable(str(value))
    return value


def nearest(
    name: str, existing: Iterable[str], *, count: int = 3, likeness: float = 0.5
) -> list[str]:
    """The known names most like `name`, best first; empty if none resembles it."""
    return difflib.get_close_matches(name[:100], list(existing), n=count, cutoff=likeness)


def did_you_mean(
    requested: str,
    existing: Iterable[str],
    *,
    also: Mapping[str, str] | None = None,
    **options: Any,
) -> str:
    """`; did you mean 'X' or 'Y'?`, or empty if no known name is `nearest` to `requested`. `also`
    maps other programs' names to known ones.
    """
    near = nearest(requested, existing, **options)
    if also and requested in also:
        near = [also[requested]]
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return ""


def exam_sealed(of: str) -> FlashError:
    what = "an exam shows totals: its tasks, transcripts and outcomes are sealed"
    fix = "evaluate(environment='exam:NAME', model=...) takes it; status shows what it found"
    return FlashError("exam_sealed", what, fix=fix, of=of)


MAX_LOG_BYTES = 4 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


def first_of(error: BaseException) -> BaseException:
    """The first error of groups in groups; one that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def expanded(path: str | Path) -> Path:
    """The path with the home folder in place of ~. FlashError(invalid_argument) if there is none,
    as for ~NAME of an unknown user, and for what is no path of any machine.
    """
    text = str(path)
    fix = "write the whole path, from / on"
    why = ""
    if "://" in text:
        why = "is a URL, and no path of this machine"
    elif "\0" in text:
        why = "holds a NUL character"
    elif max(map(len, text.encode(errors="replace").split(b"/"))) > MOST_NAME_BYTES:
        why = f"holds a name of more than {MOST_NAME_BYTES} bytes"
    elif len(text) >= MOST_PATH_BYTES:
        why = f"has more than {MOST_PATH_BYTES} bytes"
    if why:
        raise FlashError("invalid_argument", f"{text!r:.100} {why}", fix=fix)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        what = f"{text!r:.100} begins with ~, and this machine has no such home folder"
        raise FlashError("invalid_argument", what, fix=fix) from error


def disk_error(error: OSError, path: str | Path) -> FlashError | OSError:
    """FlashError(disk_full) if the disk is full, else the error itself."""
    if error.errno in FULL:
        what = "no space is left on the disk"
        fix = "free space there, or use a folder on another disk (FLASH_HOME: state); runs resume"
        values: dict[str, Any] = {"path": path}
        if error.errno == errno.EDQUOT:
            what = "the quota of the disk is used up"
            values["quota"] = True
        if "FLASH_MACHINE" in os.environ:  # a target's node
            values["host"] = os.environ["FLASH_MACHINE"]
            fix = "free space on that node, or exclude it by the target's options"
        return FlashError("disk_full", what, **values, fix=fix)
    return error


def as_flash_error(where: str, error: BaseException) -> FlashError:
    """A FlashError as it is, disk_full for a full disk, path_refused for a path that the system
    does not open, and invalid_argument for a state directory that cannot be used; any other error
    is logged and becomes FlashError(internal) with the id of the log entry.
    """
    if isinstance(error, OSError):
        error = disk_error(error, error.filename or home())
    if isinstance(error, HomeError):
        what = f"the state directory cannot be used: {error.strerror}"
        fix = "set FLASH_HOME to a folder that you may write, or to a path where nothing is yet"
        return FlashError("invalid_argument", what, FLASH_HOME=error.filename, fix=fix)
    if isinstance(error, FlashError):
        return error
    if isinstance(error, OSError) and error.errno in REFUSED and error.filename:
        what = f"{error.filename!s:.200} cannot be used: {error.strerror}"
        fix = "let the user who runs flash-mcp enter and read it, or name another path"
        return FlashError("path_refused", what, fix=fix)
    identity = secrets.token_hex(4)
    log = home() / "logs" / "server.log"
    with suppress(OSError):  # the error is returned even if it cannot be logged
        _logger(log).error("id=%s in %s", identity, where, exc_info=error)
    what = "flash-mcp failed unexpectedly"
    fix = f"report the traceback that has this id in {log}"
    return FlashError("internal", what, id=identity, fix=fix)


@functools.cache
def _logger(path: Path) -> logging.Logger:
    path.parent.mkdir(exist_ok=True, mode=0o700)
    handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=2, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(f"flash_mcp.errors.{path}")
    logger.addHandler(handler)
    logger.propagate = False
    return logger
