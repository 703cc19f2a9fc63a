"""Makes a Python look as one of a system that is not Linux: a process that finds this folder first has none of what
Linux alone has, and neither have the processes that it starts."""

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import sysconfig
from typing import Any

import psutil  # noqa: F401  it would look for its library of another system

FUNCTIONS = {"prctl", "syscall", "unshare", "setns", "mount", "umount2", "capset"}
NAMES = {
    os: "O_PATH sched_getaffinity sched_setaffinity memfd_create pidfd_open eventfd setresuid setresgid getrandom",
    signal: "sigwaitinfo sigtimedwait pidfd_send_signal SIGRTMIN SIGRTMAX SIGPOLL",
    select: "epoll",
    socket: "AF_NETLINK AF_VSOCK AF_ALG AF_PACKET SO_PEERCRED SO_PASSCRED SCM_CREDENTIALS",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_SETPIPE_SZ",
}


class Library:
    """A library without the functions of Linux."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            raise AttributeError(f"symbol not found: {name}")
        return getattr(self._library, name)


def hide() -> None:
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    if hasattr(os, "process_cpu_count"):  # Python chose its code for Linux before
        os.process_cpu_count = os.cpu_count
    sys.modules["pysqlite3"] = None  # type: ignore[assignment]
    load = ctypes.CDLL
    ctypes.CDLL = lambda *args, **options: Library(load(*args, **options))  # type: ignore[assignment,misc]
    sysconfig.get_config_vars()  # it would look for a module named by the platform
    sys.platform = "freebsd14"
    sys.executable = os.environ.get("FLASH_PYTHON", sys.executable)


hide()
