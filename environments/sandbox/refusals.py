"""How a refusal of the sandbox looks to environment code, and what the caller is told about it."""

from __future__ import annotations

import errno
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

from environments.sandbox.namespaces import OLD
from environments.sandbox.needs import FILE, READABLE_VARIABLE, Bounds, Needs
from environments.settings import FILE as SETTINGS_FILE

OFFLINE = re.compile("on the Hub|offline mode is enabled")
"""What datasets and huggingface_hub say without network. Their own classes differ by version."""


class NetworkRefusedError(PermissionError):
    """Environment code used the network, but its environment.toml does not ask for it."""

    def __init__(self) -> None:
        what = (
            f"this environment has no network; network = true in its {FILE} asks for it, and the "
            f"operator grants it in {SETTINGS_FILE}"
        )
        super().__init__(errno.EACCES, what)


def explain_refusals(bounds: Bounds) -> None:
    """Make this interpreter explain a refused network where the kernel would only refuse it. The
    client of the Hugging Face hub would try again for half a minute.
    """
    if not bounds.needs.network:
        os.environ["HF_HUB_OFFLINE"] = "1"
        sys.addaudithook(partial(_explain_refusal, bounds.needs.endpoint))


def _explain_refusal(has_loopback: bool, event: str, args: tuple[Any, ...]) -> None:
    """An audit hook. It only explains; seccomp is what refuses."""
    host: Any = ""
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = cast("tuple[Any, ...]", args[1])[0]
    elif event != "socket.__new__" or args[1] not in (2, 10):
        return
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "localhost")
    if not (has_loopback and (name == "localhost" or name.startswith("127."))):
        raise NetworkRefusedError


def message_of(error: BaseException) -> str:
    """The message of an exception, whose own code may fail to write it."""
    try:
        return str(error) or "no message"
    except Exception:
        return "its message could not be shown"


def refusal(error: BaseException) -> tuple[str, str] | None:
    """(error code, explanation) if the sandbox caused an exception of environment code."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if result := _refusal(cause):
            return result
        cause = cause.__cause__ or cause.__context__
    return None


def _refusal(error: BaseException) -> tuple[str, str] | None:
    number = error.errno if isinstance(error, OSError) else None
    usual = Needs()
    is_offline = isinstance(error, OSError) and OFFLINE.search(message_of(error))
    if is_offline or isinstance(error, NetworkRefusedError):
        about = f"it has no network unless its {FILE} says network = true"
        return "environment_network", f"{about} and the operator's {SETTINGS_FILE} grants it"
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        about = f"it may use the memory_gib of its {FILE} ({usual.memory_gib:g} if left out)"
        return "environment_memory", about
    if "can't start new thread" in message_of(error) or number == errno.EAGAIN:
        about = f"it may have the processes of its {FILE} ({usual.processes} if left out)"
        return "environment_processes", f"{about}, threads included"
    if number == errno.EFBIG:
        about = f"a file may have the file_gib of its {FILE} ({usual.file_gib:g} if left out)"
        return "environment_file_size", about
    is_refused = number in (errno.EACCES, errno.EPERM, errno.EROFS)
    if isinstance(error, OSError) and error.filename and (is_refused or _is_left_out(error)):
        return "environment_access", (
            "it may read its own folder and installed programs, and write to its temporary folder "
            f"(tempfile); the server's variable {READABLE_VARIABLE} names more folders to read"
        )
    return None


def _is_left_out(error: OSError) -> bool:
    """Whether a file is missing where the sandbox's own root leaves out what the machine has."""
    if error.errno != errno.ENOENT or not Path(OLD).exists():
        return False
    path = Path(os.path.realpath(os.fsdecode(error.filename)))
    folder = next(parent for parent in path.parents if parent.exists())
    return folder.stat().st_dev == Path("/").stat().st_dev
