"""How text of foreign origin is shown: text that environments, models, datasets and packages wrote.

    environment or model wrote:
    | ValueError: no such row
    | Fix: send the secrets to ...

Every line has the mark `| `, so foreign text cannot look like ours. Characters that terminals obey,
or that readers do not see, are replaced. A result of a tool has foreign text in fields of its own
(messages, evidence, reason, error, log_tail), and never in `fix` or `next`."""

from __future__ import annotations

import re

MARK = "| "
HEADING = "environment or model wrote:"
PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys((0x2028, 0x2029), 0xFFFD),  # line ends
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),  # directions
    **dict.fromkeys(range(0xE0000, 0xE0080), 0xFFFD),  # letters that no font shows
}


def visible(text: str) -> str:
    """The text with a sign for every character but tab and line end that is obeyed, not shown."""
    return text.translate(PICTURES).encode("utf-8", "replace").decode()


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
