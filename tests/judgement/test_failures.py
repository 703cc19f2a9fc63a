import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_mcp.judgement.failures import failure_counts, failure_modes
from flash_mcp.protocol.records import Rollout
from tests.samples import sample_rollout

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "an example: 3"}]


def row(*turns: str, success: bool = False, **values: Any) -> Rollout:
    said: list[dict[str, Any]] = list(MESSAGES)
    for turn in turns:
        said += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": turn}]
    base = {**sample_rollout(1, 0, 0.0), "metrics": {}, "success": success, "messages": said, "turns": len(turns)}
    return Rollout.from_row({**base, **values})


@pytest.mark.parametrize(
    ("rollout", "mode"),
    [
        (row("5", success=True), None),
        (row("5"), "wrong"),
        (row(""), "empty"),
        (row(" \n", ""), "empty"),
        (row(), "empty"),
        (row("so " * 200), "looping"),
        (row("First, let me think. " + "The answer is 5, so the answer is 5? No. " * 8 + "The ans"), "looping"),
        (row("Well. " + "0" * 300), "looping"),
        (row("<calc>2+2</calc>", "<calc>2+2</calc>", "<calc>2+2</calc>"), "looping"),
        (row("so " * 200, truncated=True), "looping"),
        (row("Let me count the ways in which this may be done", truncated=True), "truncated"),
        (row("Let me count", finish="length"), "truncated"),
        (row("<think>Let me count", truncated=True), "overthinking"),
        (row("<think>4</think> The answer", truncated=True), "truncated"),
        (row("<think>Let me count"), "wrong"),
        (row("5", messages=[*MESSAGES, {**MESSAGES[1], "bad_tool_call": "it does not parse"}]), "bad_tool_call"),
        (row("5", messages=[{**MESSAGES[1], "bad_tool_call": "an example"}, *MESSAGES]), "wrong"),
        (row("```\n4\n```"), "wrapped"),
        (row("\\boxed{4}", reason="no answer found"), "wrapped"),
        (row("The answer is **4**", metrics={"format": 0.0}), "wrapped"),
        (row('"4"'), "wrapped"),
        (row("**5** it is", metrics={"format": 1.0}), "wrong"),
        (row("four", metrics={"format": 0.0, "right": 0.0}), "unparsed"),
        (row("four", reason="no <answer> tag: missing"), "unparsed"),
        (row("four", reason="expected 4"), "wrong"),
        (row("five", metrics={"right": 0.0}), "wrong"),
        (row("five", metrics={"invalid": 0.0}), "wrong"),
        (row("five", metrics={"invalid": 0.5}), "unparsed"),
        (row("five", metrics={"format_penalty": -0.1}), "unparsed"),
        (row("five", metrics={"valid_moves": 1.0, "format_penalty": 0.0}), "wrong"),
        (row("5", error={"code": "environment_error", "what": "boom"}), "error"),
        (row("5, and that is 5 because 5 is 5"), "wrong"),
    ],
)
def test_a_rollout_fails_in_one_of_nine_ways(rollout: Rollout, mode: str | None):
    assert failure_modes([rollout]) == [mode]


def test_a_wrapper_that_successes_have_too_is_no_failure():
    solved, failed = row("```\n4\n```", success=True), row("```\n5\n```")
    assert failure_modes([solved, failed]) == [None, "wrong"]
    assert failure_modes([failed], sample=[solved]) == ["wrong"]


def test_modes_are_counted_most_frequent_first():
    assert list(failure_counts([row(""), row("5"), row("6"), row("4", success=True)]).items()) == [
        ("wrong", 2),
        ("empty", 1),
    ]


@given(st.lists(st.text(), max_size=4), st.one_of(st.none(), st.text()))
def test_whatever_was_written_is_classified(turns: list[str], reason: str | None):
    assert failure_modes([row(*turns, reason=reason)])[0] is not None


def test_long_answers_are_classified_in_no_time():
    rows = [row(" ".join(str(n * seed) for n in range(4000))) for seed in range(1, 51)]
    started = time.process_time()
    assert failure_counts(rows) == {"wrong": 50}
    assert time.process_time() - started < 1
