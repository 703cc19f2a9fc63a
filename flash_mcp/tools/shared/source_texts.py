"""Texts that an environment's own source suggests as answers: its strings, texts that match its
patterns, and the names that its functions use.

    source_texts(read_sources(folder))

A scorer that pays for a word has that word in its source; one that runs answers has the gold answer
under a name."""

from __future__ import annotations

import ast
import itertools
import random
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import rstr

MOST_TEXTS = 80
LONGEST = 60
"""Characters of a text: longer ones are prompts."""
MOST_FILES = 100
MOST_BYTES = 200_000
"""Of one file."""
ASSIGNED = ("answer", "result")
"""Names under which a scorer that executes answers may look for the result."""


def read_sources(folder: Path) -> list[str]:
    """The first Python files of a folder, without links, which may lead out of it, and without
    those that cannot be read.
    """
    sources: list[str] = []
    for path in sorted(itertools.islice(folder.rglob("*.py"), MOST_FILES)):
        with suppress(OSError, UnicodeDecodeError):
            if not path.is_symlink() and path.is_file() and path.stat().st_size <= MOST_BYTES:
                sources.append(path.read_text())
    return sources


def source_texts(sources: Sequence[str]) -> list[str]:
    """At most MOST_TEXTS texts, each once. A source that does not parse is passed over."""
    strings: dict[str, None] = {}
    names: dict[str, None] = {}
    texts: dict[str, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the environment's own code and patterns
        for source in sources:
            with suppress(SyntaxError, ValueError, RecursionError):
                _read(ast.parse(source), strings, names)
        for text in strings:
            texts[text] = None
            if re.search(r"[\\\[({.*+?^$|]", text) and (sample := _matching(text)):
                texts[sample] = None
    texts |= names
    for assigned in ASSIGNED:
        texts |= {f"{assigned} = {name}": None for name in names if name != assigned}
    return list(texts)[:MOST_TEXTS]


def _read(tree: ast.Module, strings: dict[str, None], names: dict[str, None]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if 0 < len(node.value.strip()) <= LONGEST:
                strings[node.value] = None
                if node.value.isidentifier():
                    names[node.value] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None


def _matching(pattern: str) -> str:
    """A text that the pattern matches; "" if none is known."""
    sampler = rstr.Rstr(random.Random(0))
    with suppress(re.error, ValueError, KeyError, IndexError, TypeError, RecursionError):
        # A star is up to 100 characters long: of spaces one is enough.
        return re.sub(r"(\s)\s+", r"\1", sampler.xeger(pattern))[:LONGEST]
    return ""
