from typing import Any

import pytest

from environments.agents.calls import CallOptions
from flash_mcp.protocol.spec import RunSpec
from tests.tiny import make_tokenizer
from worker.rollouts.calls import Call, merged
from worker.rollouts.metrics import length_correlation, repeated_share, staleness, summarize, thinking_penalties
from worker.rollouts.scheduler import PlayedRollout, RolloutTask
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion
from worker.training.grpo import advantages_of

TOKENIZER = make_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))


def rollout(text: str, reward: float, *, success: bool = False, failed: bool = False) -> PlayedRollout:
    transcript = Transcript(TEMPLATE, [{"role": "user", "content": "?"}])
    transcript.add_answer(TEMPLATE.answer(text))
    error = {"code": "environment_error", "what": "boom"} if failed else None
    return PlayedRollout(RolloutTask("train", 0, 0, 0, 0), "t", transcript, reward=reward, success=success, error=error)


def test_groups_are_counted_by_what_they_can_teach():
    solved = [rollout("a", 1.0, success=True), rollout("b", 1.0, success=True)]
    mixed = [rollout("a", 1.0, success=True), rollout("b", 0.2)]
    partial = [rollout("a", 0.2), rollout("b", 0.0)]
    found = summarize([solved, mixed, partial, [rollout("a", 0.0), rollout("b", 0.0)]])
    assert found["groups/uniform_share"] == 0.5 and found["groups/solved_share"] == 0.25
    assert found["groups/unsolved_share"] == 0.5 and found["groups/zero_share"] == 0.25
    assert found["success/rate"] == 3 / 8


def test_refusals_are_summed_also_of_failed_rollouts_and_a_thread_counts_in_no_share():
    group = [rollout("a", 1.0), rollout("a", 0.0, failed=True), rollout("b", 0.0), rollout("b", 0.0)]
    group[0].refusals = {"thread_unsupported_request: thread": 2}
    group[1].refusals = {"unknown_parameter: min_tokens": 3}
    metrics = summarize([group])
    assert metrics["rollouts/refused_share"] == 0.25
    counts = {name: value for name, value in metrics.items() if name.startswith("refused/")}
    assert counts == {"refused/unknown_parameter: min_tokens": 3, "refused/thread_unsupported_request: thread": 2}
    assert "rollouts/refused_share" not in summarize([[rollout("a", 1.0)]])


def test_answers_under_a_schema_without_a_trained_token_are_counted():
    def call(number: int, *, grammar: bool, allowed: list[float] | None = None, **options: Any) -> Call:
        transcript = Transcript(TEMPLATE, [{"role": "user", "content": "?"}])
        call = Call(number, None, transcript, len(transcript), CallOptions(**options), has_grammar=grammar)
        completion = Completion(LETTERS[:2], [-1.0, -1.0], "stop", allowed=allowed, has_grammar=grammar)
        transcript.add_answer(completion, trains=call.options.is_trained)
        return call

    calls = [
        call(0, grammar=False),
        call(1, grammar=True, allowed=[0.0, -5.0]),
        call(2, grammar=True, allowed=[-5.0, -5.0]),
        call(3, grammar=True),  # the engine could not tell
        call(4, grammar=True, is_trained=False),
    ]
    group = [rollout("a", 1.0), rollout("b", 0.0)]
    group[0].transcript = merged(calls)
    found = summarize([group])
    assert (found["schema/answers"], found["schema/untrained"]) == (3, 2)
    assert "schema/answers" not in summarize([[rollout("a", 1.0)]])


def test_the_age_of_a_step_is_that_of_its_tokens():
    old, new = rollout("a", 1.0), rollout("b", 0.0)
    for each, policies in ((old, {5: 30, 6: 10}), (new, {7: 40})):
        assert each.transcript
        each.transcript.policies.update(policies)
    assert staleness([old, new], 7) == {"staleness/mean": 70 / 80, "staleness/max": 2}
    assert staleness([rollout("a", 1.0)], 7) == {}


def test_rollouts_that_the_environment_failed_count_for_nothing_but_the_errors():
    group = [rollout("a", 1.0, success=True), rollout("a", 0.0, failed=True)]
    found = summarize([group, [rollout("a", 0.0, failed=True), rollout("b", 0.0, failed=True)]])
    assert (found["groups/solved_share"], found["groups/zero_share"], found["rollouts/repeated_share"]) == (
        1.0, 0.0, 0.0,
    )  # fmt: skip
    assert (found["rollouts/error_share"], found["reward/mean"]) == (0.75, 1.0)


def test_a_step_in_which_everything_failed_has_no_means():
    found = summarize([[rollout("a", 0.0, failed=True)] * 2])
    assert found["rollouts/error_share"] == 1.0
    assert {found[name] for name in ("reward/mean", "groups/solved_share", "tokens/reward_correlation")} == {None}


