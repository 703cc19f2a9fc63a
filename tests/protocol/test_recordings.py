"""Files with what deployments were asked and answered."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.recordings import Recording, RecordingLimits, parts, prune_all, pseudonym, rating_of
from tests.places import ROOT

WRITER = """
import sys
from pathlib import Path
from flash_mcp.protocol.recordings import Recording
recording = Recording(Path(sys.argv[1]), "dep-1")
for number in range(10**9):
    recording.append({"number": number, "text": "x" * 3000})
    print(number, flush=True)
"""


def started(home: Path, max_bytes: int = 1 << 20, days: float = 30.0) -> Recording:
    recording = Recording(home, "dep-1")
    recording.start(RecordingLimits(max_bytes, days))
    return recording


def line(text: str, **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": text.upper()}
    entry = {"messages": [{"role": "user", "content": text}], "tools": [], "answer": answer, "finish": "stop"}
    return {**entry, "prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "seconds": 0.5, **more}


def test_lines_become_conversations_without_a_reward(tmp_path: Path) -> None:
    recording = started(tmp_path)
    for entry in (line("a"), line("b", finish="length"), line("a")):
        recording.append(entry)
    first, cut, again = Recording(tmp_path, "dep-1").rollouts()
    assert [message["content"] for message in first.messages] == ["a", "A"]
    assert (first.turns, first.prompt_messages, first.answers) == (1, 1, ["A"])
    assert (first.prompt_tokens, first.completion_tokens, first.finish) == (3, 2, "done")
    assert (cut.truncated, cut.finish) == (True, "length") and first.task_id == again.task_id != cut.task_id
    assert [row.index for row in (first, cut, again)] == [0, 1, 2]


def test_ratings_are_rewards_and_the_last_one_counts(tmp_path: Path) -> None:
    recording = started(tmp_path)
    for name in "abc":
        recording.append(line(name, id=f"r-{name}"))
    assert recording.rate("r-a", 0.0) and recording.rate("r-a", 1.0) and recording.rate("r-b", 0.25)
    assert not recording.rate("r-z", 1.0)
    up, middling, unrated = recording.rollouts()
    assert (up.is_scored, up.reward, up.success) == (True, 1.0, True)
    assert (middling.is_scored, middling.reward, middling.success) == (True, 0.25, False)
    assert (unrated.is_scored, unrated.success) == (False, False)
    assert [entry["rating"] for entry in recording.answers()] == [1.0, 0.25, None]


@pytest.mark.parametrize(
    ("value", "rating"),
    [("up", 1.0), ("down", 0.0), (4, 4.0), ("4.5", 4.5), ("", None), ("good", None), ("nan", None), (None, None)],
)
def test_what_a_rating_may_be(value: Any, rating: float | None) -> None:
    assert rating_of(value) == rating


def test_what_matches_is_deleted_with_its_ratings_while_others_are_written(tmp_path: Path) -> None:
    recording = started(tmp_path, max_bytes=8000)
    for number in range(12):
        recording.append(line(f"text {number}", id=f"r{number}", user="ab"[number % 2]))
        recording.rate(f"r{number}", 1.0)
    older, newer = parts(recording.folder)[-2:]
    os.utime(older, (1000, 1000))
    kept = [entry["id"] for entry in recording.answers() if entry["user"] == "b"]
    gone = len([*recording.answers()]) - len(kept)
    assert Recording(tmp_path, "dep-1").delete(lambda entry: entry["user"] == "a") == gone > 0
    recording.append(line("later", id="later", user="b"))
    assert [entry["id"] for entry in recording.answers()] == [*kept, "later"]
    assert {entry["rates"] for entry in recording.lines() if "rates" in entry} == set(kept)
    assert older.stat().st_mtime == 1000, "its time is over no later"
    assert newer.stat().st_mode & 0o777 == 0o600


def test_what_nobody_should_learn_is_replaced_and_nothing_is_recorded_after_a_stop(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "dep-1")
    recording.start(RecordingLimits(1 << 20, 30.0, ("mail", "card", "key", r"PO-\d+", r"\d{17,}")))
    said = "Mail ann@example.org, card 4111 1111 1111 1111, not 4111111111111112, key sk-proj-0123456789abcdef, PO-17"
    recording.append(line(said, user="ann@example.org", prompt_tokens=3))
    name = "chatcmpl-12345678123456789"  # an id that a pattern matches stays and can be rated
    recording.append(line("plain", user="ann", id=name))
    assert recording.rate(name, 1.0)
    recording.stop()
    recording.append(line("b"))
    assert not recording.is_on()
    first, second = recording.answers()
    text = "Mail [mail], card [card], not 4111111111111112, key [key], [redacted]"
    assert first["messages"] == [{"role": "user", "content": text}]
    assert (first["prompt_token_ids"], first["token_ids"], first["prompt_tokens"]) == ([], [], 3)
    assert first["user"] == pseudonym("ann@example.org") != "[mail]"
    assert (second["token_ids"], second["user"], second["rating"]) == ([4, 5], "ann", 1.0)


def test_a_recording_keeps_within_its_bytes_and_the_newest_lines(tmp_path: Path) -> None:
    recording = started(tmp_path, max_bytes=80_000)
    for number in range(400):
        recording.append({"number": number, "text": "x" * 900})
    recording.append({"number": 400, "text": "x" * 20_000})  # longer than a part may be
    taken = sum(part.stat().st_size for part in parts(recording.folder))
    numbers = [entry["number"] for entry in recording.lines()]
    assert 60_000 < taken <= 80_000
    assert numbers == [*range(numbers[0], 400)]


def test_lines_are_deleted_after_their_days(tmp_path: Path) -> None:
    recording = started(tmp_path, days=2.0)
    recording.append(line("old"))
    (part,) = parts(recording.folder)
    prune_all(tmp_path, days=30.0)
    assert part.exists()
    os.utime(part, (0, time.time() - 2.5 * 86_400))
    prune_all(tmp_path, days=30.0)
    assert not part.exists(), "its own limit counts"
    recording.append(line("new"))
    recording.stop()
    (part,) = parts(recording.folder)
    os.utime(part, (0, time.time() - 31 * 86_400))
    prune_all(tmp_path, days=30.0)
    assert not part.exists(), "one that was stopped is deleted too"


def test_a_killed_server_loses_no_line_that_was_written(tmp_path: Path) -> None:
    """The line that a crash tore is left out, and the next server's lines are whole."""
    started(tmp_path, max_bytes=1 << 30)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        seen = [writer.stdout.readline() for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
        seen += writer.stdout.readlines()
    recording = Recording(tmp_path, "dep-1")
    numbers = [entry["number"] for entry in recording.lines()]
    assert numbers == [*range(len(numbers))] and len(numbers) >= len(seen) - 1
    with parts(recording.folder)[-1].open("a") as torn:
        torn.write(json.dumps({"number": "torn"})[:9])
    recording.append({"number": "next"})
    assert [entry["number"] for entry in recording.lines()] == [*numbers, "next"]
