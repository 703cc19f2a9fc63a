"""The gate: checks that an environment must pass before a model is trained on it.

    report = await check(folder)
    report.passed, report.probes[0].name, report.probes[0].evidence, report.probes[0].fix

All environment code runs in child processes through EnvironmentHost. A fault of the environment
becomes a failed probe and is not raised. The gate cannot prove that a scorer is right; it finds the
kinds of wrong scorers that were seen before."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from environments.base import ChatMessage
from environments.checks.answers import FRESH, JUNK, NO_DATE, NONSENSE, STATED, nearly, parts
from environments.checks.calls import CALL_ID, bad_turns
from environments.checks.constants import best_constant
from environments.checks.playing import (
    Answers,
    Played,
    Task,
    Turn,
    gold_turns,
    interleave,
    play,
    play_group,
)
from environments.checks.report import (
    Probe,
    Report,
    difference,
    failure,
    reward_range,
    score_text,
    shown,
)
from environments.checks.splits import repeated_questions, shared_tasks
from environments.process import requirements
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.tools import TOOL_ERROR
from environments.untrusted_text import plain_name

ROWS = {"train": 5, "eval": 3}
"""How many tasks of each split are tried, spread over the split."""
LOW_SHARE = 0.4
"""A worthless answer may earn at most this share of the gold answer's reward."""
HIT_SHARE = 0.25
"""Worthless answers may succeed on at most this share of the tasks: one may be right by chance."""
ECHO_SHARE = 0.6
"""The same for parts of the prompt: of two numbers in a question, the last is often the answer."""
CONSTANT_SHARE = 0.85
"""One constant may succeed on less than this share of the tasks, and earn less than this share of
the gold answers' reward. What succeeds on 93 % of all tasks may do so on 87 % of the sample."""
STATED_SHARE = 0.9
"""On so many tasks the prompt may state the gold answer."""
MOST_REWARD = 1000.0
JUDGED_TASKS = 3
JUDGE_SHARE = 0.75
"""Of pairs of answers, a judge must rank at least this share alike when it is asked again."""
SUCCESS_FIX = "set success in RewardResult: by default any score > 0 is a success"
WORTHLESS = {
    "junk": SUCCESS_FIX,
    "empty": SUCCESS_FIX,
    "none": SUCCESS_FIX,
    "truncated": "this is right if the first half of a gold answer says all; otherwise make the "
    "scorer require a whole answer",
    "prompt_echo": "the prompt contains what the scorer takes for an answer: make it read one "
    "place, a tag or the last line, and set success in RewardResult",
}
"""Probes with answers that must earn little, in order, and the fix if such an answer succeeds."""
OTHER_CLOCK = {"TZ": "ALT-13:37"}
"""What differs between the two processes that must agree: a time zone shows use of the clock."""
PAY_FIX = "pay less for what a model can write without solving the task"
OUT_OF_TIME = "not finished: the time for all checks was used up"


async def check(
    folder: Path,
    *,
    known_as: str = "",
    args: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
    deadline_s: float = 38.0,
    install_timeout_s: float | None = None,
    on_progress: requirements.Listener | None = None,
) -> Report:
    """Check the environment in `folder`: at most `timeout_s` a call, about `deadline_s` for all.

    Raises EnvironmentFault(not_ready) if its packages are not installed after
    `install_timeout_s`."""
    start = partial(
        EnvironmentHost.start,
        folder,
        known_as=known_as,
        args=args,
        secrets=secrets,
        timeout_s=timeout_s,
        start_timeout_s=max(1.0, deadline_s / 2),
    )
    start_other = partial(start, variables=OTHER_CLOCK)
    gate = _Gate(start, start_other, timeout_s, deadline_s)
    try:
        await requirements.interpreter(folder, timeout_s=install_timeout_s, on_progress=on_progress)
        await gate.run()
    except EnvironmentFault as fault:
        if fault.code == "not_ready":
            raise
        gate.add(failure("loads", fault))
    gate.report.seconds = gate.elapsed_s
    return gate.report


class _FailedError(Exception):
    """The check failed. The arguments are the evidence and the fix."""


