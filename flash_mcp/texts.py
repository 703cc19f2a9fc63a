"""What models, environments and files of others wrote, on its way to a terminal or a page."""

from __future__ import annotations

_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


def visible(text: str) -> str:
    """The text with a sign for every control character but tab and line end: a terminal would obey them, to set its
    title, fill the clipboard or write over what stands there.
    """
    return text.translate(_PICTURES).encode("utf-8", "replace").decode()
