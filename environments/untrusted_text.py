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
