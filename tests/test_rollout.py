from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.host import Step
from tests.tiny import CHATML, make_tokenizer
from tests.virtual import FakeEngine, FakeHost, run_virtually
from worker.engine import Sampling
from worker.rollout import Generator, Limits, Rollout, Task, collect
from worker.transcript import ChatTemplate

TEMPLATE = ChatTemplate(make_tokenizer())
LIMITS = Limits(max_tokens=12, max_length=400)


def tasks(count: int) -> list[Task]:
    return [Task("train", index, index // 4, index, seed=index) for index in range(count)]


async def roll(
    wanted: list[Task],
    host: FakeHost,
    engine: FakeEngine,
    limits: Limits = LIMITS,
    template: ChatTemplate = TEMPLATE,
) -> list[Rollout]:
    generator = Generator(engine, run_step=engine.run_step)
    try:
        return await collect(wanted, host, generator, template, limits)
    finally:
        await generator.aclose()


def essence(rollouts: list[Rollout]) -> list[object]:
    return [(r.task, r.task_id, r.finish, r.reward, r.transcript and r.transcript.ids) for r in rollouts]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**16), st.floats(0, 2), st.integers(1, 24))
def test_timing_changes_nothing_but_the_time(seed: int, latency_s: float, count: int) -> None:
    rng = random.Random(seed)
    at_once, _ = run_virtually(roll(tasks(count), FakeHost(lambda: rng.random() * latency_s), FakeEngine()))
    one_by_one = [run_virtually(roll([task], FakeHost(), FakeEngine()))[0][0] for task in tasks(count)]
    assert essence(at_once) == essence(one_by_one)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**16), st.integers(20, 120))
def test_masks_align_and_budgets_hold_whatever_fails(seed: int, max_length: int) -> None:
    rng = random.Random(seed)
    host = FakeHost(rng.random, fails=lambda example: example % 5 == 2)
    engine = FakeEngine()
    rollouts, _ = run_virtually(roll(tasks(20), host, engine, Limits(12, max_length)))
    assert [r.task.index for r in rollouts] == list(range(20))
    assert host.closed == set(host.opened) and not engine.running
    for rollout in rollouts:
        transcript = rollout.transcript
        assert transcript is not None
        assert len(transcript.completion_ids) == len(transcript.mask) == len(transcript.logprobs)
        assert len(transcript) <= max_length or rollout.finish == "error"
        assert (rollout.finish == "error") == bool(rollout.error)
        assert not rollout.error or rollout.reward == 0.0


def test_no_rollout_waits_for_another() -> None:
    """512 rollouts of up to 20 turns with a second of latency take little longer than the longest of them alone."""
    wanted = tasks(512)
    started = time.monotonic()
    limits, host = Limits(12, 4096), lambda: FakeHost(lambda: 1.0, max_turns=20)
    alone = max(run_virtually(roll([task], host(), FakeEngine(), limits))[1] for task in wanted[19::20])
    rollouts, together = run_virtually(roll(wanted, host(), FakeEngine(), limits))
    assert len(rollouts) == 512 and max(r.turns for r in rollouts) == 20
    assert together < 1.01 * alone
    assert time.monotonic() - started < 60


def test_a_cancelled_collection_leaves_no_request_and_no_episode_behind() -> None:
    async def scenario() -> None:
        host, engine = FakeHost(lambda: 0.05), FakeEngine()
        generator = Generator(engine, run_step=engine.run_step)
        running = asyncio.create_task(collect(tasks(32), host, generator, TEMPLATE, LIMITS))
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await generator.aclose()
        assert not engine.running
        assert host.closed == set(host.opened)

    run_virtually(scenario())


def test_an_engine_that_fails_fails_every_caller_with_its_error() -> None:
    class Broken(FakeEngine):
        def step(self) -> list:
            raise RuntimeError("the device is gone")

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(roll(tasks(4), FakeHost(), Broken()))
    assert caught.group_contains(RuntimeError, match="the device is gone")


def test_an_abandoned_turn_is_aborted_and_the_others_go_on() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        generator = Generator(engine, run_step=engine.run_step)
        turns = [asyncio.create_task(generator.generate([65], Sampling(64, seed=seed))) for seed in range(8)]
        await asyncio.sleep(0.02)
        turns[3].cancel()
        done = await asyncio.gather(*turns, return_exceptions=True)
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in done].count(True) == 1
        assert engine.aborted == ["3"] and not engine.running

    run_virtually(scenario())


def test_a_prompt_without_room_for_an_answer_is_an_error_of_that_rollout() -> None:
    rollouts, _ = run_virtually(roll(tasks(2), FakeHost(), FakeEngine(), Limits(12, 8)))
    assert [r.error and r.error["code"] for r in rollouts] == ["prompt_too_long"] * 2


def test_a_reply_that_leaves_no_room_is_not_trained_over() -> None:
    class Verbose(FakeHost):
        async def step(self, episode: int, assistant_text: str) -> Step:
            step = await super().step(episode, assistant_text)
            return Step(step.done, [{"role": "user", "content": "page " * 500} for _ in step.messages])

    rollouts, _ = run_virtually(roll(tasks(12), Verbose(), FakeEngine()))
    cut = [r.transcript for r in rollouts if r.finish == "length" and r.transcript]
    assert len(cut) == 10  # all but those of one turn
    for transcript in cut:
        assert len(transcript) < 60 and transcript.mask[-1] == 1 and transcript.truncated
        assert len(transcript.completion_ids) == len(transcript.mask) == len(transcript.logprobs)
        assert transcript.messages[-1]["content"].startswith("page")


def test_a_conversation_that_the_template_refuses_costs_no_other() -> None:
    class Twice(FakeHost):
        async def step(self, episode: int, assistant_text: str) -> Step:
            step = await super().step(episode, assistant_text)
            return Step(step.done, step.messages * (2 if self.opened[episode][0] == "5" else 1))

    tokenizer = make_tokenizer()
    check = "{% if loop.index0 and message['role'] == 'user' == messages[loop.index0 - 1]['role'] %}"
    refuse = check + "{{ raise_exception('roles must alternate') }}{% endif %}"
    tokenizer.chat_template = CHATML.replace("%}", "%}" + refuse, 1)
    rollouts, _ = run_virtually(roll(tasks(12), Twice(), FakeEngine(), template=ChatTemplate(tokenizer)))
    assert [r.task.index for r in rollouts if r.error] == [5]
    assert rollouts[5].error and rollouts[5].error["code"] == "template_unsupported"


def test_one_of_a_group_warms_the_prefix_cache_for_the_others() -> None:
    class Recorder(FakeEngine):
        def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
            submitted.append((len(self.batches), list(prompt_ids)))
            super().submit(request_id, prompt_ids, sampling)

    async def scenario() -> None:
        engine = Recorder()
        generator = Generator(engine, run_step=engine.run_step)
        prompts = [[65], [65], [66], [65], [66]]
        await asyncio.gather(*(generator.generate(prompt, Sampling(4, seed=i)) for i, prompt in enumerate(prompts)))

    submitted: list[tuple[int, list[int]]] = []
    run_virtually(scenario())
    assert [prompt for step, prompt in submitted if step == 0] == [[65], [66]]
    assert [prompt for step, prompt in submitted if step == 1] == [[65], [65], [66]]
