import math
import random
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flash_mcp.judgement import health
from flash_mcp.judgement.failures import failure_counts, failure_modes
from flash_mcp.protocol.records import Rollout, Try
from tests.samples import sample_rollout

HEALTHY: dict[str, float | None] = {
    "reward/mean": 0.5, "success/rate": 0.5, "groups/uniform_share": 0.1, "rollouts/truncated_share": 0.0,
    "rollouts/error_share": 0.0, "tokens/completion_mean": 40.0, "entropy": 1.0, "grad_norm": 0.5,
    "is_ratio/mean": 1.0, "is_ratio/clipped_share": 0.0, "sampling_kl": 0.001, "groups/zero_share": 0.0,
    "groups/solved_share": 0.2, "groups/unsolved_share": 0.2, "rollouts/repeated_share": 0.1,
    "tokens/reward_correlation": -0.2,
}  # fmt: skip


def history(steps: int = 12, **columns: list[float]) -> list[dict[str, float | None]]:
    """Steps from 1 on, healthy but for the columns given."""
    return [
        {"step": step + 1, **HEALTHY, **{name: values[step] for name, values in columns.items()}}
        for step in range(steps)
    ]


def names(metrics: list[dict[str, float | None]]) -> list[str]:
    return [flag.name for flag in health.flags(metrics)]


