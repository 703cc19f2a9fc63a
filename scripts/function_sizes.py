"""Checks that no function has a body of more than 80 lines or a complexity over 25."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from radon.visitors import Class, ComplexityVisitor, Function

ROOT = Path(__file__).parent.parent
PACKAGES = ("environments", "flash_mcp", "worker")
MAX_LINES = 80
MAX_COMPLEXITY = 25


def functions(blocks: Iterable[Function | Class]) -> Iterator[Function]:
    """Functions and methods. Radon counts a closure as part of the function around it."""
    for block in blocks:
        if isinstance(block, Function):
            yield block
        else:
            yield from functions(block.methods)
            yield from functions(block.inner_classes)


def body_starts(source: str) -> dict[int, int]:
    """{line of `def`: first line after the signature and the docstring}."""
    starts: dict[int, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            first = node.body[1:2] if has_docstring else node.body[:1]
            starts[node.lineno] = first[0].lineno if first else (node.end_lineno or 0) + 1
    return starts


def offenders() -> dict[str, str]:
    """What is too large, by path::function, and its size."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            visitor = ComplexityVisitor.from_code(source)
            starts = body_starts(source)
            for function in functions([*visitor.functions, *visitor.classes]):
                lines = function.endline - starts[function.lineno] + 1
                if lines > MAX_LINES or function.complexity > MAX_COMPLEXITY:
                    name = f"{path.relative_to(ROOT)}::{function.fullname}"
                    found[name] = f"a body of {lines} lines, complexity {function.complexity}"
    return found


def main() -> int:
    found = offenders()
    limits = f"at most {MAX_LINES} lines and a complexity of {MAX_COMPLEXITY}"
    sys.stderr.writelines(f"{name}: {size}; {limits}\n" for name, size in found.items())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
