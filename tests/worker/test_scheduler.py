import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.process.host import Score, Step
from environments.same_task import kind_of
from tests.tiny import CHATML, make_tokenizer
from tests.virtual import FakeEngine, FakeHost, rolled, run_virtually
from worker.rollouts.scheduler import Generator, PlayedRollout, RolloutTask, TalkLimits, collect
from worker.rollouts.transcript import ChatTemplate
from worker.rollouts.turns import Completion, Sampling
from worker.training_session import StepsAhead

TEMPLATE = ChatTemplate(make_tokenizer())
LIMITS = TalkLimits(max_tokens=12, max_length=400)


def tasks(count: int) -> list[RolloutTask]:
    return [RolloutTask("train", index, index // 4, index, seed=index) for index in range(count)]


def roll(wanted: list[RolloutTask], host: FakeHost, engine: FakeEngine, limits: TalkLimits = LIMITS, template=TEMPLATE):
    return rolled(wanted, host, engine, limits, template)


def essence(rollouts: list[PlayedRollout]) -> list[object]:
    return [(r.task, r.task_id, r.finish, r.reward, r.transcript and r.transcript.ids) for r in rollouts]


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.floats(0, 2), st.integers(1, 24))
def test_timing_changes_nothing_but_the_time(seed: int, latency_s: float, count: int) -> None:
    rng = random.Random(seed)
    at_once, _ = run_virtually(roll(tasks(count), FakeHost(lambda: rng.random() * latency_s), FakeEngine()))
    one_by_one = [run_virtually(roll([task], FakeHost(), FakeEngine()))[0][0] for task in tasks(count)]
    assert essence(at_once) == essence(one_by_one)


def test_a_rollout_has_the_kind_of_its_task() -> None:
    (rollout, *_), _ = run_virtually(roll(tasks(4), FakeHost(), FakeEngine()))
    assert rollout.record(0).kind == kind_of([{"role": "user", "content": "q0"}], None)


def test_each_turn_has_its_reward_and_ends_where_its_tokens_do() -> None:
    rollouts, _ = run_virtually(roll(tasks(6), FakeHost(), FakeEngine()))
    for rollout in rollouts:
        transcript = rollout.transcript
        assert transcript and len(rollout.turn_rewards) == rollout.turns == len(transcript.answers)
        start = 0
        for number, ((end, reward), answer) in enumerate(zip(rollout.turn_rewards, transcript.answers, strict=True)):
            assert transcript.completion_ids[end - len(answer) : end] == answer
            assert sum(transcript.mask[start:end]) == len(answer)
            assert reward == (None if number % 2 else (number + 2) / 8)
            start = end
    assert any(rollout.turns > 2 for rollout in rollouts)


def test_a_conversation_goes_on_in_the_iteration_after_its_answer() -> None:
    """So the engine makes no more iterations than the longest conversation has tokens."""
    engine = FakeEngine()
    rollouts, _ = run_virtually(roll(tasks(12), FakeHost(), engine))
    tokens = [r.transcript.model_tokens for r in rollouts if r.transcript]
    assert len(engine.batches) == max(tokens)


def test_an_environment_that_works_for_hours_is_no_stall_but_an_engine_that_hangs_is() -> None:
    async def scenario(latency_s: float, step_s: float) -> int:
        engine = FakeEngine(step_s=step_s)
        generator = Generator(engine, run_step=engine.run_step)
        noted: list[None] = []
        noting = asyncio.ensure_future(generator.while_idle(lambda: noted.append(None)))
        await collect(tasks(1), FakeHost(lambda: latency_s), generator, TEMPLATE, LIMITS)
        noting.cancel()
        await generator.aclose()
        return len(noted)

    assert run_virtually(scenario(7200.0, 0.01))[0] > 2 * 7200 / 30 and run_virtually(scenario(0.0, 7200.7))[0] == 0


def test_the_rollouts_of_a_group_render_their_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(make_tokenizer())
    rendered: list[str] = []
    render = template._render

    def counted(messages: Any, **options: Any) -> str:
        rendered.append(messages[-1]["content"])
        return render(messages, **options)

    monkeypatch.setattr(template, "_render", counted)
    first, second = (template.prompt_ids([{"role": "user", "content": "q"}]) for _ in range(2))
    assert rendered == ["q"] and first == second
    first.append(0)
    assert first[:-1] == second == template.prompt_ids([{"role": "user", "content": "q"}])


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        (None, ["system", "user", "assistant", "user"]),
        ("x", ["system", "user", "assistant", "user"]),
        ("", ["user", "assistant", "user"]),
    ],
)
def test_a_system_prompt_stands_in_place_of_the_environments(text: str | None, roles: list[str]) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    shown = TalkLimits(1, 1, system_prompt=text).prompted(messages)
    assert [message["role"] for message in shown] == roles
    assert shown[0]["content"] == {None: "system", "x": "x", "": "user"}[text]
    x = TalkLimits(1, 1, system_prompt="x")
    assert x.prompted(messages[1:]) == x.prompted(messages) and len(messages) == 4


