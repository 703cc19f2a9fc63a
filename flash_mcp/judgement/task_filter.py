"""The language in which curate says which tasks to keep: a truth about the attempts at one task.

    keep = compile_filter("pass@4 >= 0.25 and not avg > 0.9")
    keep(TaskScores(n=8, n_correct=3, avg=0.5, best=1.0, worst=0.0))     # True; None where attempts do not suffice

Numbers are avg, best, worst, n, n_correct, pass@k and literals, joined by + - *; < <= > >= == !=
compare them; `solved` is a truth by itself; and, or, not join truths. The text is cut into words
that are all checked, then read by Python's `ast` for its precedence, then turned into closures over
whitelisted nodes: nothing of it is ever executed."""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from flash_mcp.judgement.statistics import pass_at_k
from flash_mcp.protocol.errors import FlashError

NUMBERS = ("avg", "best", "worst", "n", "n_correct")
TRUTHS = ("solved",)
JOINS = ("and", "or", "not")
MAX_CHARACTERS = 500
MAX_DEPTH = 40
MAX_K = 9999
FORM = (
    "compare avg, best, worst, n, n_correct or pass@k with a number, as in `pass@4 >= 0.25 and n >= 4`; `solved` "
    "stands alone; and, or, not and parentheses join them"
)

_WORD = re.compile(
    r"(?P<at>[A-Za-z_]\w*\s*@\s*[-+]?[\w.]*)|(?P<name>[A-Za-z_]\w*)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<sign><=|>=|==|!=|[-<>()+*])",
    re.ASCII,
)
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
    """What the attempts at one task came to, at least one; `avg`, `best` and `worst` are rewards."""

    n: int
    n_correct: int
    avg: float
    best: float
    worst: float

    @property
    def solved(self) -> bool:
        return self.n_correct > 0

    def pass_at(self, k: int) -> float | None:
        """None where fewer than k attempts were made: what they would have come to is not known."""
        return pass_at_k(self.n, self.n_correct, k) if self.n >= k else None


@dataclass(frozen=True)
class TaskFilter:
    """A compiled filter. Called with a task's scores it says whether the task passes.

    None says that this cannot be told: the task has fewer attempts than a pass@k needs, and the
    rest of the filter does not decide without it."""

    text: str
    _evaluate: Callable[[TaskScores], bool | None]

    def __call__(self, scores: TaskScores) -> bool | None:
        return self._evaluate(scores)


