"""Signs that an answer can be had without solving its task."""

import pytest

from environments.checks.likeness import SIGNS, Row, alike, fixed_place, in_ids, in_order, paraphrased

SOUND = [
    Row(f"t{n}", f"Add {n} and {n * 7 % 11}.", str(n + n * 7 % 11), split, n % 20)
    for split, first in (("train", 0), ("eval", 20))
    for n in range(first, first + 20)
]


def test_sound_tasks_show_no_sign() -> None:
    assert [sign(SOUND) for sign in SIGNS] == ["", "", ""] and paraphrased(SOUND) == []


def test_an_answer_at_a_fixed_place_is_named_from_the_nearer_end() -> None:
    rows = [Row(f"t{n}", f"The code is {n}, they say. " + "so " * n, str(n), "train", n) for n in range(9)]
    assert fixed_place(rows) == "on 9 of 9 tasks the answer is word 4 of the prompt"
    rows = [Row(f"t{n}", "well " * n + f"it is {n} now", str(n), "train", n) for n in range(9)]
    assert fixed_place(rows) == "on 9 of 9 tasks the answer is word 2 from the end of the prompt"
    assert not fixed_place(rows[:4])


def test_ids_that_contain_answers_are_named() -> None:
    rows = [Row(f"row-{n}-{n + 500}", f"Add 500 to {n}.", str(n + 500), "eval", n) for n in range(9)]
    assert in_ids(rows) == "the ids of 9 of 9 tasks contain the answer, as 'row-0-500' does"


def test_answers_that_repeat_in_the_order_of_tasks_are_named() -> None:
    rows = [Row(f"t{n}", f"Case {n}?", "abc"[n % 3], "eval", n) for n in range(12)]
    assert in_order(rows) == "the answers of the eval tasks repeat every 3 tasks"
    assert not in_order([Row("t", "?", "a", "eval", n) for n in range(12)])


@pytest.mark.parametrize(
    ("train", "held_out", "is_same"),
    [
        (("Add the numbers 31 and 45.", "76"), ("How much are 45 and 31 together?", "76"), True),
        (("Add the numbers 31 and 45.", "76"), ("Add the numbers 45 and 31.", "76"), False),
        (("Add the numbers 31 and 45.", "76"), ("How much are 40 and 36 together?", "76"), False),
        (("What is the capital of Peru?", "Lima"), ("Which town governs Peru?", "Lima"), True),
        (("What is the capital of Peru?", "Lima"), ("Which bean shares its name with a town?", "Lima"), False),
    ],
)
def test_a_train_task_in_other_words_is_found(train: tuple[str, str], held_out: tuple[str, str], is_same: bool) -> None:
    rows = [*SOUND, Row("one", *train, "train", 40), Row("other", *held_out, "eval", 41)]
    assert paraphrased(rows) == [("one", "other")] * is_same


def test_few_tasks_in_other_words_may_be_chance() -> None:
    assert alike([("a", "b")], 50) == ""
    assert alike([("a", "b")], 40) == "1 eval tasks are train tasks in other words, for instance train 'a' and eval 'b'"