def fault(call: str, example: int) -> str | None:
    faults = {
        ("open", 1): "environment_error", ("step", 2): "environment_error", ("step", 3): "environment_timeout",
        ("score", 4): "environment_error",
    }  # fmt: skip
    return faults.get((call, example % 7))


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.integers(20, 120))
def test_masks_align_and_budgets_hold_whatever_fails(seed: int, max_length: int) -> None:
    host, engine = FakeHost(random.Random(seed).random, fault), FakeEngine()
    rollouts, _ = run_virtually(roll(tasks(20), host, engine, TalkLimits(12, max_length)))
    assert [r.task.index for r in rollouts] == list(range(20))
    assert host.closed == set(host.opened) and not engine.running
    for rollout in rollouts:
        found = rollout.error and rollout.error["code"]
        assert (rollout.finish == "error") == bool(found) and not (found and rollout.reward)
        expected = [fault(call, rollout.task.example) for call in ("open", "step", "score")]
        transcript = rollout.transcript
        if transcript is None:
            assert found and found == expected[0]
            continue
        fits = len(transcript.prompt_ids) < max_length
        assert found == (next(filter(None, expected), None) if fits else "prompt_too_long")
        assert len(transcript) <= max_length or not fits
        for token, mark, logprob in zip(transcript.completion_ids, transcript.mask, transcript.logprobs, strict=True):
            assert logprob == (-token if mark else 0)  # the engine's log-probabilities
        turns = [len(list(turn)) for mark, turn in itertools.groupby(transcript.mask) if mark]
        assert len(turns) == rollout.turns and max(turns, default=0) <= 12
        assert TEMPLATE._render(transcript.messages).startswith(TEMPLATE.tokenizer.decode(transcript.ids))


def test_no_rollout_waits_for_another() -> None:
    """512 rollouts of up to 20 turns with a second of latency take little longer than the longest
    of them alone."""
    wanted = tasks(512)
    started = time.process_time()
    limits, host = TalkLimits(12, 4096), lambda: FakeHost(lambda: 1.0, max_turns=20)
    alone = max(run_virtually(roll([task], host(), FakeEngine(), limits))[1] for task in wanted[19::20])
    rollouts, together = run_virtually(roll(wanted, host(), FakeEngine(), limits))
    assert len(rollouts) == 512 and max(r.turns for r in rollouts) == 20 and together < 1.01 * alone
    assert time.process_time() - started < 60


