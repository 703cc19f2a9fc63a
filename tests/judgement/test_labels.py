"""Answers that are labels: which are, their spellings, the baseline by words, and wrong ones."""

from __future__ import annotations

import random

import pytest

from flash_mcp.judgement import labels
from flash_mcp.judgement.labels import NO_LABEL, Confusion, label_said

WORDS = {"ship": ["parcel", "courier", "late"], "bill": ["invoice", "tax", "charged"], "log in": ["password", "mail"]}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["spam", "ham"] * 10, True),
        (["0", "1"] * 10, True),
        (["yes", "Yes", " no"] * 4, True),
        ([str(number) for number in range(8)] * 10, False),  # results of sums
        ([f"kind {number}" for number in range(101)] * 10, False),
        (["spam", "ham", "x" * 61] * 10, False),
        (["spam"] * 20, False),
        (["a", "b", "c"], False),
    ],
)
def test_labels_are_few_short_answers(answers: list[str], expected: bool):
    assert labels.are_labels(answers) == expected


@pytest.mark.parametrize(
    ("usual", "other", "is_slip"),
    [
        ("shipping", "SHIPPING", True),
        ("not spam", "Not_Spam", True),
        ("shipping", "shiping", True),
        ("shipping", "shippping", True),
        ("shipping", "shippign", True),
        ("shipping", "shipqing", True),
        ("shipping", "skiqping", False),
        ("type a", "type b", False),
        ("class1", "class2", False),
        ("class1", "class11", False),
        ("cat", "cart", False),
        ("0", "1", False),
    ],
)
def test_a_seldom_spelling_that_is_a_slip_is_merged(usual: str, other: str, is_slip: bool):
    assert labels.misspelt([usual] * 40 + [other]) == ({other: usual} if is_slip else {})
    assert labels.misspelt(["billing"] * 40 + ["filling"] * 40 + ["boiling"] * 40) == {}, "common ones stay"


def rows(count: int) -> tuple[list[str], list[str]]:
    generator = random.Random(0)
    golds = generator.choices(list(WORDS), k=count)
    texts = [" ".join(["my", *generator.choices(WORDS[gold], k=3), str(n)]) for n, gold in enumerate(golds)]
    return texts, golds


def test_words_tell_labels_and_which_rows_are_wrong():
    texts, golds = rows(200)
    predict = labels.learn_by_words(texts, golds)
    assert [predict(text)[0] for text in ("The courier is late", "my password")] == ["ship", "log in"]
    true = list(golds)
    for place in (3, 77):
        golds[place] = next(label for label in WORDS if label != true[place])
    assert dict(labels.likely_wrong(texts, golds, range(200))) == {place: true[place] for place in (3, 77)}


def test_figures_by_class_are_those_of_the_counts():
    result = Confusion.of([("a", "a")] * 6 + [("a", "b")] * 2 + [("b", "b")] + [("b", "none")] * 3)
    assert (result.n("a"), result.recall("a"), result.recall("b")) == (8, 0.75, 0.25)
    assert (result.accuracy, result.balanced) == (7 / 12, 0.5)
    assert result.macro_f1 == pytest.approx((12 / 14 + 2 / 7) / 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>Ship</answer>", "ship"),
        ("ship or bill? <answer> log_in </answer>", "log in"),
        ("It says:\nBILL.", "bill"),
        ("This is about a bill, surely", "bill"),
        ("ship or bill", NO_LABEL),
        ("shipping", NO_LABEL),
        ("", NO_LABEL),
    ],
)
def test_the_label_that_an_answer_names(text: str, expected: str):
    assert label_said(text, {"ship": "ship", "bill": "bill", "log in": "log in"}) == expected
