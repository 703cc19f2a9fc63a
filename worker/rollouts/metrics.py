"""The metrics of one step's rollouts. flash_mcp/judgement/health.py reads its warning signs from
them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from environments.agents.calls import THREAD_UNSUPPORTED
from environments.checks.answers import commonest
from flash_mcp.protocol import records
from worker.rollouts.scheduler import PlayedRollout
from worker.rollouts.transcript import Transcript

MOST_REFUSED = 8
"""Kinds of refusals that are metrics of a step."""
LEAST_FREEDOM = 6
"""The fewest degrees of freedom (numbers minus subtracted means) for a correlation."""


def summarize(
    groups: Sequence[Sequence[PlayedRollout]], thinking_coef: float = 0.0
) -> dict[str, Any]:
    """The metrics of one step's groups; means leave out what the environment failed."""
    total = sum(map(len, groups))
    passed = [[rollout for rollout in group if not rollout.error] for group in groups]
    scored = list(filter(None, passed))
    valid = list(itertools.chain.from_iterable(scored))
    transcripts = [rollout.transcript for rollout in valid if rollout.transcript]
    rewards = [rollout.reward for rollout in valid]
    # The parts come first: one may have the name of a metric of ours.
    values: dict[str, list[float]] = {}
    for rollout in valid:
        for name, value in rollout.metrics.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)} | {
        "reward/mean": mean(rewards),
        "reward/std": _deviation(rewards),
        "success/rate": mean(rollout.success for rollout in valid),
        **_group_shares(passed, thinking_coef),
        "rollouts/truncated_share": mean(transcript.truncated for transcript in transcripts),
        "rollouts/repeated_share": repeated_share(scored),
        "rollouts/error_share": 1 - len(valid) / total,
        "rollouts/turns_mean": mean(rollout.turns for rollout in valid),
        "tokens/completion_mean": mean(transcript.model_tokens for transcript in transcripts),
        "tokens/reward_correlation": length_correlation(scored),
        **_thinking(transcripts, groups, thinking_coef),
        **_tool_shares(transcripts),
        **_under_schema(transcripts),
        **_common_answer([rollout.record(0) for rollout in valid]),
        **_refusals(list(itertools.chain.from_iterable(groups))),
    }


def thinking_penalties(group: Sequence[PlayedRollout], coef: float) -> list[float]:
    """What each rollout of a group pays for its tokens of thinking: `coef` a token, times the share
    of the group that succeeds. While a task is unsolved, brevity is worth nothing."""
    solved = mean(rollout.success for rollout in group if not rollout.error) or 0.0
    transcripts = [rollout.transcript for rollout in group]
    return [coef * solved * (t.thinking[0] if t else 0) for t in transcripts]


def _thinking(
    transcripts: Sequence[Transcript], groups: Sequence[Sequence[PlayedRollout]], coef: float
) -> dict[str, float | None]:
    """How much the model thinks and pays for it, and how often it was cut off while it did."""
    thinking = [transcript.thinking for transcript in transcripts]
    if not any(tokens for tokens, _ in thinking):
        return {}
    pairs = zip(thinking, transcripts, strict=True)
    metrics = {
        "tokens/thinking_mean": mean(tokens for tokens, _ in thinking),
        "rollouts/overthinking_share": mean(
            is_open and transcript.truncated for (_, is_open), transcript in pairs
        ),
    }
    if coef:
        penalties = (thinking_penalties(group, coef) for group in groups)
        metrics["tokens/thinking_penalty"] = mean(itertools.chain.from_iterable(penalties))
    return metrics


def staleness(rollouts: Sequence[PlayedRollout], policy: int) -> dict[str, float]:
    """By how much the number of the trained policy is above the numbers of those that sampled."""
    counts = Counter[int]()
    for rollout in rollouts:
        if rollout.transcript:
            counts.update(rollout.transcript.policies)
    counts = +counts  # without those that sampled nothing
    if not counts:
        return {}
    mean_number = statistics.fmean(counts.keys(), weights=counts.values())
    return {"staleness/mean": policy - mean_number, "staleness/max": policy - min(counts)}


def _tool_shares(transcripts: Sequence[Transcript]) -> dict[str, float | None]:
    """The share of the rollouts with tools that had a call which could not be run."""
    with_tools = [
        transcript.all_messages for transcript in transcripts if transcript.template.tools
    ]
    if not with_tools:
        return {}
    is_bad = [any("bad_tool_call" in message for message in messages) for messages in with_tools]
    return {"rollouts/bad_tool_call_share": mean(is_bad)}


