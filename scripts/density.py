"""Checks that the packages use few names that say nothing of a value.

    scripts/density.py                      fails if a package uses more than MAX_VAGUE_NAMES
    scripts/density.py FOLDER...            prints these figures, and how dense the code is

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
MAX_VAGUE_NAMES = 4.0
PACKAGES = ("environments", "flash_mcp", "worker")


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
        counts.update(counts_of(path.read_text()))
    lines = counts.pop("lines")
    return {what: 1000 * counts[what] / lines for what in sorted({*counts})}


def main(folders: list[str]) -> int:
    """The exit status."""
    if folders:
        for folder in folders:
            figures = densities(ROOT / folder).items()
            print(folder, ", ".join(f"{what} {value:.1f}" for what, value in figures))  # noqa: T201
        return 0
    shares = {package: densities(ROOT / package)["vague names"] for package in PACKAGES}
    excess = {package: share for package, share in shares.items() if share > MAX_VAGUE_NAMES}
    names = ", ".join(sorted(VAGUE_NAMES))
    for package, share in excess.items():
        sys.stderr.write(
            f"{package} uses {names} {share:.1f} times in 1,000 lines, at most "
            f"{MAX_VAGUE_NAMES:g}: name each value by what it is\n"
        )
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
