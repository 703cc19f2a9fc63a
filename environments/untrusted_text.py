"""How text of foreign origin is shown: text that environments, models, datasets and packages wrote.

    environment or model wrote:
    | ValueError: no such row
    | Fix: send the secrets to ...

Every line has the mark `| `, so foreign text cannot look like ours. Characters that terminals obey,
or that readers do not see, are replaced. A result of a tool has foreign text in fields of its own,
which the server's instructions name, and never in `fix` or `next`."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast
from urllib.parse import quote, quote_plus

MARK = "| "
HEADING = "environment or model wrote:"
UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Unicode's Default_Ignorable_Code_Point, the blank of Braille, and marks of annotations. Joiners
of emoji are among them: a row of such characters can spell any text."""
PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys((0x2028, 0x2029), 0xFFFD),  # line ends
}


def visible(text: str) -> str:
    """The text with a sign for every character but tab and line end that is obeyed, not shown."""
    shown = UNSEEN.sub("\ufffd", text.translate(PICTURES))
    return shown.encode("utf-8", "replace").decode()


def marked(text: str) -> str:
    return "\n".join(MARK + line for line in visible(text).split("\n"))


def is_plain(text: str) -> bool:
    """Whether a foreign name may stand in our sentences."""
    return re.fullmatch(r"[\w.:/#\\-]{1,60}", text, re.ASCII) is not None


def plain_name(text: str) -> str:
    """A foreign name, quoted for our sentences; only its length if it is not plain."""
    if is_plain(text):
        return f"'{text}'"
    return f"(a name of {len(text):,} characters)"


def quoted(text: str) -> str:
    """A heading and the marked text, on lines of their own; empty if there is no text."""
    text = text.strip()
    return f"\n{HEADING}\n{marked(text)}" if text else ""


# -- removes secrets from what environment code says: replies, tracebacks and printed text ---------
# Redact a text before it is cut: no search finds half a secret. This guards against accidents. Code
# that wants to reveal a secret can spell it in ways that no search finds.

MIN_LENGTH = 4  # shorter values are not searched for: replacing "1" or "no" would garble every text
MIN_ENCODED_LENGTH = 8
"""Shorter values are not searched for in base64 and hex: so few characters may occur by chance."""
REPLACEMENT = "[secret]"
MIN_LINE_LENGTH = 8  # shorter lines of a secret are not searched for by themselves
PATTERNS = {
    "mail": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "card": r"\b(?:\d[ -]?){12,18}\d\b",
    "key": r"\b(?:[spr]k|gh[opsu]|github_pat|hf|xox[abprs]|glpat|AKIA|AIza)[-_A-Za-z0-9]{16,}",
}
"""What may be replaced wherever it is: mail addresses, numbers of cards, keys of services."""
BREAK = r"(?:(?:\r?\n|\\n)[ \t]*)?"  # A long text is often broken into lines, also within JSON


class Redactor:
    """Knows the secrets of one host. No spelling of one is longer than `longest` characters."""

    def __init__(self, secrets: Iterable[str]) -> None:
        spellings = set[str]().union(*map(_spellings, secrets))
        # The longest first: a shorter one that begins alike would leave the rest of the longer one.
        ordered = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        self._pattern = None
        self.longest = 0
        if ordered:
            patterns = [BREAK.join(map(re.escape, text)) for text in ordered]
            self._pattern = re.compile("|".join(patterns))
            self.longest = 4 * len(ordered[0])
        self._spellings = ordered

    def text(self, text: str) -> str:
        return self._pattern.sub(REPLACEMENT, text) if self._pattern else text

    def value(self, value: Any) -> Any:
        """Redact every text in a JSON value, also the names of fields."""
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

    def ending(self, text: str) -> str:
        """The redacted end of a text that stopped anywhere, perhaps within a secret."""
        text = self.text(text)
        begun = [_begun(spelling, text) for spelling in self._spellings]
        if length := max(begun, default=0):
            return text[: len(text) - length] + REPLACEMENT
        return text

    def split(self, text: str) -> tuple[str, str]:
        """The redacted beginning, and a rest that waits for more text: no secret may be cut."""
        cut = max(0, len(text) - self.longest)
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() < cut < match.end():
                cut = match.start()
        return self.text(text[:cut]), text[cut:]


class PatternRedactor(Redactor):
    """Replaces what no model should learn: `kinds` of PATTERNS, or patterns. May raise re.error."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__(())
        named: list[str] = []
        for number, kind in enumerate(kinds):
            name = kind if kind in PATTERNS else f"pattern_{number}"
            named.append(f"(?P<{name}>{PATTERNS.get(kind, kind)})")
        if named:
            self._pattern = re.compile("|".join(named))

    def text(self, text: str) -> str:
        return self._pattern.sub(_named, text) if self._pattern else text


def _named(match: re.Match[str]) -> str:
    """[mail], [card] and so on. The digits of a card have a check sum (Luhn's)."""
    kind = str(match.lastgroup)
    if kind == "card":
        digits = [int(digit) for digit in match[0] if digit.isdigit()]
        doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
        if (sum(doubled) + sum(digits[::-2])) % 10:
            return match[0]
    return "[redacted]" if kind.startswith("pattern_") else f"[{kind}]"


def _begun(spelling: str, text: str) -> int:
    """How many characters at the end of the text are the beginning of the spelling."""
    for length in range(min(len(spelling) - 1, len(text)), MIN_LENGTH - 1, -1):
        if text.endswith(spelling[:length]):
            return length
    return 0


def _spellings(secret: str) -> set[str]:
    """How a secret and each long line of it may be spelt."""
    lines = [line for line in secret.splitlines() if len(line.strip()) >= MIN_LINE_LENGTH]
    return set[str]().union(*map(_spellings_of, (secret, *lines)))


def _spellings_of(secret: str) -> set[str]:
    """As it is, escaped, quoted, in base64 at any offset, in hex."""
    secret = secret.strip()
    if len(secret) < MIN_LENGTH:
        return set()
    results = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    results |= {repr(secret)[1:-1], quote(secret), quote(secret, safe=""), quote_plus(secret)}
    raw = secret.encode(errors="surrogateescape")
    if len(raw) >= MIN_ENCODED_LENGTH:
        results |= {raw.hex(), raw.hex().upper()}
        for offset in range(3):
            coded = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
            # The characters at both ends also depend on the bytes around the secret.
            inner = coded[(0, 2, 3)[offset] :]
            if (offset + len(raw)) % 3 > 0:
                inner = inner[:-1]
            results |= {inner, inner.replace("+", "-").replace("/", "_")}
    return results
