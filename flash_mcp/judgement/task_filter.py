"""The language in which curate selects tasks: a boolean expression over one task's attempts.

    keep = compile_filter("pass@4 >= 0.25 and not avg > 0.9")
    keep(TaskScores(n=8, n_correct=3, avg=0.5, best=1.0, worst=0.0))  # True

Numbers are avg, best, worst, n, n_correct, pass@k and literals, joined by + - *; < <= > >= == !=
compare them; `solved` is true or false by itself; and, or, not join these.

Python's `ast` parses the words, so the precedence is Python's. They are checked before: `pass@4` is
no Python, and a wrong word deserves an error that names the right one. Only whitelisted nodes are
computed, in three-valued logic: nothing of the text is ever executed."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flash_mcp.judgement.statistics import pass_at_k
from flash_mcp.protocol.errors import FlashError, nearest

NUMBERS = ("avg", "best", "worst", "n", "n_correct")
TRUTHS = ("solved",)
JOINS = ("and", "or", "not")
MAX_CHARACTERS = 500
MAX_DEPTH = 40
MAX_K = 9999
_PASS = "pass_"
"""`pass@4` is the name `pass_4` to Python."""
FORM = (
    "compare avg, best, worst, n, n_correct or pass@k with a number, as in `pass@4 >= 0.25 and "
    "n >= 4`; `solved` needs no operator; and, or, not and parentheses join them"
)

_WORD = re.compile(
    r"(?P<at>[A-Za-z_]\w*\s*@\s*[-+]?[\w.]*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<sign><=|>=|==|!=|[-<>()+*])",
    re.ASCII,
)
_SIGN = re.compile(r"&&?|\|\|?|.", re.DOTALL)
"""What stands where no word does."""
_MEANT = {
    "=": "==",
    "&": "and",
    "&&": "and",
    "|": "or",
    "||": "or",
    "!": "not",
    "/": "* on the other side",
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
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
    _value: Value

    def __call__(self, scores: TaskScores) -> bool | None:
        return self._value(scores)


Value = Callable[[TaskScores], Any]
"""A number or a truth of a task; None if its attempts do not suffice."""


def compile_filter(text: str) -> TaskFilter:
    """FlashError(invalid_argument), which says what is expected, for a text that is no filter."""
    if len(text) > MAX_CHARACTERS:
        start = f"{text[:50]}…"
        raise _refusal(start, f"it has {len(text)} characters", f"use at most {MAX_CHARACTERS}")
    source = " ".join(_words(text))
    if not source:
        raise _refusal(text, "it is empty", f"leave it out to keep every task, or {FORM}")
    try:
        tree = ast.parse(source, mode="eval").body
        is_truth, value = _Compiler(text).node(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", error)
        raise _refusal(text, f"it does not read as an expression ({reason})", FORM) from error
    if not is_truth:
        compared = f"compare it, as in `{_shown(tree)} > 0.5`"
        raise _refusal(text, "it is a number, neither true nor false", compared)
    return TaskFilter(text, value)


def _words(text: str) -> list[str]:
    """The words of a filter, each of which the language knows."""
    words: list[str] = []
    place = 0
    while rest := text[place:].lstrip():
        place = len(text) - len(rest)
        match = _WORD.match(rest)
        if match is None:
            sign = _SIGN.match(rest)
            comparison = sign[0] if sign else rest[0]
            what = f"{comparison!r} at character {place + 1} is not part of the language"
            raise _refusal(
                text, what, f"write {_MEANT[comparison]}" if comparison in _MEANT else FORM
            )
        word = match[0]
        place += len(word)
        if match.lastgroup == "at":
            word = f"{_PASS}{_attempts_of(text, word)}"
        elif match.lastgroup == "name":
            _check_name(text, word)
        elif match.lastgroup == "number" and not math.isfinite(float(word)):
            raise _refusal(text, f"{word} is too large", "use a smaller number")
        words.append(word)
    return words


def _attempts_of(text: str, word: str) -> int:
    name, _, k = (part.strip() for part in word.partition("@"))
    if name != "pass":
        meant = f"{name} alone" if name in NUMBERS + TRUTHS else f"pass@{k}"
        what = f"{word!r}: only pass, in lower case, takes an @"
        raise _refusal(text, what, f"write {meant}")
    if not re.fullmatch(r"[1-9]\d*", k, re.ASCII) or len(k) > len(str(MAX_K)):
        fix = f"write pass@k with a whole number from 1 to {MAX_K}, as pass@4"
        raise _refusal(text, f"{word!r}: k is a number of attempts", fix)
    return int(k)


def _check_name(text: str, name: str) -> None:
    words = (*NUMBERS, *TRUTHS, *JOINS)
    if name in words:
        return
    if name == "pass":
        raise _refusal(text, "pass needs a number of attempts", "write pass@4")
    near = nearest(name.lower(), words)
    fix = f"the names are {', '.join(NUMBERS + TRUTHS)} and pass@k"
    if near:
        fix = f"write {near[0]!r}; {fix}"
    raise _refusal(text, f"{name!r} is not a name", fix)


class _Compiler:
    """Checks that a tree has whitelisted nodes alone, with numbers and truths where they belong,
    and makes of each what computes it.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def node(self, node: ast.expr, depth: int = 0) -> tuple[bool, Value]:
        """Whether a node is true or false, not a number, and its value; FlashError if neither."""
        if depth > MAX_DEPTH:
            what = f"it is nested more than {MAX_DEPTH} deep"
            raise _refusal(self.text, what, "write it flatter")
        match node:
            case ast.BoolOp(op=op, values=parts):
                return True, _joined(isinstance(op, ast.Or), self._nodes(parts, depth, truth=True))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return True, _applied(operator.not_, self._nodes([operand], depth, truth=True))
            case ast.Compare(left=left, ops=ops, comparators=others) if _COMPARISONS.keys() >= set(
                map(type, ops)
            ):
                sides = pairwise(self._nodes([left, *others], depth, truth=False))
                operations = map(_COMPARISONS.__getitem__, map(type, ops))
                return True, _joined(False, list(map(_applied, operations, sides)))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                values = self._nodes([left, right], depth, truth=False)
                return False, _applied(_ARITHMETIC[type(op)], values)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _ARITHMETIC:
                values = self._nodes([operand], depth, truth=False)
                return False, _applied(_ARITHMETIC[type(op)], values)
            case ast.Constant(value=int() | float() as value):
                return False, lambda _: float(value)
            case ast.Name(id=name) if name.startswith(_PASS):
                return False, lambda scores: scores.pass_at(int(name.removeprefix(_PASS)))
            case ast.Name(id=name) if name in NUMBERS + TRUTHS:
                return name in TRUTHS, operator.attrgetter(name)
            case _:
                raise _refusal(self.text, f"`{_shown(node)}` is not part of the language", FORM)

    def _nodes(self, nodes: Sequence[ast.expr], depth: int, *, truth: bool) -> list[Value]:
        """The values of nodes that have to be truths, or numbers."""
        values: list[Value] = []
        for node in nodes:
            is_truth, value = self.node(node, depth + 1)
            shown = _shown(node)
            if truth and not is_truth:
                what = f"`{shown}` is a number, neither true nor false"
                raise _refusal(self.text, what, f"compare it, as in `{shown} > 0.5`")
            if is_truth and not truth:
                what = f"`{shown}` is true or false, not a number"
                raise _refusal(self.text, what, f"write `{shown}` or `not {shown}`")
            values.append(value)
        return values


def _applied(operation: Callable[..., Any], values: Sequence[Value]) -> Value:
    def result(scores: TaskScores) -> Any:
        numbers = [value(scores) for value in values]
        if None in numbers:
            return None
        return operation(*numbers)

    return result


def _joined(is_or: bool, values: Sequence[Value]) -> Value:
    """Three-valued and/or: what is unknown matters only if the other parts do not decide."""

    def result(scores: TaskScores) -> bool | None:
        truths = [value(scores) for value in values]
        if is_or in truths:
            return is_or
        if None in truths:
            return None
        return not is_or

    return result


def _shown(node: ast.expr) -> str:
    return re.sub(rf"\b{_PASS}(\d+)", r"pass@\1", ast.unparse(node))


def _refusal(text: str, what: str, fix: str) -> FlashError:
    return FlashError(
        "invalid_argument", f"this filter cannot be used: {what}", filter=text, fix=fix
    )