def test_a_window_bounds_the_open_episodes_and_nobody_waits_for_its_slowest() -> None:
    waits = itertools.count()

    def latency() -> float:
        return 60.0 if next(waits) == 0 else 0.1  # the first call of the first conversation

    host, engine, ended = FakeHost(latency), FakeEngine(), list[int]()
    open_ones = list[int]()

    async def scenario() -> list[PlayedRollout]:
        generator = Generator(engine, run_step=engine.run_step)

        def done(rollout: PlayedRollout) -> None:
            ended.append(rollout.task.index)
            open_ones.append(len(host.opened) - len(host.closed))

        try:
            return await collect(tasks(64), host, generator, TEMPLATE, LIMITS, on_done=done, open_at_once=8)
        finally:
            await generator.aclose()

    kept, _ = run_virtually(scenario())
    assert kept == [] and sorted(ended) == list(range(64)) and ended[-1] == 0
    assert max(open_ones) < 8 + 4  # a group of 4 begins as a whole


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.floats(0, 1.5))
def test_a_cancel_at_any_moment_leaks_nothing_and_the_generator_goes_on(seed: int, moment: float) -> None:
    async def scenario() -> list[PlayedRollout]:
        rng, engine = random.Random(seed), FakeEngine()
        host, generator = (FakeHost(lambda: rng.random() / 10, fault), Generator(engine, run_step=engine.run_step))
        running = asyncio.create_task(collect(tasks(16), host, generator, TEMPLATE, LIMITS))
        await asyncio.sleep(moment)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(1)  # for what is being closed and aborted
        assert not engine.running and host.closed == set(host.opened)
        try:
            return await collect(tasks(8), FakeHost(), generator, TEMPLATE, LIMITS)
        finally:
            await generator.aclose()

    assert essence(run_virtually(scenario())[0]) == essence(run_virtually(roll(tasks(8), FakeHost(), FakeEngine()))[0])


def test_each_rollout_is_scored_and_told_as_soon_as_its_conversation_ends() -> None:
    class Clocked(FakeHost):
        async def step(self, episode: int, assistant_text: str, calls: Any = (), usage: Any = None) -> Step:
            step = await super().step(episode, assistant_text, calls)
            if step.done:
                done[episode] = asyncio.get_running_loop().time()
            return step

        async def score(self, episode: int, *, latency_ms: int, total_tokens: int) -> Score:
            scored[episode] = asyncio.get_running_loop().time()
            return await super().score(episode, latency_ms=latency_ms, total_tokens=total_tokens)

    async def scenario() -> list[PlayedRollout]:
        generator = Generator(engine := FakeEngine(), run_step=engine.run_step)
        clock = asyncio.get_running_loop().time
        return await collect(
            tasks(24), Clocked(lambda: 0.05), generator, TEMPLATE, LIMITS, on_done=lambda r: told.append((clock(), r))
        )

    done: dict[int, float] = {}
    scored: dict[int, float] = {}
    told: list[tuple[float, PlayedRollout]] = []
    rollouts, _ = run_virtually(scenario())
    assert scored == done and len(done) == 24
    assert [r.task.index for r in rollouts] == list(range(24)) != [r.task.index for _, r in told]
    assert [moment for moment, _ in told] == [r.seconds for _, r in told]  # all had begun at 0
    assert len({moment for moment, _ in told}) > 12 and told[0][0] < told[-1][0] / 3


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.integers(0, 4))
def test_steps_that_begin_ahead_have_the_rollouts_of_their_own_tasks_and_wait_less(seed: int, ahead: int) -> None:
    """Ten steps of four conversations, training for a second after each."""
    steps = 10

    async def scenario(ahead: int) -> tuple[list[object], list[int], float]:
        rng, engine = random.Random(seed), FakeEngine()
        host, generator = FakeHost(lambda: rng.random()), Generator(engine, run_step=engine.run_step)
        under_way: list[int] = []

        async def of_step(step: int) -> list[PlayedRollout]:
            under_way.append(step)
            wanted = [RolloutTask("train", 4 * step + index, 0, index, seed=4 * step + index) for index in range(4)]
            return await collect(wanted, host, generator, TEMPLATE, LIMITS)

        clock, waited, taken, most = asyncio.get_running_loop().time, 0.0, [], []
        collections = StepsAhead(of_step)
        for step in range(steps):
            started = clock()
            taken.append(essence(await collections.take(step, min(step + ahead, steps - 1))))
            waited += clock() - started
            most.append(max(under_way) - step)
            await asyncio.sleep(1)
        await collections.aclose()
        await generator.aclose()
        assert sorted(under_way) == list(range(steps)) and not engine.running and host.closed == set(host.opened)
        return taken, most, waited

    (exact, none_ahead, all_waited), _ = run_virtually(scenario(0))
    (taken, most, waited), _ = run_virtually(scenario(ahead))
    assert taken == exact and set(none_ahead) == {0} and max(most) == ahead
    assert ahead == 0 or waited < all_waited


