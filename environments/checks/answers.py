"""Answers that a model can write without solving a task, and the parts of a gold answer."""

from __future__ import annotations

import re

SHORT_ANSWER = 24
"""A gold answer of at most so many characters says nothing else once a character is changed."""
JUNK = (
    "asdf qwer zxcv",
    "I cannot help with that.",
    "<answer></answer> {} [] <<>> \\boxed{}",
    "\u2603 \u00ff \u202e \U0001f9ea \x00 \ud800",
    "bla " * 5000,
)
STATED = r"(?:answer|solution|gold|hint|result|output)\W{0,3}(?:is|are)?\W{0,3}"
"""What stands before a gold answer that a prompt gives away."""
FRESH = "a text that no other check has played"
NONSENSE = (
    "1/0",
    "nan",
    "1e999",
    "(",
    "[" * 100_000,
    "raise SystemExit",
    "null",
    "9" * 5000,
)
"""Answers of about the right form that make careless parsers raise."""


def parts(text: str) -> tuple[str, str, str]:
    """What stands before, in and behind the last tags of an answer."""
    found = re.fullmatch(r"(.*<(\w+)>)(.*?)(</\2>.*)|(.*\\boxed\{)(.*)(\}.*)", text, re.DOTALL)
    if found is None:
        return "", text, ""
    if found[2]:
        return found[1], found[3], found[4]
    return found[5], found[6], found[7]


def nearly(gold: str) -> list[str]:
    """Short gold answers with the last letter or digit changed, one more at either end, and
    without the minus. In a long one a character need not matter.
    """
    before, inner, after = parts(gold)
    last = re.search(r"\w(?=\W*$)", inner)
    if last is None or len(inner) > SHORT_ANSWER:
        return []
    new = "y" if last[0] == "x" else "x"
    if last[0].isdecimal():
        new = str((int(last[0]) + 1) % 10)
    texts = [inner[: last.start()] + new + inner[last.end() :]]
    if inner[:1].isalnum() and inner[-1:].isalnum():
        texts += [new.replace("0", "1") + inner, inner + new]
    if re.match(r"-\d", inner):
        texts.append(inner[1:])
    return [before + text + after for text in texts]


def tags(prompt: str) -> list[tuple[str, str]]:
    """The tags that a prompt asks answers to stand in."""
    names = dict.fromkeys(re.findall(r"</(\w{1,20})>", prompt))
    found = [(f"<{name}>", f"</{name}>") for name in names if f"<{name}>" in prompt]
    if "\\boxed{" in prompt:
        found.append(("\\boxed{", "}"))
    return found[:3]
