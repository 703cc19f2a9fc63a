"""Checks that no function has more than 60 lines or a complexity over 20."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from radon.visitors import Class, ComplexityVisitor, Function

ROOT = Path(__file__).parent.parent
PACKAGES = ("environments", "flash_mcp", "worker")
MAX_LINES = 60
MAX_COMPLEXITY = 20


def functions(blocks: Iterable[Function | Class]) -> Iterator[Function]:
    """Functions and methods. Radon counts a closure as part of the function around it."""
    for block in blocks:
        if isinstance(block, Function):
            yield block
        else:
            yield from functions(block.methods)
            yield from functions(block.inner_classes)


def offenders() -> dict[str, str]:
    """What is too large, by path::function, and its size."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            visitor = ComplexityVisitor.from_code(path.read_text())
            for function in functions([*visitor.functions, *visitor.classes]):
                lines = function.endline - function.lineno + 1
                if lines > MAX_LINES or function.complexity > MAX_COMPLEXITY:
                    name = f"{path.relative_to(ROOT)}::{function.fullname}"
                    found[name] = f"{lines} lines, complexity {function.complexity}"
    return found


def main() -> int:
    found = offenders()
    limits = f"at most {MAX_LINES} lines and a complexity of {MAX_COMPLEXITY}"
    sys.stderr.writelines(f"{name}: {size}; {limits}\n" for name, size in found.items())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