def test_steps_ahead_that_are_dropped_leave_no_request_and_no_episode_behind() -> None:
    async def scenario() -> None:
        host, engine = FakeHost(lambda: 0.05), FakeEngine()
        generator = Generator(engine, run_step=engine.run_step)
        collections = StepsAhead(lambda step: collect(tasks(3 * step), host, generator, TEMPLATE, LIMITS))
        await collections.take(1, 3)
        assert host.closed < set(host.opened), "some of the later steps are under way"
        await collections.aclose()
        await generator.aclose()
        assert not engine.running and host.closed == set(host.opened)

    run_virtually(scenario())


def test_nothing_is_submitted_while_the_policy_changes() -> None:
    class Watched(FakeEngine):
        changes = False

        def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
            assert not self.changes
            super().submit(request_id, prompt_ids, sampling)

        def step(self) -> list[tuple[str, Completion]]:
            assert not self.changes
            return super().step()

    async def scenario() -> list[PlayedRollout]:
        engine = Watched()
        generator = Generator(engine, run_step=engine.run_step)

        async def change() -> None:
            engine.changes = True
            await asyncio.sleep(0.2)
            engine.changes = False

        running = asyncio.create_task(collect(tasks(16), FakeHost(lambda: 0.03), generator, TEMPLATE, LIMITS))
        while not running.done():
            await generator.between_steps(change)
            await asyncio.sleep(0.05)
        await generator.aclose()
        return running.result()

    assert essence(run_virtually(scenario())[0]) == essence(run_virtually(roll(tasks(16), FakeHost(), FakeEngine()))[0])


def test_an_engine_that_fails_fails_every_caller_with_its_error() -> None:
    class Broken(FakeEngine):
        def step(self) -> list:
            raise RuntimeError("the device is gone")

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(roll(tasks(4), FakeHost(), Broken()))
    assert caught.group_contains(RuntimeError, match="the device is gone")


def test_a_turn_that_the_engine_refuses_fails_alone() -> None:
    class Picky(FakeEngine):
        def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
            if len(prompt_ids) > 3:
                raise ValueError("too long")
            super().submit(request_id, prompt_ids, sampling)

    async def scenario() -> list[object]:
        generator = Generator(engine := Picky(), run_step=engine.run_step)
        prompts = [[65], [65] * 4, [66], [65] * 4, [65]]
        turns = (generator.generate(prompt, Sampling(12, seed=seed)) for seed, prompt in enumerate(prompts))
        return await asyncio.gather(*turns, return_exceptions=True)

    outcomes, _ = run_virtually(scenario())
    assert [type(outcome) for outcome in outcomes] == [Completion, ValueError, Completion, ValueError, Completion]


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
    rollouts, _ = run_virtually(roll(tasks(2), FakeHost(), FakeEngine(), TalkLimits(12, 8)))
    assert [r.error and r.error["code"] for r in rollouts] == ["prompt_too_long"] * 2


def test_a_reply_that_leaves_no_room_is_not_trained_over() -> None:
    class Verbose(FakeHost):
        async def step(self, episode: int, assistant_text: str, calls: Any = (), usage: Any = None) -> Step:
            step = await super().step(episode, assistant_text, calls)
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
        async def step(self, episode: int, assistant_text: str, calls: Any = (), usage: Any = None) -> Step:
            step = await super().step(episode, assistant_text, calls)
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