def rising(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


def test_a_trend_averages_a_fifth_of_the_values_at_each_end():
    found = health.trend([0.0] * 5 + [1.0] * 5)
    assert found is not None and health.trend([]) is None
    assert (found.first, found.last, found.best, found.over_steps) == (0.0, 1.0, 1.0, 2)


def test_noise_alone_seldom_counts_as_a_falling_reward():
    rng, fallen = random.Random(5), 0
    for _ in range(4000):
        moved = health._difference([rng.gauss(0.5, 0.1) for _ in range(20)])
        assert moved is not None
        fallen += moved.change < -moved.band
    assert 0.015 <= fallen / 4000 <= 0.035


def test_a_sparkline_goes_from_the_least_to_the_greatest_value():
    assert health.sparkline([0, 1]) == "▁█" and health.sparkline([5, 5, 5]) == "▁▁▁"
    assert health.sparkline([]) == ""


@example([0.0, 2.3e-308], 2)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_a_sparkline_never_has_more_bars_than_asked_for(values: list[float], width: int):
    assert len(health.sparkline(values, width)) == min(width, len(values))


LEARNING = {"reward/mean": rising(0.2, 0.8, 30), "success/rate": rising(0.1, 0.7, 30)}
KNOWN = {"frequencies/loss": [2.7] * 12}
IGNORING = {"prompt_effect": [0.04] * 5, "prompt_effect/before": [0.8] * 5}
SPIKE = [0.01] * 7 + [0.9, 0.02, 0.01, 0.01, 0.01]


@pytest.mark.parametrize(
    ("flag", "steps", "columns", "evidence"),
    [
        ("environment_errors", 5, {"rollouts/error_share": [0.3] * 5}, "30 % of the rollouts of steps 1 to 5"),
        (
            "refused_requests",
            5,
            {"rollouts/refused_share": [0.2] * 5, "refused/unknown_parameter: min_tokens": [3] * 5},
            "in 20 % of the rollouts of steps 1 to 5 the model's API refused requests of the agent or left something "
            "out: 'unknown_parameter' of 'min_tokens' 15 times",
        ),
        (
            "untrained_answers",
            5,
            {"schema/answers": [8] * 5, "schema/untrained": [2] * 5},
            "answers under a schema were not trained in steps 1 to 5: 10 of 40",
        ),
        ("truncation", 5, {"rollouts/truncated_share": [0.4] * 5}, "40 %"),
        ("truncation", 5, {"rollouts/truncated_share": [0.996] * 5}, "99.6 %"),
        ("uniform_groups", 5, {"groups/uniform_share": [0.9] * 5}, "90 % of the groups of steps 1 to 5"),
        (
            "uniform_groups",
            5,
            {"groups/uniform_share": [0.9] * 5, "groups/zero_share": [0.85] * 5, "reward/mean": [0.01] * 5},
            "all zero in 85 %",
        ),
        ("no_gradient", 5, {"grad_norm": [0.0] * 5}, "5 steps"),
        ("policy_mismatch", 5, {"is_ratio/mean": [0.5] * 5}, "0.50"),
        ("policy_mismatch", 5, {"is_ratio/mean": [0.7] * 5}, "set top_p=1"),  # the nucleus explains it
        ("policy_spike", 12, {"kl": SPIKE}, "kl jumped to 0.9 at step 8"),
        ("policy_spike", 12, {"sampling_kl": SPIKE}, "sampling_kl jumped to 0.9 at step 8"),
        ("policy_spike", 12, {"is_ratio/clipped_share": SPIKE}, "is_ratio/clipped_share jumped to 0.9 at step 8"),
        ("reward_flat", 30, {"reward/mean": [0.3 + 0.05 * (-1) ** step for step in range(30)]}, "± 0.0"),
        ("reward_falling", 30, {"reward/mean": rising(0.8, 0.2, 30)}, "-0.4"),
        ("reward_without_success", 30, {"reward/mean": rising(0.2, 0.8, 30)}, "success by +0.000"),
        ("too_hard", 10, {"groups/unsolved_share": [0.9] * 10, "groups/solved_share": [0.0] * 10}, "in 10 % some did"),
        ("too_easy", 10, {"groups/unsolved_share": [0.0] * 10, "groups/solved_share": [0.85] * 10}, "in 15 % only"),
        ("repeated_outputs", 5, {"rollouts/repeated_share": [0.8] * 5}, "80 %"),
        (
            "answer_collapse",
            5,
            {"answers/common_share": [0.95] * 5, "answers/common_success": [0.6] * 5},
            "95 % of the rollouts of steps 1 to 5 end in the same answer whatever the task",
        ),
        ("reward_follows_length", 6, {"tokens/reward_correlation": [-0.9] * 6}, "shorter ones are paid more"),
        ("reward_follows_length", 6, {"tokens/reward_correlation": [0.9] * 6}, "longer ones are paid more"),
        ("entropy_collapse", 30, {"entropy": rising(1.0, 0.01, 30), **LEARNING}, "at 61 % success"),
        ("length_collapse", 30, {"tokens/completion_mean": rising(100, 5, 30), **LEARNING}, "15 % to 65 %"),
        ("overfitting", 5, {"eval_loss": [2.0, 1.5, 1.4, 1.6, 1.9]}, "1.900"),
        ("destroyed_model", 5, {"loss": [0.1, 17, 33, 20, 56], **KNOWN}, "the loss is 36.3, from 0.1: no better than"),
        (
            "destroyed_model",
            12,
            {"loss": [5] * 12, "grad_norm": [4, 16, 1, 1, 1, 1, 1, *rising(0.2, 0.01, 5)], **KNOWN},
            "and the gradient 0.01 after 16: no better than that of token frequencies alone (2.7)",
        ),
        ("destroyed_model", 5, {"loss": [3, 3, 2.8, 2.9, 2.9], **KNOWN, **IGNORING}, "0.04 nats a token less likely"),
        ("ignored_prompts", 5, {"loss": [3, 3, 2.6, 2.9, 2.9], **KNOWN, **IGNORING}, "before training 0.8"),
        ("stale_policy", 5, {"is_ratio/clipped_share": [0.25] * 5}, "25 % of the trained tokens of steps 1 to 5"),
    ],
)
def test_each_warning_sign_is_raised_alone_with_its_numbers_and_a_remedy(
    flag: str, steps: int, columns: dict[str, list[float]], evidence: str
):
    found = health.flags(history(steps, **columns))
    assert [each.name for each in found] == [flag]
    assert found[0].remedy and evidence in f"{found[0].evidence}. {found[0].remedy}"


@pytest.mark.parametrize(
    ("steps", "columns"),
    [
        pytest.param(30, LEARNING, id="health"),
        pytest.param(5, {"rollouts/error_share": [0.01] * 5}, id="a rare error"),
        pytest.param(5, {"rollouts/truncated_share": [0.15] * 5}, id="a few long answers"),
        pytest.param(5, {"groups/uniform_share": [0.5] * 5}, id="half of the groups uniform"),
        pytest.param(
            5, {"answers/common_share": [0.95] * 5, "answers/common_success": [0.95] * 5}, id="one answer that is right"
        ),
        pytest.param(
            5, {"answers/common_share": [0.8] * 5, "answers/common_success": [0.5] * 5}, id="an answer that is common"
        ),
        pytest.param(5, {"grad_norm": [0.0, 0.0, 0.1, 0.0, 0.0]}, id="a gradient now and then"),
        pytest.param(5, {"is_ratio/mean": [0.95] * 5}, id="a slight mismatch"),
        pytest.param(5, {"is_ratio/clipped_share": [0.15] * 5}, id="some samples of an older policy"),
        pytest.param(12, {"kl": rising(0.0, 0.4, 12)}, id="a steady drift"),
        pytest.param(12, {"sampling_kl": [0.01] * 11 + [0.03]}, id="noise of the engine"),
        pytest.param(12, {"reward/mean": [0.3] * 12}, id="flat, but too short to tell"),
        pytest.param(30, {"reward/mean": rising(0.9, 0.95, 30), "success/rate": [0.95] * 30}, id="flat, but solved"),
        pytest.param(9, {"groups/unsolved_share": [0.9] * 9, "groups/solved_share": [0.0] * 9}, id="a hard start"),
        pytest.param(10, {"groups/unsolved_share": [0.5] * 10}, id="half of the tasks hard"),
        pytest.param(10, {"groups/solved_share": [0.6] * 10}, id="most of the tasks easy"),
        pytest.param(
            5, {"rollouts/repeated_share": [0.9] * 5, "tokens/completion_mean": [2.0] * 5}, id="answers of one word"
        ),
        pytest.param(5, {"rollouts/repeated_share": [0.85] * 5, "success/rate": [0.8] * 5}, id="repeated, and right"),
        pytest.param(6, {"tokens/reward_correlation": [-0.9, 0.5, -0.9, 0.4, -0.8, 0.1]}, id="length here and there"),
        pytest.param(30, {"tokens/completion_mean": rising(100, 60, 30), **LEARNING}, id="somewhat shorter"),
        pytest.param(15, {"tokens/completion_mean": rising(100, 5, 15)}, id="shorter, but not paid for"),
        pytest.param(30, {"entropy": rising(1.0, 0.3, 30), **LEARNING}, id="some entropy left"),
        pytest.param(5, {"eval_loss": [2.0, 1.5, 1.4, 1.41, 1.42]}, id="a held-out loss at rest"),
        pytest.param(3, {"tokens/completion_mean": [99, 60, 48], "reward/mean": [0.1, 0.1, 0.2]}, id="short at first"),
        pytest.param(5, {"loss": [5, 4, 4.5, 4.2, 4], **KNOWN}, id="no better than frequencies as yet"),
        pytest.param(5, {"loss": [2.5, 2.8, 2.9, 3, 2.8], **KNOWN}, id="answers that are hard to tell"),
        pytest.param(
            5, {"prompt_effect": [0.001] * 5, "prompt_effect/before": [0.01] * 5}, id="prompts that say nothing"
        ),
        pytest.param(5, {"prompt_effect": [0.2] * 5, "prompt_effect/before": [0.8] * 5}, id="prompts that say less"),
        pytest.param(5, {"grad_norm": [0.0] * 5, "success/rate": [1.0] * 5}, id="nothing left to learn"),
    ],
)
def test_what_resembles_a_warning_sign_raises_none(steps: int, columns: dict[str, list[float]]):
    assert names(history(steps, **columns)) == []


TUNED = {"loss": 0.1, "grad_norm": 0.5}


@pytest.mark.parametrize(
    "metrics",
    [
        [{"step": step, **TUNED, "entropy": value} for step, value in enumerate(rising(1.3, 0.1, 30))],
        [dict.fromkeys(HEALTHY)] * 40,
        [dict.fromkeys(HEALTHY, math.nan)] * 40,
    ],
    ids=["fine-tuning makes one answer sure", "missing", "undefined"],
)
def test_what_is_meant_missing_or_undefined_raises_no_flag(metrics: list[dict[str, float | None]]):
    assert names(metrics) == []


@pytest.mark.parametrize(
    ("success", "severity"),
    [
        (rising(0.1, 0.8, 30), "warning"),
        ([0.6] * 30, "warning"),
        (rising(0.6, 0.1, 30), "problem"),
        ([0.0] * 30, "problem"),
        ([1.0] * 30, "problem"),
    ],
    ids=["earned", "held", "lost", "never there", "never judged"],
)
def test_a_reward_that_rises_by_shortening_is_a_problem_unless_success_bears_it_out(
    success: list[float], severity: str
):
    shrinking = {"tokens/completion_mean": rising(100, 20, 30), "reward/mean": rising(0.1, 0.9, 30)}
    found = health.flags(history(30, **shrinking, **{"success/rate": success}))
    assert [flag.severity for flag in found if flag.name == "length_collapse"] == [severity]


@pytest.mark.parametrize(
    ("metrics", "begins"),
    [
        (history(2), "too early to say: 2 of the 3 steps"),
        (history(30, **LEARNING), "yes: reward went from 0.252 to 0.748 over steps 1 to 30"),
        (history(30, **LEARNING, **{"rollouts/truncated_share": [0.3] * 30}), "yes: "),
        (history(5, **{"grad_norm": [0.0] * 5}), "no: no_gradient: the gradient was 0"),
        (history(30, **{"reward/mean": [0.3] * 30}), "doubtful: reward_flat: "),
        (history(12, **{"reward/mean": rising(0.9, 0.95, 12), "success/rate": [0.95] * 12}), "no need: solved"),
        ([{"step": step, "loss": 2 - step / 10} for step in range(1, 9)], "yes: loss went from 1.9 to 1.2"),
        ([{"step": step, "loss": 1 + step / 10} for step in range(1, 9)], "doubtful: loss went from"),
        (  # The loss of single batches is at rest; that of the held-out rows is not.
            [
                {"step": step, "loss": 0.01, **({"eval_loss": 0.1 / step} if step % 4 == 0 else {})}
                for step in range(1, 13)
            ],
            "yes: held-out loss went from 0.025 to 0.00833",
        ),
        (
            [
                {"step": step, "loss": 2 - step / 10, **({"eval_loss": step} if step > 2 else {})}
                for step in range(1, 5)
            ],
            "doubtful: held-out loss went from 3 to 4 over steps 1 to 4",
        ),
    ],
)
def test_one_line_says_whether_the_run_is_worth_continuing(metrics: list[dict[str, float | None]], begins: str):
    line = health.outlook(metrics, health.flags(metrics))
    assert line.startswith(begins) and "\n" not in line


def test_a_distillation_is_judged_by_its_distance_from_the_teacher():
    flat = {"reward/mean": 0.0, "groups/uniform_share": 1.0, "groups/zero_share": 1.0, "success/rate": 0.0}
    steps = [{"step": n, **flat, "teacher_kl": 1.0 - 0.03 * n} for n in range(1, 31)]
    assert health.flags(steps) == []
    assert health.outlook(steps, []).startswith("yes: teacher_kl went from 0.895 to 0.175")
    assert health.outlook(steps[::-1], []).startswith("doubtful: teacher_kl")


def test_a_run_that_learns_from_few_groups_is_worth_continuing():
    few = history(30, **LEARNING, **{"groups/uniform_share": [0.65] * 30, "groups/solved_share": [0.35] * 30})
    (flag,) = health.flags(few)
    assert flag.severity == "warning" and "solved" in flag.remedy and "all right in 35 %" in flag.evidence
    assert health.outlook(few, [flag]).startswith("yes: reward went from 0.25")
    none = history(30, **{"groups/uniform_share": [1.0] * 30, "groups/solved_share": [0.0] * 30})
    assert health.flags(none)[0].severity == "problem"
    (end,) = health.flags(history(5, **{"groups/uniform_share": [0.9] * 5, "success/rate": [0.95] * 5}))
    assert end.severity == "warning" and "solved" in end.remedy


def test_problems_stand_before_warnings():
    both = history(5, **{"rollouts/truncated_share": [0.3] * 5, "rollouts/error_share": [0.5] * 5})
    assert [flag.severity for flag in health.flags(both)] == ["problem", "warning"]


@pytest.mark.parametrize("count", [3, 5, 10, 19])
def test_noise_of_a_few_steps_is_not_called_progress(count: int) -> None:
    draws = random.Random(0)
    said = [
        health.outlook([{"step": step, "reward/mean": 0.3 + draws.gauss(0, 0.05)} for step in range(count)], [])
        for _ in range(200)
    ]
    assert sum(line.startswith("yes") for line in said) <= 10


def test_a_few_steps_that_rise_one_after_the_other_are_progress() -> None:
    rising = [{"step": step, "reward/mean": 0.1 * step} for step in range(1, 6)]
    assert health.outlook(rising, []).startswith("yes: reward went from 0.1 to 0.5 over steps 1 to 5")
    assert health.outlook(rising[:4], []) == (
        "too early to say: reward went from 0.1 to 0.4 over steps 1 to 4, too unsteadily to call it a trend"
    )
    problem = health.Flag(name="truncation", severity="problem", evidence="50 % were cut", remedy="raise max_tokens")
    assert health.outlook(rising, [problem], "improved").startswith("yes: the held-out success rose; mind truncation")


@pytest.mark.parametrize(
    ("bands", "raised"), [(-1.7, ["reward_falling"]), (-1.3, ["reward_flat"]), (0.9, ["reward_flat"])]
)
def test_a_reward_falls_from_one_and_a_half_bands(bands: float, raised: list[str]) -> None:
    noise = [0.05, -0.05] * 30
    band = health._difference(noise).band
    history = [
        {"step": step, "reward/mean": 0.5 + value + bands * band * (step >= 40)} for step, value in enumerate(noise)
    ]
    assert [flag.name for flag in health.flags(history)] == raised


def test_reward_without_success_is_measured_by_the_rewards_own_size() -> None:
    for unit in (1e-3, 1.0, 1e3):
        history = [
            {"step": step, "reward/mean": unit * (0.2 + step / 100), "success/rate": 0.1 + 0.01 * (step % 2)}
            for step in range(30)
        ]
        assert [flag.name for flag in health.flags(history)] == ["reward_without_success"]


def test_what_the_held_out_success_did_is_told_before_the_doubts() -> None:
    assert health.outlook(history(30, **LEARNING), [], "regressed").startswith("no: the held-out success fell")
    falling = [{"step": step, "reward/mean": 0.5 - 0.01 * step} for step in range(5)]
    assert health.outlook(falling, [], "improved").startswith("yes: the held-out success rose; in training reward went")
    doubt = health.Flag(name="reward_flat", severity="warning", evidence="flat", remedy="")
    assert health.outlook(falling, [doubt], "improved") == "yes: the held-out success rose; mind reward_flat: flat"


# -- a sample before training ----------------------------------------------------------------------


def group(task: str, *rewards: float, **values: Any) -> list[Try]:
    """Attempts at one task; correct from a reward of 1 on."""
    given = {"error": None, "truncated": False, "tokens": 9, "turns": 1, **values}
    return [
        Try(index=index, task_id=task, reward=reward, success=reward >= 1, **given)
        for index, reward in enumerate(rewards)
    ]


def of_sample(groups: list[list[Try]], **summary: float) -> list[tuple[str, str]]:
    found = health.sample_flags([each for group in groups for each in group], summary)
    return [(flag.name, flag.severity) for flag in found]


MIXED = [group(f"mixed-{number}", 0.0, 1.0) for number in range(4)]
SAME = [group(f"same-{number}", 0.5, 0.5) for number in range(6)]
CUT = [group(f"cut-{number}", 0.0, 1.0, truncated=True) for number in range(4)]


def test_what_a_sample_shows_is_told_once():
    assert of_sample(MIXED) == of_sample([]) == []
    common = {"answers/common_share": 0.9, "answers/common_success": 0.5}
    assert [name for name, _ in of_sample(MIXED, **common)] == ["answer_collapse"]
    solved = [group(f"solved-{number}", 1.0, 1.0) for number in range(8)]
    assert of_sample(solved) == [("uniform_groups", "problem"), ("solved", "warning")]
    failed = [group(f"failed-{number}", 0.0, 0.0, error="environment_error") for number in range(8)]
    assert of_sample(failed) == [("environment_errors", "problem")]


def test_a_hopeless_sample_of_tasks_with_gold_answers_leads_to_sft():
    for has_gold in (False, True):
        groups = [group(f"{number}", 0.0, 0.0, has_gold=has_gold) for number in range(6)]
        (flag,) = health.sample_flags([each for group in groups for each in group], {})
        assert flag.severity == "problem" and ("train(algorithm='sft', ...)" in flag.remedy) == has_gold


@pytest.mark.parametrize(
    ("name", "groups", "severity"),
    [
        ("uniform_groups", [*SAME[:4], *MIXED], None),
        ("uniform_groups", [*SAME, *MIXED], "warning"),
        ("uniform_groups", SAME, "problem"),
        ("truncation", [*CUT[:1], *MIXED], "warning"),
        ("truncation", CUT, "problem"),
    ],
)
def test_a_sample_and_steps_with_the_same_numbers_are_judged_alike(
    name: str, groups: list[list[Try]], severity: str | None
):
    assert dict(of_sample(groups)).get(name) == severity
    uniform = sum(len({each.reward for each in group}) == 1 for group in groups) / len(groups)
    truncated = sum(group[0].truncated for group in groups) / len(groups)
    steps = history(5, **{"groups/uniform_share": [uniform] * 5, "rollouts/truncated_share": [truncated] * 5})
    assert {flag.name: flag.severity for flag in health.flags(steps)}.get(name) == severity


def test_a_model_that_is_cut_off_while_it_thinks_overthinks():
    thinking = {"tokens/thinking_mean": [300.0] * 12, "rollouts/overthinking_share": [0.3] * 12}
    (flag,) = health.flags(history(**thinking))
    assert flag.name == "overthinking"
    assert "30 %" in flag.evidence and "'thinking_length_penalty_coef': 0.0007" in flag.remedy
    assert names(history(**{**thinking, "rollouts/overthinking_share": [0.1] * 12})) == []


def test_thinking_that_grows_without_success_is_overthinking():
    grows = {"tokens/thinking_mean": rising(100, 300, 12), "rollouts/overthinking_share": [0.0] * 12}
    assert names(history(**grows)) == ["overthinking"]
    assert names(history(**grows, **{"success/rate": rising(0.3, 0.7, 12)})) == []


def test_answers_that_a_run_pays_to_be_short_have_not_collapsed():
    shrinks = {"tokens/completion_mean": rising(100, 20, 12), "reward/mean": rising(0.3, 0.6, 12)}
    assert names(history(**shrinks)) == ["length_collapse"]
    assert names(history(**shrinks, **{"tokens/thinking_penalty": [0.1] * 12})) == []


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