def test_a_component_that_is_called_mean_is_not_taken_for_the_mean():
    group = [rollout("a", 1.0), rollout("b", 0.0)]
    for each in group:
        each.metrics = {"mean": -5.0, "std": 9.0, "brevity": 0.5}
    found = summarize([group])
    assert (found["reward/mean"], found["reward/std"], found["reward/brevity"]) == (0.5, 0.5, 0.5)


def test_what_another_rollout_of_the_group_wrote_is_repeated_across_groups_it_is_not():
    assert repeated_share([[rollout("x", 0), rollout("x", 0), rollout("x", 0), rollout("y", 0)]]) == 0.5
    assert repeated_share([[rollout("x", 0)], [rollout("x", 0)]]) == 0.0


def test_a_scorer_that_pays_for_short_answers_shows_in_the_correlation():
    group = [rollout("a" * length, 1 - length / 40) for length in range(5, 15)]
    assert length_correlation([group]) == pytest.approx(-1.0)
    assert length_correlation([group[:3]]) is None, "too few"
    successes = [rollout("a" * (5 if n % 2 else 30 + n), n % 2, success=n % 2 == 1) for n in range(10)]
    assert length_correlation([successes]) is None, "right answers happen to be short"
    hard = [[rollout("a" * (10 * size + n % 3), 1 / size) for n in range(4)] for size in (1, 2, 3)]
    assert length_correlation(hard) is None, "hard prompts take longer"


def test_one_answer_to_all_tasks_is_counted():
    groups = [[rollout("Yes", 1.0, success=n == 0)] for n in range(4)]
    for number, (made,) in enumerate(groups):
        made.task_id = f"t{number}"
        made.turns = 1
    found = summarize(groups)
    assert (found["answers/common_share"], found["answers/common_success"]) == (1.0, 0.25)


THOUGHTS = "<think>so it goes</think>4"
TOKENS = len(TOKENIZER.encode("so it goes", add_special_tokens=False))


def test_thinking_is_counted_in_each_turn_and_cut_off_only_where_it_does_not_end():
    talk = Transcript(TEMPLATE, [{"role": "user", "content": "?"}, {"role": "assistant", "content": THOUGHTS}])
    talk.add_environment([{"role": "user", "content": THOUGHTS}])
    assert talk.thinking == (0, False), "the model wrote none of it"
    for number in (1, 2):
        talk.add_answer(TEMPLATE.answer(THOUGHTS))
        talk.add_environment([{"role": "user", "content": "and?"}])
        assert talk.thinking == (number * TOKENS, False)
    talk.add_answer(TEMPLATE.answer("<think>so it goes"))
    assert talk.thinking[1], "the last answer ends within its thinking"


def test_a_template_that_opens_the_thinking_counts_what_comes_before_its_end():
    tokenizer = make_tokenizer()
    opened = "<|im_start|>assistant\n{% endif %}"
    assert opened in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(opened, opened.replace("{%", "<think>\n{%"))
    template = ChatTemplate(tokenizer)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("so it goes</think>4", "so it goes")]
    assert [template.thought(answer) for answer in ids] == [(TOKENS, False), (TOKENS, True)]
    assert template.thought(tokenizer.encode("4")) == (1, True)


def test_thinking_costs_nothing_while_a_task_is_unsolved():
    """The formula of the playbook: coefficient x tokens of thinking x share of the group that succeeds."""
    group = [
        rollout(THOUGHTS, 1.0, success=True), rollout("4", 1.0, success=True), rollout(THOUGHTS + THOUGHTS, 0.0),
        rollout("<think>so it goes", 0.0), rollout(THOUGHTS, 0.0, success=True, failed=True),
    ]  # fmt: skip
    unit = 0.01 * TOKENS / 2
    assert thinking_penalties(group, 0.01)[:2] == pytest.approx([unit, 0.0])
    fields = {"group_size": len(group), "thinking_length_penalty_coef": 0.01}
    advantages = advantages_of(group, RunSpec(environment="e", **fields))
    paid = [1.0 - unit, 1.0, 0.0 - unit, 0.0 - 0.01 * group[3].transcript.thinking[0] / 2]
    mean = sum(paid) / 4
    assert advantages == pytest.approx([*(reward - mean for reward in paid), 0.0], abs=1e-6)
    metrics = summarize([group], 0.01)
    assert metrics["rollouts/overthinking_share"] == 0.0, "it was not cut off"
    assert metrics["tokens/thinking_penalty"] == pytest.approx((2 * unit + unit + 0.0 + unit) / 5)
    solved = [rollout(THOUGHTS, 1.0, success=True), rollout("4", 1.0, success=True)]
    shares = [summarize([solved], coef)["groups/uniform_share"] for coef in (0.0, 0.01)]
    assert shares == [1.0, 0.0], "what thinking costs teaches too"
    for item in group:
        item.success = False
    assert not any(thinking_penalties(group, 0.01)), "brevity is worth nothing yet"
    assert "tokens/thinking_mean" not in summarize([[rollout("4", 1.0)]])