class _SkippedError(Exception):
    """The check cannot be made on this environment. The arguments are the reason and the fix."""


class _Gate:
    def __init__(
        self,
        start: Callable[[], Awaitable[EnvironmentHost]],
        start_other: Callable[[], Awaitable[EnvironmentHost]],
        timeout_s: float,
        deadline_s: float,
    ) -> None:
        self.report = Report()
        self._start_host = start
        self._start_other = start_other
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._started = time.monotonic()
        self._slowest_s: dict[str, float] = {}
        self._tasks: list[Task] = []
        self._prompts: dict[Task, list[ChatMessage]] = {}
        self._tools: dict[Task, list[dict[str, Any]]] = {}
        self._golds: dict[Task, tuple[str, ...]] = {}
        self._played: dict[Task, Played] = {}
        self._junk_rewards: dict[Answers, list[float]] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def add(self, probe: Probe) -> None:
        self.report.probes.append(probe)

    async def run(self) -> None:
        async with await self._start_host() as host:
            self.report.splits = dict(host.splits)
            self.report.sandbox = dict(host.sandbox)
            sizes = f"{host.splits['train']} train tasks, {host.splits['eval']} eval tasks"
            self.add(Probe("loads", True, f"in {self.elapsed_s:.2f} s: {sizes}"))
            for split, size in host.splits.items():
                self._tasks += [Task(split, index) for index in _spread(size, ROWS[split])]
            await self._probe("tasks", self._check_tasks, host)
            if not await self._probe("prompts", self._check_prompts, host):
                return
            await self._probe("gold", self._check_gold, host)
            for name in WORTHLESS:
                await self._probe(name, self._check_worthless, host, name)
            await self._probe("near_gold", self._check_near_gold, host)
            await self._probe("nonsense", self._check_nonsense, host)
            await self._probe("order", self._check_order, host)
            await self._probe("constants", self._check_constants, host)
            if host.scores_groups:
                await self._probe("groups", self._check_groups, host)
                await self._probe_judge(host)
            if any(self._tools.values()):
                await self._probe("tool_calls", self._check_calls, host)
            await self._probe("isolation", self._check_isolation, host)
            await self._probe("determinism", self._check_determinism, host)
            self._add_times()

    async def _probe(self, name: str, body: Callable[..., Awaitable[str]], *args: Any) -> bool:
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - self.elapsed_s)):
                probe = Probe(name, True, await body(*args))
        except _SkippedError as skipped:
            probe = Probe(name, None, *skipped.args)
        except _FailedError as failed:
            probe = Probe(name, False, *failed.args)
        except EnvironmentFault as fault:
            probe = failure(name, fault)
        except TimeoutError:
            probe = Probe(name, None, OUT_OF_TIME, "make its calls faster and test again")
        self.add(probe)
        return probe.passed is True

    # -- probes: each returns its evidence, or raises ----------------------------------------------

    async def _check_tasks(self, host: EnvironmentHost) -> str:
        train = await host.tasks("train")
        held_out = await host.tasks("eval")
        for split, tasks in (("train", train), ("eval", held_out)):
            repeated = _repeated([task_id for task_id, _ in tasks])
            if repeated:
                what = f"{len(repeated)} of {len(tasks)} {split} tasks repeat an id"
                fix = "give each row its own id, or no id: load_dataset derives one from the row"
                raise _FailedError(f"{what}, for instance {plain_name(repeated[0])}", fix)
            if copies := repeated_questions(tasks):
                example = " = ".join(map(plain_name, copies[0]))
                what = f"{len(copies)} of {len(tasks)} {split} tasks ask what another one asks"
                fix = "remove the copies; if other data tells them apart, put that into their input"
                raise _FailedError(f"{what}, for instance {example}", fix)
        if not held_out:
            fix = "set eval_dataset (datasets/eval.jsonl): only held-out tasks can show learning"
            raise _SkippedError("there is no eval split", fix)
        overlap = shared_tasks(train, held_out)
        if overlap.shared:
            what = f"{overlap.shared} of {len(held_out)} eval tasks are train tasks too: {overlap}"
            fix = "remove them from one split"
            if overlap.same_id:
                fix += ", or give tasks that only share an id different ids"
            raise _FailedError(f"contaminated: {what}", fix)
        sizes = f"{len(train)} train and {len(held_out)} eval tasks"
        return f"{sizes}; ids and questions are unique, no task is in both splits"

    async def _check_prompts(self, host: EnvironmentHost) -> str:
        turns: list[int] = []
        for task in self._tasks:
            opening = await self._timed(
                task, (), "start_episode", host.open(task.split, task.index)
            )
            self._prompts[task] = opening.messages
            self._tools[task] = opening.tools
            turns.append(opening.max_turns)
            await self._timed(task, (), "close_episode", host.close(opening.episode))
        return f"{len(turns)} tasks opened, at most {max(turns)} turns each"

    async def _check_gold(self, host: EnvironmentHost) -> str:
        for task in self._tasks:
            try:
                answers = await self._timed(task, (), "sft_completion", gold_turns(host, task))
            except EnvironmentFault as fault:
                if fault.code == "environment_timeout":
                    raise
                if not fault.traceback:  # it gave one that breaks the contract
                    fix = "give rows an output that is text, or correct sft_completion"
                    raise _FailedError(f"a gold answer is not valid: {fault.shown}", fix) from fault
                fix = (
                    "give rows an output, or override sft_completion: algorithm='sft' needs it too"
                )
                raise _SkippedError(f"no gold answer: {fault.shown}", fix) from fault
            played = await self._play(host, task, answers)
            if not answers or not played.score.success:
                earned = f"{shown(answers)} earned {score_text(played.score)}"
                fix = "make the gold answer and the scorer agree; success must be true for it"
                raise _FailedError(f"the gold answer of {task} is no success: {earned}", fix)
            self._golds[task] = answers
            self._played[task] = played
        rewards = reward_range([played.score.reward for played in self._played.values()])
        return f"{len(self._played)} gold answers are successes, with rewards {rewards}"

    def _worthless(self, name: str, task: Task) -> list[Answers]:
        """The answers of the probe `name`: each is the model's turns of one conversation."""
        if name == "truncated":
            if task not in self._golds:
                return []
            *turns, last = self._golds[task]
            half = len(last) // 2
            return [[*turns, last[:size]] for size in sorted({half, min(1, half)})]
        prompt = [message["content"] for message in self._prompts[task]]
        texts: dict[str, Answers] = {
            "junk": JUNK,
            "empty": ["", " \n"],
            "none": [None],
            "prompt_echo": [prompt[-1], "\n".join(prompt)],
        }
        if name == "prompt_echo":
            texts[name] = [*texts[name], *filter(None, [self._asked(task)])]
        return [[text] for text in texts[name]]

    def _asked(self, task: Task) -> str:
        """What the prompt asks about, such as the words to sort; "" if that is the gold answer."""
        _, colon, question = self._prompts[task][-1]["content"].rpartition(":")
        question = question.strip(" .\n")
        gold = self._golds.get(task, [""])[-1].strip()
        return question if colon and question != gold else ""

    async def _check_worthless(self, host: EnvironmentHost, name: str) -> str:
        rewards: list[float] = []
        hits: dict[Task, str] = {}
        paid: dict[Task, str] = {}
        says_all: _SkippedError | None = None
        for task in self._tasks:
            for answers in self._worthless(name, task):
                score = (await self._play(host, task, answers, repeat=True)).score
                rewards.append(score.reward)
                if name in ("junk", "empty", "none"):
                    self._junk_rewards.setdefault(tuple(answers), []).append(score.reward)
                if score.success:
                    what = f"{shown(answers)} counts as a success, with {score_text(score)}"
                    what = f"{task}: {what}"
                    if name != "truncated" or self._ends_in_first_word(task, answers[-1] or ""):
                        hits.setdefault(task, what)
                    else:
                        # Half of a long answer may hold all that counts.
                        says_all = says_all or _SkippedError(what, WORTHLESS[name])
                elif task in self._played:
                    gold = self._played[task].score.reward
                    partial = name == "truncated" or answers == [self._asked(task)]
                    if not _is_low(score.reward, gold, partial=partial):
                        earned = f"{shown(answers)} earned {score_text(score)}"
                        paid.setdefault(task, f"{task}: {earned}, the gold answer {gold:g}")
        if not rewards:
            raise _SkippedError("there is no gold answer to cut short", "")
        share = ECHO_SHARE if name == "prompt_echo" else HIT_SHARE
        count = len(self._tasks)
        doubts = [
            _judge_hits(hits, count, WORTHLESS[name], share),
            _judge_hits(paid, count, PAY_FIX, share),
        ]
        if name == "prompt_echo":
            # "Answer yes or no" names the gold answer of half the tasks.
            fix = "remove the gold answer from the prompt"
            doubts.append(_judge_hits(self._stated(), count, fix, STATED_SHARE))
        _skip_if(doubts)
        if says_all:
            raise says_all
        return f"{len(rewards)} answers, no success, rewards {reward_range(rewards)}"

    def _stated(self) -> dict[Task, str]:
        """The tasks whose prompt states the gold answer."""
        stated: dict[Task, str] = {}
        for task, turns in self._golds.items():
            prompt = "\n".join(message["content"] for message in self._prompts[task])
            gold = re.escape(turns[-1].strip())
            if match := re.search(rf"{STATED}{gold}(?!\w)", prompt, re.IGNORECASE):
                stated[task] = f"{task}: the prompt says {shown([match[0]])}"
        return stated

    async def _check_near_gold(self, host: EnvironmentHost) -> str:
        """Wrong answers that hold the gold answer, or all of it but a character."""
        tasks = [task for task in self._tasks if self._other_gold(task)]
        if not tasks:
            raise _SkippedError("this needs gold answers that differ between tasks", "")
        changed: dict[Task, str] = {}
        hedged: dict[Task, str] = {}
        for task in tasks:
            *turns, gold = self._golds[task]
            other = self._other_gold(task)
            for near in nearly(gold):
                if (await self._play(host, task, [*turns, near])).score.success:
                    what = f"{shown([near])} counts as a success; gold is {shown([gold])}"
                    changed.setdefault(task, f"{task}: {what}")
            # One of the two orders may be right: the first or the last answer counts.
            both = [f"{gold}\n{other}", f"{other}\n{gold}"]
            scores = [(await self._play(host, task, [*turns, text])).score for text in both]
            if all(score.success for score in scores):
                hedged[task] = f"{task}: {shown(both)}: both count as successes"
        whole = "compare the whole answer with the gold answer, not a part or a rounded form of it"
        single = "accept one answer: read one place, such as the last tag, and refuse several"
        doubts = [
            _judge_hits(changed, len(tasks), whole),
            _judge_hits(hedged, len(tasks), single),
        ]
        _skip_if(doubts)
        return f"{len(tasks)} tasks: a changed character and two answers at once are no successes"

    async def _check_nonsense(self, host: EnvironmentHost) -> str:
        """Answers of the gold answer's form that mean nothing must not raise."""
        count = 0
        for task in (self._tasks[0], self._tasks[-1]):
            *turns, gold = self._golds.get(task, [""])
            before, inner, after = parts(gold)
            texts = [before + text + after for text in NONSENSE]
            for digit in "09\u00b2":
                texts.append(before + re.sub(r"\d", digit, inner) + after)
            texts.append(before + re.sub(r"\d{4}-\d\d-\d\d", NO_DATE, inner) + after)
            for text in texts:
                await self._play(host, task, [*turns, text], repeat=True)
                count += 1
        return f"{count} answers, none raised"

    def _other_gold(self, task: Task) -> str:
        """The last turn of another task's gold answer, if it differs; else ""."""
        if task not in self._golds:
            return ""
        last = self._golds[task][-1].strip()
        others = (turns[-1] for turns in reversed(self._golds.values()))
        return next((text for text in others if text.strip() != last), "")

    async def _check_order(self, host: EnvironmentHost) -> str:
        """Gold answers earn more than wrong ones of the right form, and those no less than junk."""
        golds = [played.score.reward for played in self._played.values()]
        most = max(map(abs, chain(golds, *self._junk_rewards.values())), default=0.0)
        if most > MOST_REWARD:
            what = f"a reward is {most:g}; advantages and losses suit rewards of about 1"
            raise _FailedError(what, "scale the rewards, for instance to 0 to 1")
        wrong: list[float] = []
        for task in self._tasks:
            if other := self._other_gold(task):
                answers = [*self._golds[task][:-1], other]
                wrong.append((await self._play(host, task, answers)).score.reward)
        if not wrong or not self._junk_rewards:
            raise _SkippedError("this needs gold answers that differ between tasks", "")
        best = max(map(fmean, self._junk_rewards.values()))
        mean_wrong = fmean(wrong)
        mean_gold = fmean(golds)
        if best > mean_wrong + (mean_gold - mean_wrong) * HIT_SHARE:
            what = f"a junk answer earned {best:.3g}, well-formed wrong answers {mean_wrong:.3g}"
            fix = "pay a wrong answer of the right form at least as much as junk"
            raise _FailedError(f"{what} on average", fix)
        return f"gold {mean_gold:.3g}, well-formed wrong {mean_wrong:.3g}, junk at most {best:.3g}"

    async def _check_constants(self, host: EnvironmentHost) -> str:
        """One answer must not win everywhere."""
        split = "eval" if self.report.splits["eval"] else "train"
        constant = await best_constant(host, split, range(self.report.splits[split]))
        if constant is None:
            raise _SkippedError("no constant could be scored", "")
        tasks = len(constant.successes)
        count = f"{sum(constant.successes)} of {tasks} {split} tasks"
        text = f"the best constant {shown([constant.answer])} succeeds on {count}"
        text += f", with a mean reward of {constant.mean_reward:.3g}"
        rewards = [played.score.reward for played in self._played.values()]
        gold_reward = fmean(rewards or [0.0])
        pays = gold_reward > 0 and constant.mean_reward >= CONSTANT_SHARE * gold_reward
        if tasks > 2 and (constant.success_share >= CONSTANT_SHARE or pays):
            fix = "make the scorer read the task, or balance the tasks: no one answer may win"
            raise _FailedError(text, fix)
        return text

    def _ends_in_first_word(self, task: Task, beginning: str) -> bool:
        """Whether this beginning of the gold answer ends within the first word of it."""
        rest = self._golds[task][-1][len(beginning) :]
        return beginning.isalnum() and rest[:1].isalnum()

    async def _check_groups(self, host: EnvironmentHost) -> str:
        """`score_group` on the gold answer and worthless ones, in two orders."""
        for task in self._tasks:
            group: list[Answers] = [[JUNK[0]], [""]]
            if task in self._golds:
                group.append(self._golds[task])
            scores = await play_group(host, task, group)
            turned = await play_group(host, task, group[::-1])
            rewards = [score.reward for score in scores]
            other = [score.reward for score in reversed(turned)]
            # A mean may differ in its last digit.
            if not all(map(partial(math.isclose, abs_tol=1e-6), rewards, other)):
                what = f"{task}: rewards {rewards}, and {other} with the same group turned around"
                fix = "make score_group independent of the order of its episodes"
                raise _FailedError(what, fix)
            if task in self._golds and rewards[-1] <= max(rewards[:-1]):
                what = f"{task}: in a group, the gold answer earned {rewards[-1]:g}"
                what += f", junk and an empty answer {rewards[:-1]}"
                raise _FailedError(what, "make score_group pay more for better answers")
        return f"{len(self._tasks)} groups of {shown([JUNK[0]])}, nothing and gold, in two orders"

    async def _probe_judge(self, host: EnvironmentHost) -> None:
        """Add the probe if the environment has a judge."""
        has_judge = True
        with suppress(EnvironmentFault):
            has_judge = await host.judge("train", 0, JUNK[:1]) is not None
        if has_judge:
            await self._probe("judge", self._check_judge, host)

    async def _check_judge(self, host: EnvironmentHost) -> str:
        """A judge ranks the same answers alike when asked again and in the opposite order, and gold
        above junk.
        """
        again: list[bool] = []
        turned: list[bool] = []
        is_gold_first: list[bool] = []
        for task in list(self._golds)[:JUDGED_TASKS]:
            answers = [self._golds[task][-1], self._other_gold(task), *JUNK[:2]]
            orders = (answers, answers, answers[::-1])
            one, two, back = [await self._ranks(host, task, order) for order in orders]
            again += _agreements(one, two)
            turned += _agreements(one, back[::-1])
            is_gold_first += [one[0] < one[2], back[-1] < back[1]]
        if not again:
            raise _SkippedError("there is no gold answer to judge", "")
        text = f"of {len(again)} pairs of answers, {fmean(again):.0%} were ranked alike when asked "
        text += f"again, {fmean(turned):.0%} in the opposite order"
        text += f"; gold came before junk in {fmean(is_gold_first):.0%}"
        if min(fmean(again), fmean(turned), fmean(is_gold_first)) < JUDGE_SHARE:
            fix = "name the criteria more plainly, or use a larger judge"
            raise _FailedError(text, fix)
        return text

    async def _ranks(self, host: EnvironmentHost, task: Task, answers: Sequence[str]) -> list[int]:
        asking = host.judge(task.split, task.index, answers)
        return await self._timed(task, (), "judge", asking)

    async def _check_calls(self, host: EnvironmentHost) -> str:
        """Bad tool calls must not raise, be answered, and win nothing; gold ones must succeed."""
        count = 0
        for task in (self._tasks[0], self._tasks[-1]):
            for turn in bad_turns(self._tools[task]):
                played = await self._play(host, task, [turn, JUNK[0]])
                count += 1
                if played.score.success:
                    what = f"{task}: {shown([turn])} counts as a success"
                    raise _FailedError(f"{what}, with {score_text(played.score)}", SUCCESS_FIX)
                answered = {message.get("tool_call_id") for message in played.replies}
                if isinstance(turn, Turn) and played.replies and CALL_ID not in answered:
                    what = f"{task}: no message answers the call {shown([turn])}"
                    fix = "answer each call with {'role': 'tool', 'tool_call_id': its id, ...}"
                    raise _FailedError(what, fix)
        for task, played in self._played.items():
            for message in played.replies:
                if message["role"] == "tool" and message["content"].startswith(TOOL_ERROR):
                    what = f"{task}: a gold call is answered with {shown([message['content']])}"
                    raise _SkippedError(what, "make the tool work, or correct the gold call")
        with_tools = [turns for task, turns in self._golds.items() if self._tools[task]]
        turns = chain.from_iterable(with_tools)
        if with_tools and not any(isinstance(turn, Turn) and turn.tool_calls for turn in turns):
            what = f"the gold messages of {len(with_tools)} tasks with tools call none"
            fix = "write the calls into sft_completion: `sft` would teach the model to call no tool"
            raise _SkippedError(what, fix)
        return f"{count} bad or odd calls: none raised, none was a success"

    async def _check_isolation(self, host: EnvironmentHost) -> str:
        wrong = [(task, [FRESH]) for task in self._tasks]
        plans: list[tuple[Task, Answers]] = []
        alone: list[Played] = []
        for plan in (*wrong, *self._golds.items()):
            # An answer that raises has failed another check already.
            with suppress(EnvironmentFault):
                alone.append(await self._play(host, *plan, repeat=True))
                plans.append(plan)
        at_once = await interleave(host, plans)
        for (task, _), one, other in zip(plans, alone, at_once, strict=True):
            if one != other:
                raise _FailedError(
                    f"{task} went differently while other episodes ran than alone: "
                    f"{difference(one, other)}",
                    "set an episode's state as attributes in start_episode (each episode has a "
                    "copy of the object); never change a list or dict that the copies share; "
                    "draw from random, numpy.random or torch, not from a generator of their own",
                )
        return f"{len(at_once)} episodes at once went as they did one by one"

    async def _check_determinism(self, first: EnvironmentHost) -> str:
        async with await self._start_other() as second:
            for split in self.report.splits:
                if await first.tasks(split) != await second.tasks(split):
                    what = f"two processes disagree on the {split} tasks or their order"
                    fix = "build the dataset without unseeded randomness, the clock or the network"
                    raise _FailedError(what, fix)
            for task in self._tasks:
                one = await self._replay(first, task)
                other = await self._replay(second, task)
                if one != other:
                    what = f"two processes disagree on {task}: {difference(one, other)}"
                    fix = (
                        "seed randomness from example.id; read neither the clock nor the time zone"
                    )
                    raise _FailedError(what, fix)
        return f"a fresh process agrees on all task ids and on {len(self._tasks)} conversations"

    def _add_times(self) -> None:
        slow: list[str] = []
        times: list[str] = []
        for method, seconds in self._slowest_s.items():
            times.append(f"{method} {seconds * 1000:.1f} ms")
            if seconds > self._timeout_s:
                slow.append(method)
        fix = f"{', '.join(slow)} must answer within {self._timeout_s:g} s" if slow else ""
        self.add(Probe("time", not slow, f"slowest calls: {', '.join(times)}", fix))

    # -- playing -----------------------------------------------------------------------------------

    async def _play(
        self, host: EnvironmentHost, task: Task, answers: Answers, *, repeat: bool = False
    ) -> Played:
        """Play a conversation with these model turns. `repeat` gives the last one again until the
        episode ends.
        """
        watch = partial(self._timed, task, answers)
        return await play(host, task, answers, repeat=repeat, watch=watch)

    async def _replay(self, host: EnvironmentHost, task: Task) -> Played:
        """Play the gold conversation of a task, or one with junk if it has none."""
        if task in self._golds:
            return await self._play(host, task, self._golds[task])
        return await self._play(host, task, [JUNK[0]], repeat=True)

    async def _timed(self, task: Task, answers: Answers, method: str, call: Awaitable[Any]) -> Any:
        begun = time.monotonic()
        try:
            return await call
        except EnvironmentFault as fault:
            is_given = answers and method != "start_episode"
            suffix = f" with the answer {shown(answers)}" if is_given else ""
            raise EnvironmentFault(
                fault.code,
                f"{task}{suffix}: {fault.what}",
                fault.traceback,
                is_foreign=fault.is_foreign,
                declared=fault.declared,
            ) from fault
        finally:
            seconds = time.monotonic() - begun
            self._slowest_s[method] = max(self._slowest_s.get(method, 0.0), seconds)