def compile_filter(text: str) -> TaskFilter:
    """FlashError(invalid_argument) that says what is expected, for anything that is not of the
    language.
    """
    if len(text) > MAX_CHARACTERS:
        raise _refusal(
            text[:50] + "…", f"it has {len(text)} characters", f"use at most {MAX_CHARACTERS}"
        )
    source = " ".join(_words(text))
    if not source:
        raise _refusal(text, "it is empty", f"leave it out to keep every task, or {FORM}")
    try:
        tree = ast.parse(source, mode="eval")
        compiled = _Compiler(text).compile(tree.body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refusal(
            text, f"it does not read as an expression ({getattr(error, 'msg', error)})", FORM
        ) from error
    if not compiled.is_truth:
        raise _refusal(
            text,
            "it is a number, neither true nor false",
            f"compare it, as in `{_shown(tree.body)} > 0.5`",
        )
    return TaskFilter(text, compiled.evaluate)


def _words(text: str) -> list[str]:
    """The words of a filter, each of them one that the language knows; `pass@4` is `pass_4`."""
    words: list[str] = []
    place = 0
    while rest := text[place:].lstrip():
        place = len(text) - len(rest)
        found = _WORD.match(rest)
        if found is None:
            sign = re.match(r"&&?|\|\|?|.", rest, re.DOTALL)
            given = sign[0] if sign else rest[0]
            fix = f"write {_MEANT[given]}" if given in _MEANT else FORM
            raise _refusal(
                text, f"{given!r} at character {place + 1} is not part of the language", fix
            )
        word = found[0]
        if found.lastgroup == "at":
            word = f"pass_{_attempts_of(text, word)}"
        elif found.lastgroup == "name":
            _check_name(text, word)
        elif found.lastgroup == "number" and not math.isfinite(float(word)):
            raise _refusal(text, f"{word} is too large", "use a smaller number")
        words.append(word)
        place += len(found[0])
    return words


def _attempts_of(text: str, word: str) -> int:
    name, _, k = (part.strip() for part in word.partition("@"))
    if name != "pass":
        near = f"{name} alone" if name in NUMBERS + TRUTHS else f"pass@{k}"
        raise _refusal(text, f"{word!r}: only pass, in lower case, takes an @", f"write {near}")
    if not re.fullmatch(r"[1-9]\d*", k, re.ASCII) or len(k) > len(str(MAX_K)):
        raise _refusal(
            text,
            f"{word!r}: k is a number of attempts",
            f"write pass@k with a whole number from 1 to {MAX_K}, as pass@4",
        )
    return int(k)


def _check_name(text: str, name: str) -> None:
    if name in NUMBERS + TRUTHS + JOINS:
        return
    if name == "pass":
        raise _refusal(text, "pass needs a number of attempts", "write pass@4")
    near = difflib.get_close_matches(name.lower(), NUMBERS + TRUTHS + JOINS, n=1, cutoff=0.6)
    known = f"the names are {', '.join(NUMBERS + TRUTHS)} and pass@k"
    raise _refusal(
        text, f"{name!r} is not a name", f"write {near[0]!r}; {known}" if near else known
    )


class _Compiled(NamedTuple):
    is_truth: bool
    evaluate: Callable[[TaskScores], Any]
    """A number or a truth; None where attempts do not suffice."""


class _Compiler:
    def __init__(self, text: str) -> None:
        self.text = text

    def compile(self, node: ast.expr, depth: int) -> _Compiled:
        """The closure of one node of the whitelist; an error for any other."""
        if depth > MAX_DEPTH:
            self._refuse(f"it is nested more than {MAX_DEPTH} deep", "write it flatter")
        match node:
            case ast.BoolOp(op=op, values=values):
                return _joined(
                    isinstance(op, ast.Or), [self._truth(value, depth + 1) for value in values]
                )
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _negated(self._truth(operand, depth + 1))
            case ast.Compare(left=left, ops=ops, comparators=others):
                parts = [self._number(part, depth + 1) for part in (left, *others)]
                pairs = [
                    _applied(_COMPARISONS[type(op)], *sides, is_truth=True)
                    for op, sides in zip(ops, pairwise(parts), strict=True)
                    if type(op) in _COMPARISONS
                ]
                return _joined(False, pairs) if len(pairs) == len(ops) else self._unknown(node)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
                return _applied(
                    _ARITHMETIC[type(op)],
                    self._number(left, depth + 1),
                    self._number(right, depth + 1),
                )
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
                return _applied(_ARITHMETIC[type(op)], self._number(operand, depth + 1))
            case ast.Constant(value=int() | float() as value):
                return _constant(float(value))
            case ast.Name(id=name) if name.startswith("pass_"):
                return _Compiled(
                    False, operator.methodcaller("pass_at", int(name.removeprefix("pass_")))
                )
            case ast.Name(id=name) if name in NUMBERS + TRUTHS:
                return _Compiled(name in TRUTHS, operator.attrgetter(name))
            case _:
                return self._unknown(node)

    def _number(self, node: ast.expr, depth: int) -> _Compiled:
        compiled = self.compile(node, depth)
        if compiled.is_truth:
            shown = _shown(node)
            self._refuse(
                f"`{shown}` is true or false, not a number", f"write `{shown}` or `not {shown}`"
            )
        return compiled

    def _truth(self, node: ast.expr, depth: int) -> _Compiled:
        compiled = self.compile(node, depth)
        if not compiled.is_truth:
            shown = _shown(node)
            self._refuse(
                f"`{shown}` is a number, neither true nor false",
                f"compare it, as in `{shown} > 0.5`",
            )
        return compiled

    def _unknown(self, node: ast.expr) -> NoReturn:
        self._refuse(f"`{_shown(node)}` is not part of the language", FORM)

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise _refusal(self.text, what, fix)


def _constant(number: float) -> _Compiled:
    def evaluate(scores: TaskScores) -> float:
        return number

    return _Compiled(False, evaluate)


def _applied(operation: Callable[..., Any], *parts: _Compiled, is_truth: bool = False) -> _Compiled:
    def evaluate(scores: TaskScores) -> Any:
        values = [part.evaluate(scores) for part in parts]
        return None if None in values else operation(*values)

    return _Compiled(is_truth, evaluate)


def _joined(is_or: bool, parts: list[_Compiled]) -> _Compiled:
    """Three-valued and/or: what is not known matters only where the other parts do not decide."""

    def evaluate(scores: TaskScores) -> bool | None:
        truths = [part.evaluate(scores) for part in parts]
        return is_or if is_or in truths else None if None in truths else not is_or

    return _Compiled(True, evaluate)


def _negated(part: _Compiled) -> _Compiled:
    def evaluate(scores: TaskScores) -> bool | None:
        truth = part.evaluate(scores)
        return None if truth is None else not truth

    return _Compiled(True, evaluate)


def _shown(node: ast.expr) -> str:
    return re.sub(r"\bpass_(\d+)", r"pass@\1", ast.unparse(node))


def _refusal(text: str, what: str, fix: str) -> FlashError:
    return FlashError(
        "invalid_argument", f"this filter cannot be used: {what}", filter=text, fix=fix
    )
