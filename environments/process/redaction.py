"""Takes secrets out of what environment code says, where it enters: replies, tracebacks, printed
text.

It guards against accidents. Code that wants to give a secret away can spell it in ways that nobody
searches for."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import quote, quote_plus

MIN_LENGTH = 4
"""Shorter values are not searched for: replacing "1" or "no" everywhere would garble every text."""
MIN_ENCODED_LENGTH = 8
"""Shorter values are not searched for in base64 and hex, where so few characters may come about by
chance.
"""
REPLACEMENT = "[secret]"
BREAK = r"(?:(?:\r?\n|\\n)[ \t]*)?"
"""A long text is often broken into lines, within JSON too."""


class Redactor:
    """Knows the secrets of one host. `longest` is how many characters a spelling may take."""

    def __init__(self, secrets: Iterable[str]) -> None:
        spellings = {spelling for secret in secrets for spelling in _spellings(secret)}
        # The longest first: of two that begin alike the shorter would leave the rest of the other.
        ordered = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        self._pattern = (
            re.compile("|".join(BREAK.join(map(re.escape, text)) for text in ordered))
            if ordered
            else None
        )
        self.longest = 4 * len(ordered[0]) if ordered else 0

    def text(self, text: str) -> str:
        return self._pattern.sub(REPLACEMENT, text) if self._pattern else text

    def value(self, value: Any) -> Any:
        """JSON, with every text in it redacted; names of fields too."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self.text(name): self.value(item) for name, item in items}
        return value

    def split(self, text: str) -> tuple[str, str]:
        """(redacted beginning, rest): no secret may be cut, so the rest waits for what follows."""
        cut = max(0, len(text) - self.longest)
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() < cut < match.end():
                cut = match.start()
        return self.text(text[:cut]), text[cut:]


def _spellings(secret: str) -> set[str]:
    """How a secret may stand in a text: as it is, escaped, in base64 at any offset, in hex."""
    secret = secret.strip()
    if len(secret) < MIN_LENGTH:
        return set()
    found = {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
    }
    found |= {quote(secret), quote(secret, safe=""), quote_plus(secret)}
    raw = secret.encode(errors="surrogateescape")
    if len(raw) >= MIN_ENCODED_LENGTH:
        found |= {raw.hex(), raw.hex().upper()}
        for offset in range(3):
            # Characters at the ends are made of bytes of what stands before and after, too.
            coded = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
            inner = coded[(0, 2, 3)[offset] : len(coded) - ((offset + len(raw)) % 3 > 0)]
            found |= {inner, inner.replace("+", "-").replace("/", "_")}
    return found
