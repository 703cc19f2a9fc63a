"""What an evaluation found, as tools show it."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from pydantic import Field

from flash_mcp.judgement import attempts as evaluations
from flash_mcp.judgement import comparison, statistics
from flash_mcp.protocol.records import Run
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.frame import Part


class Scores(Part):
    """What an evaluation found. Attempts that failed in environment code are counted in `errors`
    and nowhere else.
    """

    tasks: int = Field(
        description="Tasks with at least one attempt that the environment did not fail."
    )
    n: int = Field(description="Attempts that the rates are over.")
    success: float | None = Field(default=None, description="Share of attempts that succeeded.")
    low: float | None = Field(
        default=None, description="Wilson 95 % interval of success; tasks are the unit."
    )
    high: float | None = Field(default=None, description="Its upper end.")
    reward: float | None = Field(default=None, description="Mean reward.")
    pass_at: dict[str, float] | None = Field(
        default=None, description="pass@k, unbiased: chance that one of k attempts succeeds."
    )
    uniform_share: float | None = Field(
        default=None,
        description="Share of tasks whose attempts all got the same reward: nothing to learn for GRPO.",
    )
    never_solved: int | None = Field(
        default=None, description="With several attempts: tasks without a success."
    )
    always_solved: int | None = Field(
        default=None, description="With several attempts: tasks without a failure."
    )
    tokens_mean: float | None = Field(
        default=None, description="Tokens that the model wrote in an attempt."
    )
    tokens_most: int | None = Field(default=None, description="In the longest attempt.")
    turns: float | None = Field(default=None, description="Mean number of model turns.")
    truncated: float | None = Field(
        default=None, description="Share cut off at max_tokens or max_length."
    )
    errors: int = Field(
        description="Attempts that failed in environment code; left out of all rates."
    )
    error_codes: dict[str, int] | None = Field(
        default=None, description="How often each error came."
    )
    tokens_per_s: float | None = Field(default=None, description="Generation speed.")


class Change(Part):
    """How much one metric differs: other - base."""

    outcome: comparison.Outcome = Field(
        description="no_change: smaller than min_change; underpowered: too few tasks to say anything."
    )
    change: float
    low: float = Field(description="95 % interval.")
    high: float
    test: comparison.Test
    p: float | None = Field(default=None, description="Of McNemar's exact test.")
    decide_n: int | None = Field(
        default=None, description="Where underpowered: tasks that would decide."
    )
    explanation: str


def scores(store: Store, run: Run) -> Scores | None:
    """What the newest evaluation of a run found; None before there is one."""
    rows = store.evals(run.id)
    if not rows:
        return None
    found = evaluations.tries(store, run.id, rows[-1].step)
    valid = [attempt for attempt in found if attempt.error is None]
    errors = Counter(attempt.error for attempt in found if attempt.error is not None)
    tasks = evaluations.by_task(found)
    if not valid:
        return Scores(tasks=0, n=0, errors=len(found), error_codes=dict(errors) or None)
    interval = statistics.success_interval(
        [[each.success for each in attempts] for attempts in tasks.values()]
    )
    several = len(valid) > len(tasks)
    solved = [{each.success for each in attempts} for attempts in tasks.values()]
    speed = rows[-1].summary.get("tokens_per_s")
    return Scores(
        tasks=len(tasks),
        n=len(valid),
        success=round(fmean(each.success for each in valid), 4),
        low=round(interval.low, 4),
        high=round(interval.high, 4),
        reward=round(fmean(each.reward for each in valid), 4),
        pass_at={k: round(value, 4) for k, value in evaluations.pass_at(tasks).items()} or None,
        uniform_share=round(evaluations.uniform_share(tasks) or 0.0, 4) if several else None,
        never_solved=solved.count({False}) if several else None,
        always_solved=solved.count({True}) if several else None,
        tokens_mean=round(fmean(each.tokens for each in valid), 1),
        tokens_most=max(each.tokens for each in valid),
        turns=round(fmean(each.turns for each in valid), 2),
        truncated=round(fmean(each.truncated for each in valid), 4),
        errors=len(found) - len(valid),
        error_codes=dict(errors) or None,
        tokens_per_s=round(speed) if speed else None,
    )


def thoughts(found: Scores) -> list[str]:
    """What the numbers of an evaluation ask for."""
    notes: list[str] = []
    if found.errors:
        share = found.errors / (found.errors + found.n)
        notes.append(
            f"{share:.0%} of the attempts failed in environment code and say nothing of the model; env_test"
        )
    if (found.truncated or 0.0) >= 0.1:
        notes.append(
            f"{found.truncated:.0%} were cut off: raise max_tokens or max_length, or the rate is of the limit"
        )
    if (
        found.n
        and found.low is not None
        and found.high is not None
        and found.high - found.low > 0.2
    ):
        notes.append(
            f"the interval is wide: {found.tasks} tasks tell little; more tasks narrow it, attempts hardly do"
        )
    return notes
