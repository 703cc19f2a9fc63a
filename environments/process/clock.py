"""A wall clock that goes ahead, to find environments that read it.

    shift_clock(400 * 86400)     # once, before environment code is imported

Shifts what Python code reads: `time` and `datetime`. C code that asks the system, modules that took
`datetime` out of its module before, and compiled modules see the real time."""

from __future__ import annotations

import copyreg
import datetime
import time
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from typing import Any, cast

SHIFT_VARIABLE = "FLASH_CLOCK_SHIFT_S"
"""The variable of an environment's process that says by how many seconds."""
_time, _time_ns = time.time, time.time_ns
_real_datetime = datetime.datetime


def shift_clock(seconds: int) -> None:
    """Let the wall clock go ahead by so many seconds. Monotonic clocks stay."""
    time.time = lambda: _time() + seconds
    time.time_ns = lambda: _time_ns() + seconds * 10**9
    time.gmtime = _with_default(time.gmtime, time.time)
    time.localtime = _with_default(time.localtime, time.time)
    time.ctime = _with_default(time.ctime, time.time)
    time.asctime = _with_default(time.asctime, time.localtime)
    strftime = time.strftime
    time.strftime = lambda form, when=None: strftime(form, when or time.localtime())  # type: ignore
    # pickle would look the class up in its module, where it no longer is.
    copyreg.pickle(_real_datetime, _pickled)
    datetime.datetime = _shifted_datetime(datetime.timedelta(seconds=seconds))  # type: ignore
    loader: Any = ExtensionFileLoader
    loader.create_module = _with_real_datetime(loader.create_module)
    loader.exec_module = _with_real_datetime(loader.exec_module)


def _with_real_datetime(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which loads a compiled module: its classes may extend only the real datetime."""

    def wrapped(*arguments: Any) -> Any:
        before = datetime.datetime
        datetime.datetime = _real_datetime  # type: ignore
        try:
            return function(*arguments)
        finally:
            datetime.datetime = before  # type: ignore

    return wrapped


def _pickled(moment: datetime.datetime) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    _, state, *_ = cast("tuple[Any, tuple[Any, ...]]", moment.__reduce__())
    return _unpickled, state


def _unpickled(*state: Any) -> datetime.datetime:
    return _real_datetime(*state)


def _with_default(function: Callable[[Any], Any], now: Callable[[], Any]) -> Any:
    """`function` of a time, which is `now` if it is left out."""

    def wrapped(moment: Any = None) -> Any:
        return function(now() if moment is None else moment)

    return wrapped


class _LooksReal(type):
    """A class of which all real datetimes are instances."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real_datetime)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _real_datetime)


def _shifted_datetime(shift: datetime.timedelta) -> type[datetime.datetime]:
    """datetime.datetime whose now is later. It makes real ones: they compare and pickle as ever."""

    class ShiftedDatetime(_real_datetime, metaclass=_LooksReal):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return _real_datetime(*args, **kwargs)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return _real_datetime.now(tz) + shift

        @classmethod
        def utcnow(cls) -> Any:
            return _real_datetime.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return _real_datetime.now() + shift

    return ShiftedDatetime