def _under_schema(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """How many answers to an agent were held to a schema, and how many of them have no token that
    is trained: the schema decided each, or the engine could not tell."""
    calls = (call for transcript in transcripts for call in transcript.calls if call["trained"])
    tokens = [call["trained_tokens"] for call in calls if "trained_tokens" in call]
    if not tokens:
        return {}
    return {"schema/answers": float(len(tokens)), "schema/untrained": float(tokens.count(0))}


def _refusals(rollouts: Sequence[PlayedRollout | records.Rollout]) -> dict[str, float]:
    """What the API refused to agents or left out: how often the most frequent kinds, and in which
    share of the rollouts. A refused thread does not count in the share: it costs nothing, as the
    package then sends the whole conversation.
    """
    counts: Counter[str] = Counter()
    refused = 0
    for rollout in rollouts:
        counts.update(rollout.refusals)
        refused += any(not kind.startswith(THREAD_UNSUPPORTED) for kind in rollout.refusals)
    if not counts:
        return {}
    metrics = {f"refused/{kind}": float(count) for kind, count in counts.most_common(MOST_REFUSED)}
    return {"rollouts/refused_share": refused / len(rollouts), **metrics}


def _group_shares(
    groups: Sequence[Sequence[PlayedRollout]], thinking_coef: float
) -> dict[str, Any]:
    """Shares of groups, without the rollouts that the environment failed. A group that is empty
    without them is uniform and counts in no other share. What thinking costs teaches too.
    """
    shares: dict[str, list[bool]] = {"uniform": [], "zero": [], "solved": [], "unsolved": []}
    for group in groups:
        rewards = {rollout.reward for rollout in group}
        outcomes = {rollout.success for rollout in group}
        has_turns = any(rollout.has_turn_rewards for rollout in group)
        penalties = thinking_penalties(group, thinking_coef)
        is_uniform = len(rewards) <= 1 and len(set(penalties)) <= 1
        shares["uniform"].append(is_uniform and not has_turns)
        if group:
            shares["zero"].append(rewards == {0.0})
            shares["solved"].append(outcomes == {True})
            shares["unsolved"].append(outcomes == {False})
    return {f"groups/{name}_share": mean(values) for name, values in shares.items()}


def summarize_evaluation(rows: Sequence[records.Rollout], *, seconds: float) -> dict[str, Any]:
    """The metrics in evals/STEP.json; shares and means are over the attempts that the environment
    did not fail.
    """
    valid = [row for row in rows if not row.error]
    rewards = [row.reward for row in valid]
    return {
        "n": len(valid),
        "success": mean(row.success for row in valid),
        "reward_mean": mean(rewards),
        "reward_std": _deviation(rewards),
        "truncated_share": mean(row.truncated for row in valid),
        "error_share": 1 - len(valid) / len(rows) if rows else 0.0,
        "completion_tokens_mean": mean(row.completion_tokens for row in valid),
        "turns_mean": mean(row.turns for row in valid),
        "seconds": round(seconds, 1),
        **_common_answer(valid),
        **_refusals(rows),
    }


def _common_answer(rows: Sequence[records.Rollout]) -> dict[str, float]:
    """How often one final answer is given to different tasks, and how often it is right."""
    attempts = [(row.task_id, row.answers[-1], row.success) for row in rows if row.answers]
    result = commonest(attempts)
    if result is None:
        return {}
    return {"answers/common_share": result.share, "answers/common_success": result.success}


def of_environment(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of one environment of a mixture, as they stand among those of the run."""
    return {f"{name}:{metric}": value for metric, value in metrics.items()}


def repeated_share(groups: Sequence[Sequence[PlayedRollout]]) -> float | None:
    """Share of rollouts that repeat an earlier one of their group token for token."""
    count = 0
    distinct = 0
    for group in groups:
        written = [tuple(r.transcript.completion_ids) for r in group if r.transcript]
        count += len(written)
        distinct += len(set(written))
    return 1 - distinct / count if count else None


def length_correlation(groups: Sequence[Sequence[PlayedRollout]]) -> float | None:
    """Pearson's r between tokens written and reward, among rollouts of one prompt with the same
    success.

    Without these two conditions every sound scorer would show a correlation: hard prompts take
    longer, and so do long wrong answers. None if too few rollouts remain, or if lengths or rewards
    do not differ."""
    lengths: list[float] = []
    rewards: list[float] = []
    cells = 0
    for group in groups:
        for success in (False, True):
            cell = [
                (r.transcript.model_tokens, r.reward)
                for r in group
                if r.transcript and r.success == success
            ]
            if len(cell) > 1:
                cells += 1
                lengths += _centred([length for length, _ in cell])
                rewards += _centred([reward for _, reward in cell])
    if len(lengths) - cells < LEAST_FREEDOM:
        return None
    scale = math.sqrt(sum(x * x for x in lengths) * sum(y * y for y in rewards))
    together = sum(x * y for x, y in zip(lengths, rewards, strict=True))
    return together / scale if scale > 1e-9 else None


def _centred(values: Sequence[float]) -> list[float]:
    middle = statistics.fmean(values)
    return [value - middle for value in values]


def mean(values: Iterable[float]) -> float | None:
    """The mean; None of no values."""
    result = list(values)
    return statistics.fmean(result) if result else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.pstdev(values) if values else None
