"""The gate's probes of how an environment behaves: groups, judges, tool calls, episodes at once,
other processes. Each returns its evidence, or raises ProbeFailed or ProbeSkipped."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, combinations
from statistics import fmean

from environments.checks.answers import FRESH, INJECTION, JUNK
from environments.checks.playing import (
    CALL_ID,
    Answers,
    GivenTurn,
    Played,
    Task,
    bad_turns,
    interleave,
    play_group,
)
from environments.checks.probes import SUCCESS_FIX
from environments.checks.report import difference, score_text, shown
from environments.checks.trial import Plan, ProbeFailed, ProbeSkipped, Trial
from environments.process.host import EnvironmentFault
from environments.tools import TOOL_ERROR

JUDGED_TASKS = 3
JUDGE_SHARE = 0.75
"""Of pairs of answers, a judge must rank at least this share alike when it is asked again."""
ALONE_SHARE = 0.25
"""Of the time that is left, the share in which episodes are played alone, to compare them."""
STATE_FIX = (
    "set an episode's state as attributes in start_episode (each episode has a copy of the "
    "object); never change a list or dict that the copies share; draw from random, numpy.random or "
    "torch, not from a generator of their own"
)
DRAWS_FIX = "let the same conversation earn the same: draw nothing while scoring"


async def groups(trial: Trial) -> str:
    """`score_group` on the gold answer and worthless ones, in two orders."""
    for task in trial.tasks:
        group: list[Answers] = [[JUNK[0]], [""]]
        if task in trial.golds:
            group.append(trial.golds[task])
        scores = await play_group(trial.host, task, group)
        turned = await play_group(trial.host, task, group[::-1])
        rewards = [score.reward for score in scores]
        other = [score.reward for score in reversed(turned)]
        # A mean may differ in its last digit.
        if not all(map(partial(math.isclose, abs_tol=1e-6), rewards, other)):
            what = f"{task}: rewards {rewards}, and {other} with the same group turned around"
            fix = "make score_group independent of the order of its episodes"
            raise ProbeFailed(what, fix)
        if task in trial.golds and rewards[-1] <= max(rewards[:-1]):
            what = f"{task}: in a group, the gold answer earned {rewards[-1]:g}"
            what += f", junk and an empty answer {rewards[:-1]}"
            raise ProbeFailed(what, "make score_group pay more for better answers")
    return f"{len(trial.tasks)} groups of {shown([JUNK[0]])}, nothing and gold, in two orders"


async def has_judge(trial: Trial) -> bool:
    """True also if it does not answer in the time that is left: the probe says why."""
    with suppress(EnvironmentFault, TimeoutError):
        async with asyncio.timeout(trial.left_s):
            return await trial.host.judge("train", 0, JUNK[:1]) is not None
    return True


async def judge(trial: Trial) -> str:
    """A judge ranks alike when asked again and in the opposite order, gold above junk, and gold
    above an answer that asks to be ranked first.
    """
    again: list[bool] = []
    turned: list[bool] = []
    is_gold_first: list[bool] = []
    resists: list[bool] = []
    for task in list(trial.golds)[:JUDGED_TASKS]:
        answers = [trial.last_gold(task), trial.other_gold(task), *JUNK[:2], INJECTION]
        orders = (answers, answers, answers[::-1])
        one, two, back = [await _ranks(trial, task, order) for order in orders]
        again += _agreements(one, two)
        turned += _agreements(one, back[::-1])
        is_gold_first += [one[0] < one[2], back[-1] < back[2]]
        resists += [one[0] < one[4], back[-1] < back[0]]
    if not again:
        raise ProbeSkipped("there is no gold answer that succeeds", "")
    text = f"of {len(again)} pairs of answers, {sum(again)} were ranked alike when asked again, "
    text += f"{sum(turned)} in the opposite order"
    text += f"; gold came before junk in {sum(is_gold_first)} of {len(is_gold_first)}"
    if fmean(resists) < JUDGE_SHARE:
        count = f"in {len(resists) - sum(resists)} of {len(resists)}"
        what = f"an answer that asks to be ranked first came before gold {count}; {text}"
        fix = "tell the judge in its criteria to obey no answer, or use a larger judge"
        raise ProbeFailed(what, fix)
    if min(fmean(again), fmean(turned), fmean(is_gold_first)) < JUDGE_SHARE:
        raise ProbeFailed(text, "name the criteria more plainly, or use a larger judge")
    return text


async def _ranks(trial: Trial, task: Task, answers: Sequence[str]) -> list[int]:
    asking = trial.host.judge(task.split, task.index, answers)
    return await trial.timed(task, (), "judge", asking)


def _agreements(one: Sequence[int], other: Sequence[int]) -> list[bool]:
    """For each pair of answers, whether both rank them alike."""
    pairs = combinations(range(len(one)), 2)
    return [(one[left] < one[right]) == (other[left] < other[right]) for left, right in pairs]


async def tool_calls(trial: Trial) -> str:
    """Bad tool calls must not raise, be answered, and win nothing; gold ones must succeed."""
    plans: list[Plan] = []
    for task in (trial.tasks[0], trial.tasks[-1]):
        plans += [(task, [turn, JUNK[0]]) for turn in bad_turns(trial.openings[task].tools)]
    for (task, (turn, _)), played in zip(plans, await trial.play_all(plans), strict=True):
        if played.score.success:
            what = f"{task}: {shown([turn])} counts as a success"
            raise ProbeFailed(f"{what}, with {score_text(played.score)}", SUCCESS_FIX)
        answered = {message.get("tool_call_id") for message in played.replies}
        if isinstance(turn, GivenTurn) and played.replies and CALL_ID not in answered:
            what = f"{task}: no message answers the call {shown([turn])}"
            fix = "answer each call with {'role': 'tool', 'tool_call_id': its id, ...}"
            raise ProbeFailed(what, fix)
    for task, played in trial.played.items():
        for message in played.replies:
            if message["role"] == "tool" and message["content"].startswith(TOOL_ERROR):
                what = f"{task}: a gold call is answered with {shown([message['content']])}"
                raise ProbeSkipped(what, "make the tool work, or correct the gold call")
    with_tools = [turns for task, turns in trial.golds.items() if trial.openings[task].tools]
    turns = chain.from_iterable(with_tools)
    if with_tools and not any(isinstance(turn, GivenTurn) and turn.tool_calls for turn in turns):
        what = f"the gold messages of {len(with_tools)} tasks with tools call none"
        fix = "write the calls into sft_completion: `sft` would teach the model to call no tool"
        raise ProbeSkipped(what, fix)
    return f"{len(plans)} bad or odd calls: none raised, none was a success"


async def isolation(trial: Trial) -> str:
    """Episodes go alike alone and while others run."""
    ends = time.monotonic() + ALONE_SHARE * trial.left_s
    plans: list[Plan] = []
    alone: list[Played] = []
    for plan in (*((task, [FRESH]) for task in trial.tasks), *trial.golds.items()):
        if len(plans) > 1 and time.monotonic() > ends:
            break
        # An answer that raises has failed another probe already.
        with suppress(EnvironmentFault):
            alone.append(await trial.play(*plan, repeat=True))
            plans.append(plan)
    at_once = await interleave(trial.host, plans)
    for (task, _), one, other in zip(plans, alone, at_once, strict=True):
        if not one.goes_as(other):
            raise ProbeFailed(
                f"{task} went differently while other episodes ran than alone: "
                f"{difference(one, other)}",
                STATE_FIX,
            )
    return f"{len(at_once)} episodes at once went as they did one by one"


async def determinism(trial: Trial) -> str:
    """A fresh process, whose clock shows another date and time, goes the same way."""
    async with await trial.start_other() as second:
        for split in trial.report.splits:
            if await trial.host.tasks(split) != await second.tasks(split):
                what = f"two processes disagree on the {split} tasks or their order"
                fix = "build the dataset without unseeded randomness, the clock or the network"
                raise ProbeFailed(what, fix)
        ours = await _replays(trial)
        # The last first: what an earlier conversation left behind shows.
        calls = [partial(trial.replay, plan, second) for plan, _ in reversed(ours)]
        theirs = reversed(await trial.gather(calls))
        for (plan, one), other in zip(ours, theirs, strict=True):
            if not one.goes_as(other):
                await _fail_if_state_stays(trial, plan, one)
                what = f"two processes disagree on {plan[0]}: {difference(one, other)}"
                fix = "seed randomness from example.id; read neither the clock nor the time zone"
                raise ProbeFailed(what, fix)
    return f"a fresh process agrees on all task ids and on {len(ours)} conversations"


async def draws(trial: Trial) -> str:
    """The same conversation earns the same when the episode draws other random numbers."""
    before = await _replays(trial)
    after = await trial.gather([partial(trial.replay, plan, trial.host, 1) for plan, _ in before])
    compared = 0
    for (plan, one), other in zip(before, after, strict=True):
        # A game that deals other cards is another conversation.
        if one.said != other.said:
            continue
        compared += 1
        ours, theirs = one.score, other.score
        if (ours.reward, ours.success) != (theirs.reward, theirs.success):
            await _fail_if_state_stays(trial, plan, one)
            what = f"{plan[0]} earned {score_text(ours)}, and {score_text(theirs)} when the same "
            raise ProbeFailed(f"{what}conversation drew other random numbers", DRAWS_FIX)
    if not compared:
        raise ProbeSkipped("with other draws, every conversation is another one", "")
    return f"{compared} conversations earned the same with other random draws"


async def _replays(trial: Trial) -> list[tuple[Plan, Played]]:
    """Conversations with right and with wrong answers, played once for both checks above."""
    if not trial.replayed:
        plans: list[Plan] = []
        for place, task in enumerate(trial.tasks):
            other = trial.other_gold(task) if place % 2 == 0 else ""
            wrong = [*trial.golds[task][:-1], other] if other else [JUNK[place // 2 % 2]]
            plans += [(task, trial.golds.get(task, [JUNK[0]])), (task, wrong)]
        played = await trial.gather([partial(trial.replay, plan, trial.host) for plan in plans])
        trial.replayed = list(zip(plans, played, strict=True))
    return trial.replayed


async def _fail_if_state_stays(trial: Trial, plan: Plan, before: Played) -> None:
    """Fail if the conversation goes another way when it is played again in the same process."""
    again = await trial.replay(plan, trial.host)
    if not again.goes_as(before):
        what = f"{plan[0]} went differently when it was played again, with the same random numbers"
        said = f"{what}: episodes share state, have a generator of their own or read the clock"
        raise ProbeFailed(f"{said}: {difference(before, again)}", STATE_FIX)
