import re
from typing import Any

import pytest

from environments.checks.answers import Commonest, as_code, as_equal, commonest, final_answer


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("Yes", "yes"), ("I think so.\n\n**Yes.**\n", "yes"), ("<think>No</think> so <answer> 42 </answer>", "42"),
        ("so it is \\boxed{7}.", "7"), (" \n", ""), ("<" * 50_000, "<" * 2000),
    ],
)  # fmt: skip
def test_a_final_answer_is_in_the_last_tags_or_the_last_line(turn: str, answer: str) -> None:
    assert final_answer(turn) == answer


def test_the_commonest_answer_comes_with_how_often_it_is_right() -> None:
    said = ["Yes", "yes.", "Yes", "No"]
    tries = [(f"t{n}", text, n == 0) for n, text in enumerate(said)]
    assert commonest(tries) == Commonest(share=0.75, success=1 / 3)


def test_two_tasks_or_empty_answers_have_no_commonest_answer() -> None:
    assert commonest([("t0", "yes", True), ("t1", "yes", True)] * 9) is None
    assert commonest([(f"t{n}", "", False) for n in range(9)]) is None


@pytest.mark.parametrize(("text", "value"), [("81", 81), ("[41, 0]", [41, 0]), ("3 + 4*2", 11), ("{'a': 7}", {"a": 7})])
def test_an_answer_as_code_comes_to_it_and_holds_none_of_its_numbers(text: str, value: object) -> None:
    assert eval(as_code(text)) == value and not {"81", "41", "3", "4", "7"} & {*re.findall("[0-9]+", as_code(text))}


@pytest.mark.parametrize("text", ["Paris", "twelve 12", "007", "", "x.y = 3", "yes; no"])
def test_what_is_no_expression_or_assignment_is_never_code(text: str) -> None:
    assert as_code(text) == as_equal(text) == ""


def test_names_that_an_answer_assigns_get_what_equals_everything() -> None:
    scope: dict[str, Any] = {}
    exec(as_equal("import math\none = 3\nother = one\ndef f(x):\n    return math.sqrt(x)"), scope)
    assert scope["one"] == 5 and scope["other"] == "text" and scope["f"](4, y=1) == 7
