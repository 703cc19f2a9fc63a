"""What a chat template makes of conversations: texts that read like control tokens stay texts, and
a template that loops is ended."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

from flash_mcp.protocol.errors import FlashError

RENDER_LIMIT_S = 5.0
_CUT = "\u2063cut\u2063"  # invisible separators: no template contains them


class ControlTokens:
    """The control tokens of a tokenizer, such as the end of a turn, and texts that read like them:
    those of a user, a tool or the model itself.

    A template writes both into one text. So `apart` cuts the texts before it is rendered, and
    `encode` encodes the pieces on both sides of a cut by themselves.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        tokens = {str(token) for token in tokenizer.all_special_tokens}
        tokens.update(map(str, tokenizer.convert_ids_to_tokens(sorted(end_ids))))
        for token in tokenizer.added_tokens_decoder.values():
            if token.special:
                tokens.add(token.content)
        # The longest first: one may begin like another
        self.pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        self._starts = re.compile(f"(?=({self.pattern}))(.)", re.DOTALL)

    def found(self, text: str) -> str | None:
        """The first control token that the text reads like; None without any."""
        match = self._starts.search(text)
        return match and match[1]

    def apart(self, value: Any) -> Any:
        """The JSON value with cuts in the texts that read like control tokens."""
        if isinstance(value, str):
            return self._starts.sub(rf"\2{_CUT}", value)
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            return {name: self.apart(part) for name, part in fields.items()}
        if isinstance(value, list):
            return list(map(self.apart, cast("list[Any]", value)))
        return value

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text. FlashError(template_unsupported) if the tokenizer does not encode
        its pieces one by one."""
        pieces = text.split(_CUT)
        ids: list[int] = []
        for piece in pieces:
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        if len(pieces) > 1:
            whole = self.tokenizer.encode(whole_of(text), add_special_tokens=False)
            if self.tokenizer.decode(ids) != self.tokenizer.decode(whole):
                token = self.found(whole_of(text[len(pieces[0]) - 1 :]))
                what = f"a message holds {token!r}, a control "
                what += "token of this model, which its tokenizer cannot encode as text"
                fix = "remove it from the text, or write it otherwise, such as with a space"
                raise FlashError("template_unsupported", what, fix=fix)
        return ids


def whole_of(text: str) -> str:
    """A rendered text without its cuts."""
    return text.replace(_CUT, "")


control_tokens = functools.lru_cache(maxsize=16)(ControlTokens)


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
    Of a conversation with texts that read like control tokens, it returns ids that hold none.

    vLLM renders in a few threads. One that loops would hold up every other conversation."""
    from transformers import PreTrainedTokenizerBase  # noqa: PLC0415

    tokenizers: Any = PreTrainedTokenizerBase  # its arguments are partly untyped
    unlimited = tokenizers.apply_chat_template

    @functools.wraps(unlimited)
    def limited(tokenizer: Any, conversation: Any, *args: Any, **options: Any) -> Any:
        control = control_tokens(tokenizer)
        said = {"conversation": conversation, "tools": options.get("tools")}
        apart = control.apart(said)
        try:
            with time_limit(RENDER_LIMIT_S):
                if apart == said:
                    return unlimited(tokenizer, conversation, *args, **options)
                options |= apart | {"tokenize": False}
                return control.encode(unlimited(tokenizer, *args, **options))
        except TooLongError:
            what = f"the chat template took longer than {RENDER_LIMIT_S:g} s"
            raise ValueError(what) from None

    tokenizers.apply_chat_template = limited
