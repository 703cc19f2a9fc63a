"""The language in which curate selects tasks: a boolean expression over one task's attempts.

    keep = compile_filter("pass@4 >= 0.25 and not avg > 0.9")
    keep(TaskScores(n=8, n_correct=3, avg=0.5, best=1.0, worst=0.0))  # True

Python's `ast` parses it, so the precedence is Python's. Only nodes of a short list are computed, by
`_value`: nothing of the text is ever executed."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flash_mcp.judgement.statistics import pass_at_k
from flash_mcp.protocol.errors import FlashError, did_you_mean

NUMBERS = ("avg", "best", "worst", "n", "n_correct")
MAX_CHARACTERS = 500
MAX_DEPTH = 40
PASS_AT = re.compile(r"\bpass\s*@\s*([1-9]\d{0,3})(?![\w.])", re.ASCII)
FORM = (
    "compare avg, best, worst, n, n_correct or pass@k (k from 1 to 9999) with a number, as in "
    "`pass@4 >= 0.25 and n >= 4`; `solved` needs no operator; and, or, not and parentheses join "
    "them; + - * compute"
)
OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


@dataclass(frozen=True)
class TaskScores:
    """One or more attempts at one task; `avg`, `best` and `worst` are rewards."""

    n: int
    n_correct: int
    avg: float
    best: float
    worst: float

    @property
    def solved(self) -> bool:
        return self.n_correct > 0

    def pass_at(self, k: int) -> float | None:
        """None if fewer than k attempts were made."""
        if self.n >= k:
            return pass_at_k(self.n, self.n_correct, k)
        return None


@dataclass(frozen=True)
class TaskFilter:
    """A compiled filter. Called with a task's scores it says whether the task passes.

    None means that this cannot be told: the task has fewer attempts than a pass@k needs, and the
    rest of the filter does not decide without it."""

    text: str
    _tree: ast.expr

    def __call__(self, scores: TaskScores) -> bool | None:
        return _value(self._tree, scores)


def compile_filter(text: str) -> TaskFilter:
    """FlashError(invalid_argument), which says what is expected, for a text that is no filter."""
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters, and {MAX_CHARACTERS} are the most")
        source = " ".join(PASS_AT.sub(r"pass_\1", text).split())
        tree = ast.parse(source, mode="eval").body
        if not _is_truth(tree, 0):
            raise ValueError(f"it is a number: compare it, as in `{_shown(tree)} > 0.5`")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"this filter cannot be used: {getattr(error, 'msg', error)}"
        raise FlashError("invalid_argument", what, filter=text[:80], fix=FORM) from error
    return TaskFilter(text, tree)


def _is_truth(node: ast.expr, depth: int) -> bool:
    """Whether the node is true or false, not a number. ValueError if it is neither."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.BoolOp(values=parts) | ast.UnaryOp(op=ast.Not(), operand=ast.expr() as parts):
            kind, parts = "true or false", parts if isinstance(parts, list) else [parts]
        case ast.Compare(left=left, ops=ops, comparators=rest) if {*map(type, ops)} <= {
            *OPERATIONS
        }:
            kind, parts = "a number", [left, *rest]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            kind, parts = "a number", [left, right]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            kind, parts = "a number", [operand]
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if not math.isfinite(value):
                raise ValueError(f"{_shown(node)} is too large")
            return False
        case ast.Name(id=name) if name in (*NUMBERS, "solved") or re.fullmatch(
            "pass_[1-9][0-9]{0,3}", name
        ):
            return name == "solved"
        case ast.Name(id=name):
            raise ValueError(f"there is no {name!r}{did_you_mean(name, (*NUMBERS, 'solved'))}")
        case _:
            raise ValueError(f"`{_shown(node)}` is not part of the language")
    for part in parts:
        if _is_truth(part, depth + 1) != (kind == "true or false"):
            raise ValueError(f"`{_shown(part)}` should be {kind}")
    return kind == "true or false" or isinstance(node, ast.Compare)


def _value(node: ast.expr, scores: TaskScores) -> Any:
    """What a checked node comes to; None where the attempts do not suffice to tell."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            truths = [_value(part, scores) for part in parts]
            decides = isinstance(op, ast.Or)
            if decides in truths:
                return decides
            return None if None in truths else not decides
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = pairwise(_value(side, scores) for side in [left, *rest])
            truths = [_computed(op, *pair) for op, pair in zip(ops, sides, strict=True)]
            if False in truths:
                return False
            return None if None in truths else True
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _value(left, scores), _value(right, scores))
        case ast.UnaryOp(op=op, operand=operand):
            return _computed(op, _value(operand, scores))
        case ast.Name(id=name) if name.startswith("pass_"):
            return scores.pass_at(int(name.removeprefix("pass_")))
        case ast.Name(id=name):
            return getattr(scores, name)
        case _:
            return float(ast.literal_eval(node))


def _computed(op: ast.AST, *values: Any) -> Any:
    return None if None in values else OPERATIONS[type(op)](*values)


def _shown(node: ast.expr) -> str:
    return re.sub(r"\bpass_(\d+)", r"pass@\1", ast.unparse(node))
