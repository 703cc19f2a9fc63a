"""Why a rollout did not succeed, as one word: what to count before transcripts are read.

    error      environment code failed; says nothing of the model
    empty      the model wrote nothing
    looping    it said the same again and again
    overthinking  it was cut off while the model still thought
    truncated  it was cut off at max_tokens or max_length
    bad_tool_call  a tool call did not parse, named no tool, or its arguments did not fit
    wrapped    the answer is in a code fence, \\boxed{}, quotes or bold, unlike each success
    unparsed   the scorer's reason, or a part of the reward named like a format, says that it found
               no answer
    wrong      none of these: as a rule an answer that is not right

The last three are guesses, because they are read from what any environment reports: if a scorer
gives no reason and has no part for the format, they are all `wrong`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from flash_mcp.protocol.records import Rollout

FailureMode = Literal[
    "error",
    "empty",
    "looping",
    "overthinking",
    "truncated",
    "bad_tool_call",
    "wrapped",
    "unparsed",
    "wrong",
]

SAMPLE_ROLLOUTS = 256
"""At most so many rollouts of a step are looked at, drawn at random."""
LOOP_CHARACTERS = 40
"""Shorter repetitions at the end of a text are no loop."""
LOOP_PERIOD = 120
"""Characters of the longest unit that is looked for."""
LOOP_TURNS = 3
WRAPPERS = {
    "fence": re.compile(r"```"),
    "boxed": re.compile(r"\\boxed\s*\{"),
    "bold": re.compile(r"\*\*[^*\n]+\*\*"),
    "quotes": re.compile(r"""\A\s*(["'“`]).+["'”`]\s*\Z""", re.DOTALL),
}
BAD_PART = re.compile(r"invalid|malformed|unpars|untagged|penalty|error", re.IGNORECASE)
FORMAT_PART = re.compile(
    r"format|parse|tagged|valid|well_?formed|syntax|answered|schema", re.IGNORECASE
)
NO_ANSWER = re.compile(
    r"\bno (final |valid )?(answer|tags?|number|match|json|code)\b|not (be )?pars|unpars|malformed"
    r"|not valid|invalid|missing|wrong format|not found",
    re.IGNORECASE,
)


def failure_modes(
    rows: Sequence[Rollout], sample: Sequence[Rollout] | None = None
) -> list[FailureMode | None]:
    """The mode of each rollout, None for a success; `sample`, or these, shows successes."""
    accepted: set[str] = set()
    for row in rows if sample is None else sample:
        if row.success and row.answers:
            accepted |= _wrappers(row.answers[-1])
    return [_mode(row, accepted) for row in rows]


def failure_counts(rows: Sequence[Rollout]) -> dict[str, int]:
    """{mode: rollouts}, the most frequent first; empty where all succeeded."""
    return dict(Counter(filter(None, failure_modes(rows))).most_common())


def _mode(row: Rollout, accepted: set[str]) -> FailureMode | None:
    if row.error:
        return "error"
    if row.success:
        return None
    turns = row.answers
    if not any(map(str.strip, turns)):
        return "empty"
    is_repeated = len(turns) >= LOOP_TURNS and len(set(turns[-LOOP_TURNS:])) == 1
    if is_repeated or any(_ends_in_a_loop(text.rstrip()) for text in turns):
        return "looping"
    if row.truncated or row.finish == "length":
        if "<think>" in turns[-1] and "</think>" not in turns[-1]:
            return "overthinking"
        return "truncated"
    if row.bad_tool_call:
        return "bad_tool_call"
    parsed = _is_parsed(row)
    # A wrapper that no successful answer has is what the parser stumbled over.
    if not parsed and _wrappers(turns[-1]) - accepted:
        return "wrapped"
    if parsed is False:
        return "unparsed"
    return "wrong"


def _ends_in_a_loop(text: str) -> bool:
    # The last unit may be cut off, so the text is compared with itself, one period further on.
    for period in range(1, min(LOOP_PERIOD, len(text) // 3) + 1):
        tail = text[-max(4 * period, LOOP_CHARACTERS) :]
        if len(tail) >= max(3 * period, LOOP_CHARACTERS) and tail[period:] == tail[:-period]:
            return True
    return False


def _is_parsed(row: Rollout) -> bool | None:
    parts: list[bool] = []
    for name, value in row.metrics.items():
        if FORMAT_PART.search(name) and BAD_PART.search(name):
            parts.append(value == 0)
        elif FORMAT_PART.search(name):
            parts.append(value > 0)
    if parts:
        return all(parts)
    if NO_ANSWER.search(row.reason or ""):
        return False
    return None


def _wrappers(text: str) -> set[str]:
    return {name for name, pattern in WRAPPERS.items() if pattern.search(text)}
