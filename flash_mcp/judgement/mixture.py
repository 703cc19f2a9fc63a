"""What the numbers of a run on several environments say of each of them.

The run's own metrics and summaries are over all its environments. Those of one stand beside them,
with its name and a colon before theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flash_mcp.judgement import comparison, health
from flash_mcp.judgement.health import Flag, Metrics
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import Evaluation, Json

Value = TypeVar("Value")


def own(name: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Those of one environment, under the names that a run on it alone gives them."""
    prefix = f"{name}:"
    mine: dict[str, Value] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            mine[key.removeprefix(prefix)] = value
    return mine


def flags_of(
    names: Iterable[str], history: Sequence[Metrics], raised: Sequence[Flag]
) -> list[Flag]:
    """Single environments' flags that are not `raised` for the run, by kind; the gravest first."""
    flags: dict[str, Flag] = {}
    reported = {flag.name for flag in raised}
    for name in names:
        for flag in health.flags([own(name, row) | {"step": row["step"]} for row in history]):
            if flag.name in reported:
                continue
            flag.evidence = f"{name}: {flag.evidence}"
            if first := flags.get(flag.name):
                first.evidence += f"; {flag.evidence}"
            else:
                flags[flag.name] = flag
    return sorted(flags.values(), key=lambda flag: flag.severity != "problem")


def evaluations_of(name: str, evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """The environment's part of each evaluation, as far as it can be judged."""
    parts: list[Evaluation] = []
    for row in evaluations:
        part = replace(row, summary=own(name, row.summary), constant=None)
        if part.summary.get("n"):
            parts.append(part)
    return parts


def line(
    part: Json,
    share: float,
    history: Sequence[Metrics],
    evaluations: Sequence[Evaluation],
    pairs: Sequence[comparison.Solved],
    is_active: bool,
) -> str:
    """One environment in words; `share` is that of the groups, evaluations are its own."""
    text = f"{part['name']} ({percent(share)} of the groups)"
    if success := health.trend(health.Steps(history).column(f"{part['name']}:success/rate")):
        text += f", success in training {success.first:.2f} -> {success.last:.2f}"
    judged = comparison.judge(evaluations, pairs, part.get("overlap"), is_active)
    if judged:
        verdict = judged[1]
        first, last = evaluations[0].summary["success"], evaluations[-1].summary["success"]
        text += f"; held out {verdict.outcome}, {first:.2f} -> {last:.2f}: {verdict.explanation}"
    elif evaluations:
        newest = evaluations[-1]
        text += f"; held out {newest.summary['success']:.2f} of {newest.summary['n']:g}"
        text += f" at step {newest.step}"
    return text
