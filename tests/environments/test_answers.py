import pytest

from environments.checks.answers import Commonest, commonest, final_answer


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("Yes", "yes"),
        ("I think so.\n\n**Yes.**\n", "yes"),
        ("<think>No</think> so <answer> 42 </answer>", "42"),
        ("so it is \\boxed{7}.", "7"),
        (" \n", ""),
        ("<" * 50_000, "<" * 2000),
    ],
)
def test_a_final_answer_is_in_the_last_tags_or_the_last_line(turn: str, answer: str) -> None:
    assert final_answer(turn) == answer


def test_the_commonest_answer_comes_with_how_often_it_is_right() -> None:
    said = ["Yes", "yes.", "Yes", "No"]
    tries = [(f"t{n}", text, n == 0) for n, text in enumerate(said)]
    assert commonest(tries) == Commonest(share=0.75, success=1 / 3)


def test_two_tasks_or_empty_answers_have_no_commonest_answer() -> None:
    assert commonest([("t0", "yes", True), ("t1", "yes", True)] * 9) is None
    assert commonest([(f"t{n}", "", False) for n in range(9)]) is None
