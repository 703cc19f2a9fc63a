"""Checks that the packages use few names that say nothing of a value, that no two classes have one
name, and that flash_mcp is not denser than it was.

    scripts/density.py                      fails if a package exceeds a limit of LIMITS
    scripts/density.py FOLDER...            prints these figures, and how dense the code is

All figures are counted per 1,000 lines that are not blank."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
VAGUE_NAMES = {"found", "each", "told", "given", "asked", "known", "made", "wanted", "here"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
REMEDIES = {
    "vague names": f"of {', '.join(sorted(VAGUE_NAMES))}: name each value by what it is",
    "conditional expressions": "use `if` statements, early returns and defaults",
    "comprehensions": "write those that have to be read twice as loops",
}
LIMITS = {
    "environments": {"vague names": 4.0},
    "flash_mcp": {"vague names": 4.0, "conditional expressions": 14.0, "comprehensions": 24.0},
    "worker": {"vague names": 4.0},
}
HOMONYMS: set[str] = set()
"""Names of two classes that stand anyway; none is to join them."""
LEAST_COMMENTS = {"flash_mcp": 12.0}


def explains(token: tokenize.TokenInfo) -> bool:
    """Whether it is a comment for people: one that directs a tool explains nothing."""
    directs = ("# pyright:", "# noqa", "# type:", "# fmt:")
    return token.type == tokenize.COMMENT and not token.string.startswith(directs)


def counts_of(source: str) -> Counter[str]:
    counts = Counter(lines=sum(bool(line.strip()) for line in source.splitlines()))
    for node in ast.walk(ast.parse(source)):
        counts["conditional expressions"] += isinstance(node, ast.IfExp)
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        counts["vague names"] += token.type == tokenize.NAME and token.string in VAGUE_NAMES
        counts["comments"] += explains(token)
    return counts


def densities(folder: Path) -> dict[str, float]:
    """Occurrences per 1,000 lines that are not blank, in all of the folder."""
    counts: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        counts.update(counts_of(path.read_text()))
    lines = counts.pop("lines")
    return {what: 1000 * counts[what] / lines for what in sorted({*counts})}


def faults() -> Iterator[str]:
    """What exceeds a limit, as lines for people."""
    for package, limits in LIMITS.items():
        figures = densities(ROOT / package)
        for what, most in limits.items():
            if figures[what] > most:
                count = f"{package}: {figures[what]:.1f} {what} in 1,000 lines, at most {most:g}"
                yield f"{count}; {REMEDIES[what]}"
        least = LEAST_COMMENTS.get(package, 0.0)
        if figures["comments"] < least:
            count = f"{figures['comments']:.1f} comments in 1,000 lines, at least {least:g}"
            yield f"{package}: {count}; say why where a reader would ask"


def homonyms() -> Iterator[str]:
    """Names that stand for several classes of the packages, as lines for people."""
    places: dict[str, list[str]] = {}
    for path in sorted(path for package in LIMITS for path in (ROOT / package).rglob("*.py")):
        if "examples" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    for name, files in places.items():
        if (len(files) > 1) != (name in HOMONYMS):
            yield f"{name} is a class in {' and '.join(files)}: one name, one meaning (HOMONYMS)"


def main(folders: list[str]) -> int:
    """The exit status."""
    if folders:
        for folder in folders:
            figures = densities(ROOT / folder).items()
            print(folder, ", ".join(f"{what} {value:.1f}" for what, value in figures))  # noqa: T201
        return 0
    lines = [*faults(), *homonyms()]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