def _agreements(one: Sequence[int], other: Sequence[int]) -> list[bool]:
    """For each pair of answers, whether both rank them alike."""
    pairs = combinations(range(len(one)), 2)
    return [(one[left] < one[right]) == (other[left] < other[right]) for left, right in pairs]


def _judge_hits(hits: Mapping[Task, str], tasks: int, fix: str, share: float = HIT_SHARE) -> str:
    """Fail if wrong answers succeed on more than this share of the tasks. The doubt that remains
    if they succeed on some, which may be chance; else "".
    """
    if not hits:
        return ""
    first = next(iter(hits.values()))
    if len(hits) > share * tasks:
        raise _FailedError(f"{first} (so on {len(hits)} of {tasks} tasks)", fix)
    return f"{first} (on {len(hits)} of {tasks} tasks: maybe by chance)"


def _skip_if(doubts: Sequence[str]) -> None:
    if result := "; ".join(filter(None, doubts)):
        raise _SkippedError(result, "")


def _is_low(reward: float, gold: float, *, partial: bool) -> bool:
    """Whether a worthless answer's reward is well below the gold answer's. A partial answer's
    reward only has to be lower.
    """
    if partial or gold <= 0:
        return reward < gold
    return reward <= LOW_SHARE * gold


def _spread(size: int, count: int) -> list[int]:
    """Up to `count` indices spread over range(size), with the first and the last."""
    if size <= count:
        return list(range(size))
    return [round(place * (size - 1) / (count - 1)) for place in range(count)]


def _repeated(ids: Sequence[str]) -> list[str]:
    """The ids that were there before, in order."""
    seen: set[str] = set()
    repeated: list[str] = []
    for task_id in ids:
        if task_id in seen:
            repeated.append(task_id)
        seen.add(task_id)
    return repeated
