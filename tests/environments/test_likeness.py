"""Signs that an answer can be had without solving its task."""

from environments.checks.likeness import SIGNS, Row, alike, fixed_place, in_ids, in_order

SOUND = [
    Row(f"t{n}", f"Add {n} and {n * 7 % 11}.", str(n + n * 7 % 11), split, n % 20)
    for split, first in (("train", 0), ("eval", 20))
    for n in range(first, first + 20)
]


def test_sound_tasks_show_no_sign() -> None:
    assert [sign(SOUND) for sign in SIGNS] == ["", "", "", ""]


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


def test_a_train_task_in_other_words_is_named() -> None:
    texts = {"train": "Please add the numbers 3 and {0}.", "eval": "Add the numbers 3 and {0}, please!"}
    rows = [
        Row(f"{split}-{n}", text.format(n), str(n + 3), split, n) for split, text in texts.items() for n in range(6)
    ]
    example = "for instance train 'train-0' and eval 'eval-0'"
    assert alike(rows) == f"6 eval tasks are train tasks in other words, {example}"
    other_numbers = [Row("x", "Add the numbers 3 and 9.", "12", "eval", 0)]
    assert not alike([*rows[:6], *other_numbers])
