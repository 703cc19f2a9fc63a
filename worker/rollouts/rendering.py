"""The time that a chat template may take: it is a program of the model's authors, and may loop."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

RENDER_LIMIT_S = 5.0


class TooLongError(Exception):
    """The time limit was reached."""


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TooLongError in the block after so many seconds, as soon as it runs Python code."""
    thread = ctypes.c_ulong(threading.get_ident())
    guard = threading.Lock()
    ended = False

    def interrupt() -> None:
        with guard:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TooLongError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with guard:
            ended = True
        timer.cancel()


def limit_templates() -> None:
    """Limit every tokenizer of transformers in this process: ValueError for one that takes longer.

    vLLM renders in a few threads. One that loops would hold up every other conversation."""
    from transformers import PreTrainedTokenizerBase  # noqa: PLC0415

    tokenizers: Any = PreTrainedTokenizerBase  # its arguments are partly untyped
    unlimited = tokenizers.apply_chat_template

    @functools.wraps(unlimited)
    def limited(*args: Any, **options: Any) -> Any:
        try:
            with time_limit(RENDER_LIMIT_S):
                return unlimited(*args, **options)
        except TooLongError:
            what = f"the chat template took longer than {RENDER_LIMIT_S:g} s"
            raise ValueError(what) from None

    tokenizers.apply_chat_template = limited
