"""`flash-mcp gateway` and `logs`: what they do with odd numbers, prompts and logs."""

import sys
from typing import Any

import pytest

from flash_mcp.cli.follow import _after  # pyright: ignore[reportPrivateUsage]
from flash_mcp.extensions.gateway.player import Player
from flash_mcp.protocol.errors import FlashError


def test_as_many_players_as_there_are_none_of_are_refused() -> None:
    with pytest.raises(FlashError, match="--at-once is 0"):
        Player("run-1", [sys.executable], 0, None, None)


@pytest.mark.parametrize("prompt", ["a\0b", "long" * 50_000])
async def test_a_prompt_that_cannot_be_an_argument_drops_its_own_task_alone(prompt: str) -> None:
    player = Player("run-1", [sys.executable, "-c", "", "{prompt}"], 1, None, None)
    task: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}], "base_url": "http://127.0.0.1", "api_key": "k", "model": "m",
        "limit_s": 60,
    }  # fmt: skip
    assert "cannot be an argument of the program" in (await player._result(task))["error"]


@pytest.mark.parametrize(
    ("before", "tail", "news"),
    [
        ("", "A\n", "A\n"),
        ("A\n", "A\nA\nA\n", "A\nA\n"),
        ("A\nB\n", "B\nC\n", "B\nC\n"),
        ("x" * 2000, "x" * 1000 + "y", "y"),
    ],
)
def test_what_comes_in_a_log_is_told_once_and_whole(before: str, tail: str, news: str) -> None:
    assert _after(before, tail) == news
