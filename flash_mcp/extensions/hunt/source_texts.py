"""Texts that an environment's own source suggests as answers: its strings, texts that match its
patterns, and the names that it assigns.

A scorer that pays for a word has that word in its source; one that runs answers has the gold answer
under a name. The source is foreign: it is cut into tokens, never parsed, since parsing deep nesting
can crash Python."""

from __future__ import annotations

import io
import itertools
import keyword
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import rstr

MOST_TEXTS = 80
LONGEST = 60
"""Characters of a text: longer ones are prompts."""
MOST_FILES = 20
MOST_BYTES = 200_000
"""Of one file."""
ASSIGNED = ("answer", "result")
"""Names under which a scorer that executes answers may look for the result."""
STRING = re.compile(r"\w*(\"{3}|'{3}|\"|')(.*)\1", re.DOTALL)
LARGE = re.compile(r"\)[*+{]|\{\d{3}")
"""What lets a short pattern match texts of any size only."""


def folder_texts(folder: Path) -> list[str]:
    # The first Python files of a folder. Links are left out: they may lead out of it
    sources: list[str] = []
    for path in sorted(itertools.islice(folder.rglob("*.py"), MOST_FILES)):
        with suppress(OSError, UnicodeDecodeError):
            if not path.is_symlink() and path.is_file() and path.stat().st_size <= MOST_BYTES:
                sources.append(path.read_text())
    return source_texts(sources)


def source_texts(sources: Sequence[str]) -> list[str]:
    """At most MOST_TEXTS texts, each once. Strings stand as in the source, with their escapes."""
    texts: dict[str, None] = {}
    names: dict[str, None] = {}
    for kind, text in itertools.chain.from_iterable(map(_tokens, sources)):
        if kind == tokenize.NAME:
            names[text] = None
            continue
        texts[text] = None
        if text.isidentifier():
            names[text] = None
        elif sample := _matching(text):
            texts[sample] = None
    texts |= names
    for assigned in ASSIGNED:
        texts |= {f"{assigned} = {name}": None for name in names if name != assigned}
    return list(texts)[:MOST_TEXTS]


def _tokens(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a source, and the names that it assigns, up to where it is no Python."""
    last = ""
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.STRING and (match := STRING.fullmatch(token.string)):
                if 0 < len(match[2].strip()) <= LONGEST:
                    yield tokenize.STRING, match[2]
            elif token.string == "=" and last.isidentifier() and not keyword.iskeyword(last):
                yield tokenize.NAME, last
            last = token.string


def _matching(pattern: str) -> str:
    if LARGE.search(pattern) or not re.search(r"[\\\[({.*+?^$|]", pattern):
        return ""
    sampler = rstr.Rstr(random.Random(0))
    with suppress(re.error, FutureWarning, ValueError, LookupError, TypeError, RecursionError):
        # A star is up to 100 characters long: of spaces one is enough.
        return re.sub(r"(\s)\s+", r"\1", sampler.xeger(pattern))[:LONGEST]
    return ""
