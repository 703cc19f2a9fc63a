"""Checks how dense the code of each package is, and how often it uses names that say nothing.

All figures are counted per 1,000 lines that are not blank."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
VAGUE_NAMES = {"found", "each", "told", "given", "asked", "known", "made", "wanted", "here"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
AT_MOST = {
    "flash_mcp": {"vague names": 4.0, "conditional expressions": 14.0, "comprehensions": 22.0},
    "worker": {"vague names": 4.0},
    "environments": {"vague names": 4.0},
}
AT_LEAST = {"flash_mcp": {"comments": 12.0}, "worker": {"comments": 12.0}}


def is_comment_line(token: tokenize.TokenInfo) -> bool:
    """Whether it is a comment on a line of its own. One that directs a tool explains nothing."""
    is_alone = token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    return is_alone and not token.string.startswith(("# pyright:", "# noqa", "# type:"))


def counts_of(source: str) -> Counter[str]:
    counts = Counter(lines=sum(bool(line.strip()) for line in source.splitlines()))
    for node in ast.walk(ast.parse(source)):
        counts["conditional expressions"] += isinstance(node, ast.IfExp)
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        counts["vague names"] += token.type == tokenize.NAME and token.string in VAGUE_NAMES
        counts["comments"] += is_comment_line(token)
    return counts


def densities(folder: Path) -> dict[str, float]:
    """Occurrences per 1,000 lines that are not blank, in all of the folder."""
    counts: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        counts += counts_of(path.read_text())
    lines = counts.pop("lines")
    return {what: 1000 * counts[what] / lines for what in sorted({*counts})}


def main(folders: list[str]) -> int:
    """Print the figures of FOLDERS, or check those of the packages against the limits."""
    if folders:
        for folder in folders:
            figures = densities(ROOT / folder).items()
            print(folder, ", ".join(f"{what} {value:.1f}" for what, value in figures))  # noqa: T201
        return 0
    excesses: list[str] = []
    for package in AT_MOST:
        figures = densities(ROOT / package)
        for what, limit in AT_MOST[package].items():
            if figures.get(what, 0) > limit:
                excesses.append(f"{package}: {figures[what]:.1f} {what}, at most {limit}")
        for what, limit in AT_LEAST.get(package, {}).items():
            if figures.get(what, 0) < limit:
                excesses.append(f"{package}: {figures.get(what, 0):.1f} {what}, at least {limit}")
    sys.stderr.writelines(f"{excess} per 1,000 lines\n" for excess in excesses)
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
