import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flash_mcp.judgement.curation import MAX_DEPTH, TaskScores, compile_filter
from flash_mcp.judgement.statistics import pass_at_k
from flash_mcp.protocol.errors import FlashError

Meaning = Callable[[TaskScores], Any]
FOUR = TaskScores(n=4, n_correct=1, avg=0.3, best=1.0, worst=0.0)

rewards = st.floats(-1e6, 1e6)
scores = st.builds(
    lambda n, share, values: TaskScores(n, round(share * n), sorted(values)[1], max(values), min(values)),
    st.integers(1, 40),
    st.floats(0, 1),
    st.lists(rewards, min_size=3, max_size=3),
)

# -- filters by their grammar, each with what it means ---------------------------------------------

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def known(meaning: Callable[..., Any], *parts: Meaning) -> Meaning:
    """`meaning` of the parts' values; unknown where one of them is."""

    def of(task: TaskScores) -> Any:
        values = [part(task) for part in parts]
        return None if any(value is None for value in values) else meaning(*values)

    return of


def three_valued(least: bool, *parts: Meaning) -> Meaning:
    """and (least) or or, over false < unknown < true."""
    rank = {False: 0, None: 1, True: 2}
    return lambda task: (min if least else max)((part(task) for part in parts), key=rank.__getitem__)


def pass_at(k: int) -> tuple[str, Meaning]:
    return f"pass@{k}", lambda task: pass_at_k(task.n, task.n_correct, k) if task.n >= k else None


numbers: st.SearchStrategy[tuple[str, Meaning]] = st.one_of(
    st.sampled_from(["avg", "best", "worst", "n", "n_correct"]).map(
        lambda name: (name, lambda task: getattr(task, name))
    ),
    st.integers(1, 60).map(pass_at),
    st.one_of(st.integers(0, 99), st.floats(0, 1e9)).map(lambda value: (repr(value), lambda task: float(value))),
)
sums = st.tuples(numbers, numbers, st.sampled_from("+-*")).map(
    lambda it: (
        f"{it[0][0]} {it[2]} {it[1][0]}",
        known({"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}[it[2]], it[0][1], it[1][1]),
    )
)
comparisons = st.tuples(st.one_of(numbers, sums), st.sampled_from([*COMPARE]), st.one_of(numbers, sums)).map(
    lambda it: (f"{it[0][0]} {it[1]} {it[2][0]}", known(COMPARE[it[1]], it[0][1], it[2][1]))
)
filters: st.SearchStrategy[tuple[str, Meaning]] = st.recursive(
    st.one_of(comparisons, st.just(("solved", lambda task: task.n_correct > 0))),
    lambda inner: st.one_of(
        inner.map(lambda it: (f"not ({it[0]})", known(lambda truth: not truth, it[1]))),
        st.tuples(inner, inner, st.booleans()).map(
            lambda it: (
                f"({it[0][0]}) {'and' if it[2] else 'or'} ({it[1][0]})",
                three_valued(it[2], it[0][1], it[1][1]),
            )
        ),
    ),
    max_leaves=6,
).filter(lambda it: len(it[0]) <= 500)


@given(filters, scores)
def test_a_filter_means_what_it_says(filter: tuple[str, Meaning], task: TaskScores):
    text, meaning = filter
    assert compile_filter(text)(task) is meaning(task)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("pass@4 >= 0.25", True),
        ("pass@5 >= 0", None),
        ("n >= 8 and pass@8 > 0", False),
        ("n < 8 or pass@8 > 0.5", True),
        ("not pass@8 > 0.5", None),
        ("solved and not avg > 0.9", True),
        ("0 < avg <= 0.5", True),
        ("n_correct >= 0.5 * n", False),
        ("best - worst > 0.5", True),
        ("avg > -1", True),
        ("  solved\n", True),
    ],
)
def test_too_few_attempts_make_unknown_only_what_depends_on_them(text: str, passes: bool | None):
    assert compile_filter(text)(FOUR) is passes


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n@4 > 1", "`n @ 4` is not part of the language"),
        ("Pass@4 > 1", "not part of the language"),
        ("pass@0 > 0", "k from 1 to 9999"),
        ("pass@4.5 > 0", "k from 1 to 9999"),
        ("pass@100000 > 0", "k from 1 to 9999"),
        ("correct > 1", "did you mean 'n_correct'"),
        ("n = 3", "invalid syntax"),
        ("solved && n > 3", "and, or, not"),
        ("solved == 1", "`solved` should be a number"),
        ("n", "compare it, as in `n > 0.5`"),
        ("solved and pass@4", "`pass@4` should be true or false"),
        ("n_correct / n > 0.5", "+ - * compute"),
        ("", "invalid syntax"),
        ("n(3)", "not part of the language"),
        ("n > 1e999", "too large"),
        ("not " * 60 + "solved", f"more than {MAX_DEPTH} deep"),
        ("(" * 400 + "solved", "this filter cannot be used"),
        ("n" * 501, "501 characters"),
    ],
)
def test_what_is_not_of_the_language_is_refused_with_what_is_expected(text: str, expected: str):
    with pytest.raises(FlashError) as caught:
        compile_filter(text)
    assert caught.value.code == "invalid_argument" and caught.value.fix and expected in str(caught.value)


_watched: list[str] | None = None


def _listen(event: str, _: Any) -> None:
    if _watched is not None:
        _watched.append(event)


@pytest.fixture(scope="module")
def audited():
    """{} as `run(call)`: what Python's audit hooks saw while it ran: imports, files, processes, executed code."""
    sys.addaudithook(_listen)

    def run(call: Callable[[], Any]) -> set[str]:
        global _watched
        _watched = []
        try:
            call()
        finally:
            seen, _watched = set(_watched), None
        return seen

    return run


PIECES = [
    "__import__('os').system('true')", "().__class__", "lambda: n", "[n for n in (1,)]", "(n := 3)",
    "f'{n}'", "n.real", "print(n)", "exec", "eval('1')", "n if n else n", "*n", "**n", "n[0]",
    "{n}", "yield", "await n", "pass@4", "avg", "solved", " and ", " or ", " not ", "(", ")", "<",
    "==", "+", "-", "*", "1", "0.5", "n", "@", ";", "\n", "#", "\\",
]  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=8).map("".join)), scores)
@example("__import__('os').system('true')", FOUR)
@example("().__class__.__base__.__subclasses__()", FOUR)
def test_no_text_executes_anything_and_every_filter_that_is_accepted_evaluates(
    audited: Callable[[Callable[[], Any]], set[str]], text: str, task: TaskScores
):
    answers: list[Any] = []

    def use() -> None:
        try:
            answers.append(compile_filter(text)(task))
        except FlashError as error:
            assert error.code == "invalid_argument" and error.fix

    assert audited(use) <= {"compile"}  # ast.parse, which only reads
    assert all(answer in (True, False, None) for answer in answers)


def test_the_audit_would_see_an_execution(audited: Callable[[Callable[[], Any]], set[str]]):
    assert "exec" in audited(lambda: eval("1 + 1"))
