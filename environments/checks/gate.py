"""The gate: checks that an environment must pass before a model is trained on it.

    report = await check(folder)
    report.passed, report.probes[0].name, report.probes[0].evidence, report.probes[0].fix

All environment code runs in child processes through EnvironmentHost. A fault of the environment
becomes a failed probe and is not raised. The gate cannot prove that a scorer is right; it finds the
kinds of wrong scorers that were seen before."""

from __future__ import annotations

import asyncio
import inspect
import re
import reprlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from environments.base import ChatMessage, Environment, EnvironmentSingleTurn
from environments.checks.constants import Constant, best_constant
from environments.checks.splits import shared_tasks
from environments.process import requirements, sandbox
from environments.process.faults import FIXES, remedy
from environments.process.foreign import plain_name, quoted
from environments.process.host import EnvironmentFault, EnvironmentHost, Score, Step

ROWS = {"train": 5, "eval": 3}
"""How many tasks of each split are tried, spread over the split."""
LOW_SHARE = 0.4
"""A worthless answer may earn at most this share of the gold answer's reward."""
HIT_SHARE = 0.25
"""Worthless answers may succeed on at most this share of the tasks: one may be right by chance."""
ECHO_SHARE = 0.6
"""The same for parts of the prompt: of two numbers in a question, the last is often the answer."""
CONSTANT_SHARE = 0.9
"""One constant may succeed on less than this share of the tasks, and earn less than this share of
the gold answers' reward."""
MOST_REWARD = 1000.0
SHORT_ANSWER = 24
"""A gold answer of at most so many characters says nothing else once a character is changed."""
JUNK = (
    "asdf qwer zxcv",
    "I cannot help with that.",
    "<answer></answer> {} [] <<>> \\boxed{}",
    "\u2603 \u00ff \u202e \U0001f9ea \x00 \ud800",
    "bla " * 5000,
)
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
STATED = r"(?:answer|solution|gold|hint|result|output)\W{0,3}(?:is|are)?\W{0,3}"
"""What stands before a gold answer that a prompt gives away."""
FRESH = "a text that no other check has played"
NONSENSE = (
    "1/0",
    "nan",
    "1e999",
    "(",
    "[" * 100_000,
    "raise SystemExit",
    "null",
    "9" * 5000,
)
"""Answers of about the right form that make careless parsers raise."""
OTHER_CLOCK = {"TZ": "ALT-13:37"}
"""What differs between the two processes that must agree: a time zone shows use of the clock."""
PAY_FIX = "pay less for what a model can write without solving the task"
OUT_OF_TIME = "not finished: the time for all checks was used up"

Answers = Sequence[str | None]


@dataclass(frozen=True)
class Probe:
    """One check. `passed` is None if it was not made or tells nothing; `fix` is empty if there is
    nothing to do.
    """

    name: str
    passed: bool | None
    evidence: str
    fix: str = ""


@dataclass
class Report:
    """All checks of one environment, in the order in which they were made."""

    splits: dict[str, int] = field(default_factory=dict[str, int])
    probes: list[Probe] = field(default_factory=list[Probe])
    sandbox: dict[str, str] = field(default_factory=dict[str, str])
    """What protected this machine from its code (EnvironmentHost.sandbox)."""
    seconds: float = 0.0
    constant: Constant | None = None
    """The best answer that is the same for every task."""

    @property
    def passed(self) -> bool:
        """No check failed. A check that was not made is not a failure."""
        return all(probe.passed is not False for probe in self.probes)


@dataclass(frozen=True)
class Task:
    split: str
    index: int

    def __str__(self) -> str:
        return f"{self.split}[{self.index}]"


@dataclass(frozen=True)
class Played:
    """A conversation whose model turns were fixed in advance."""

    prompt: list[ChatMessage]
    replies: list[ChatMessage]
    score: Score


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
    start_other = partial(start, secrets={**OTHER_CLOCK, **(secrets or {})})
    gate = _Gate(start, start_other, timeout_s, deadline_s)
    try:
        await requirements.interpreter(folder, timeout_s=install_timeout_s, on_progress=on_progress)
        await gate.run()
    except EnvironmentFault as fault:
        if fault.code == "not_ready":
            raise
        gate.add(_failure("loads", fault))
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
        self._golds: dict[Task, list[str]] = {}
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
            await self._probe("isolation", self._check_isolation, host)
            await self._probe("determinism", self._check_determinism)
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
            probe = _failure(name, fault)
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
        if not held_out:
            fix = "set eval_dataset (datasets/eval.jsonl): only held-out tasks can show learning"
            raise _SkippedError("there is no eval split", fix)
        overlap = shared_tasks(train, held_out)
        if overlap.shared:
            what = f"{overlap.shared} of {len(held_out)} eval tasks are train tasks too: {overlap}"
            fix = "remove them from one split, or give different tasks different ids"
            raise _FailedError(f"contaminated: {what}", fix)
        sizes = f"{len(train)} train and {len(held_out)} eval tasks"
        return f"{sizes}; ids are unique, no task is in both splits"

    async def _check_prompts(self, host: EnvironmentHost) -> str:
        turns: list[int] = []
        for task in self._tasks:
            opening = await self._timed("start_episode", task, host.open(task.split, task.index))
            self._prompts[task] = opening.messages
            turns.append(opening.max_turns)
            await self._timed("close_episode", task, host.close(opening.episode))
        return f"{len(turns)} tasks opened, at most {max(turns)} turns each"

    async def _check_gold(self, host: EnvironmentHost) -> str:
        for task in self._tasks:
            try:
                gold = await self._timed("sft_completion", task, host.gold(task.split, task.index))
            except EnvironmentFault as fault:
                if fault.code == "environment_timeout":
                    raise
                fix = (
                    "give rows an output, or override sft_completion: algorithm='sft' needs it too"
                )
                raise _SkippedError(f"no gold answer: {fault.shown}", fix) from fault
            answers = [message["content"] for message in gold if message["role"] == "assistant"]
            played = await self._play(host, task, answers)
            if not answers or not played.score.success:
                earned = f"{_show(answers)} earned {_score_text(played.score)}"
                fix = "make the gold answer and the scorer agree; success must be true for it"
                raise _FailedError(f"the gold answer of {task} is no success: {earned}", fix)
            self._golds[task] = answers
            self._played[task] = played
        rewards = _range([played.score.reward for played in self._played.values()])
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
        _, colon, asked = self._prompts[task][-1]["content"].rpartition(":")
        asked = asked.strip(" .\n")
        gold = self._golds.get(task, [""])[-1].strip()
        return asked if colon and asked != gold else ""

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
                    what = f"{_show(answers)} counts as a success, with {_score_text(score)}"
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
                        earned = f"{_show(answers)} earned {_score_text(score)}"
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
            doubts.append(_judge_hits(self._stated(), count, fix, CONSTANT_SHARE))
        _skip_if(doubts)
        if says_all:
            raise says_all
        return f"{len(rewards)} answers, no success, rewards {_range(rewards)}"

    def _stated(self) -> dict[Task, str]:
        """The tasks whose prompt states the gold answer."""
        stated: dict[Task, str] = {}
        for task, turns in self._golds.items():
            prompt = "\n".join(message["content"] for message in self._prompts[task])
            gold = re.escape(turns[-1].strip())
            if found := re.search(rf"{STATED}{gold}(?!\w)", prompt, re.IGNORECASE):
                stated[task] = f"{task}: the prompt says {_show([found[0]])}"
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
            for near in _nearly(gold):
                if (await self._play(host, task, [*turns, near])).score.success:
                    what = f"{_show([near])} counts as a success; gold is {_show([gold])}"
                    changed.setdefault(task, f"{task}: {what}")
            # One of the two orders may be right: the first or the last answer counts.
            both = [f"{gold}\n{other}", f"{other}\n{gold}"]
            scores = [(await self._play(host, task, [*turns, text])).score for text in both]
            if all(score.success for score in scores):
                hedged[task] = f"{task}: {_show(both)}: both count as successes"
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
            before, inner, after = _parts(gold)
            texts = [before + text + after for text in NONSENSE]
            for digit in "09\u00b2":
                texts.append(before + re.sub(r"\d", digit, inner) + after)
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
        self.report.constant = constant
        tasks = len(constant.successes)
        count = f"{sum(constant.successes)} of {tasks} {split} tasks"
        text = f"the best constant {_show([constant.answer])} succeeds on {count}"
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

    async def _check_isolation(self, host: EnvironmentHost) -> str:
        wrong = [(task, [FRESH]) for task in self._tasks]
        plans: list[tuple[Task, Answers]] = []
        alone: list[Played] = []
        for plan in (*wrong, *self._golds.items()):
            # An answer that raises has failed another check already.
            with suppress(EnvironmentFault):
                alone.append(await self._play(host, *plan, repeat=True))
                plans.append(plan)
        together = await self._interleave(host, plans)
        for (task, _), one, other in zip(plans, alone, together, strict=True):
            if one != other:
                raise _FailedError(
                    f"{task} went differently while other episodes ran than alone: "
                    f"{_difference(one, other)}",
                    "set an episode's state as attributes in start_episode (each episode has a "
                    "copy of the object); never change a list or dict that the copies share; "
                    "draw from random or numpy.random, not from a generator that they share",
                )
        return f"{len(together)} episodes at once went as they did one by one"

    async def _interleave(
        self, host: EnvironmentHost, plans: Sequence[tuple[Task, Answers]]
    ) -> list[Played]:
        """Play these conversations turn by turn: all open, all take their first turn, and so on."""
        openings = await asyncio.gather(*(host.open(task.split, task.index) for task, _ in plans))
        replies: list[list[ChatMessage]] = [[] for _ in plans]
        active = list(range(len(plans)))
        turn = 0
        while active := [place for place in active if turn < openings[place].max_turns]:
            calls: list[Awaitable[Step]] = []
            for place in active:
                answers = plans[place][1]
                text = answers[min(turn, len(answers) - 1)]
                calls.append(host.step(openings[place].episode, text))
            steps = await asyncio.gather(*calls)
            for place, step in zip(active, steps, strict=True):
                replies[place] += step.messages
            active = [p for p, step in zip(active, steps, strict=True) if not step.done]
            turn += 1
        scores = await asyncio.gather(*(host.score(opening.episode) for opening in openings))
        return [
            Played(opening.messages, said, score)
            for opening, said, score in zip(openings, replies, scores, strict=True)
        ]

    async def _check_determinism(self) -> str:
        async with await self._start_host() as first, await self._start_other() as second:
            for split in self.report.splits:
                if await first.tasks(split) != await second.tasks(split):
                    what = f"two processes disagree on the {split} tasks or their order"
                    fix = "build the dataset without unseeded randomness, the clock or the network"
                    raise _FailedError(what, fix)
            for task in self._tasks:
                one = await self._replay(first, task)
                other = await self._replay(second, task)
                if one != other:
                    what = f"two processes disagree on {task}: {_difference(one, other)}"
                    fix = (
                        "seed randomness from example.id; read neither the clock nor the time zone"
                    )
                    raise _FailedError(what, fix)
        return f"two fresh processes agree on all task ids and on {len(self._tasks)} conversations"

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
        opening = await self._timed("start_episode", task, host.open(task.split, task.index))
        turns = opening.max_turns if repeat else min(len(answers), opening.max_turns)
        replies: list[ChatMessage] = []
        try:
            for turn in range(turns):
                call = host.step(opening.episode, answers[min(turn, len(answers) - 1)])
                step = await self._timed("step_episode", task, call, answers)
                replies += step.messages
                if step.done:
                    break
            score = await self._timed("score_episode", task, host.score(opening.episode), answers)
        except EnvironmentFault:
            await host.close(opening.episode)
            raise
        return Played(opening.messages, replies, score)

    async def _replay(self, host: EnvironmentHost, task: Task) -> Played:
        """Play the gold conversation of a task, or one with junk if it has none."""
        if task in self._golds:
            return await self._play(host, task, self._golds[task])
        return await self._play(host, task, [JUNK[0]], repeat=True)

    async def _timed(
        self, method: str, task: Task, call: Awaitable[Any], answers: Answers = ()
    ) -> Any:
        begun = time.monotonic()
        try:
            return await call
        except EnvironmentFault as fault:
            given = f" with the answer {_show(answers)}" if answers else ""
            raise EnvironmentFault(
                fault.code,
                f"{task}{given}: {fault.what}",
                fault.traceback,
                is_foreign=fault.is_foreign,
                declared=fault.declared,
            ) from fault
        finally:
            seconds = time.monotonic() - begun
            self._slowest_s[method] = max(self._slowest_s.get(method, 0.0), seconds)


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
    if found := "; ".join(filter(None, doubts)):
        raise _SkippedError(found, "")


def _parts(gold: str) -> tuple[str, str, str]:
    """The gold answer: what stands before, in and behind its last tags."""
    tags = re.fullmatch(r"(.*<(\w+)>)(.*?)(</\2>.*)|(.*\\boxed\{)(.*)(\}.*)", gold, re.DOTALL)
    if tags is None:
        return "", gold, ""
    if tags[2]:
        return tags[1], tags[3], tags[4]
    return tags[5], tags[6], tags[7]


def _nearly(gold: str) -> list[str]:
    """Short gold answers with the last letter or digit changed, one more at either end, and
    without the minus. In a long one a character need not matter.
    """
    before, inner, after = _parts(gold)
    last = re.search(r"\w(?=\W*$)", inner)
    if last is None or len(inner) > SHORT_ANSWER:
        return []
    new = "y" if last[0] == "x" else "x"
    if last[0].isdecimal():
        new = str((int(last[0]) + 1) % 10)
    texts = [inner[: last.start()] + new + inner[last.end() :]]
    if inner[:1].isalnum() and inner[-1:].isalnum():
        texts += [new.replace("0", "1") + inner, inner + new]
    if re.match(r"-\d", inner):
        texts.append(inner[1:])
    return [before + text + after for text in texts]


def _is_low(reward: float, gold: float, *, partial: bool) -> bool:
    """Whether a worthless answer's reward is well below the gold answer's. A partial answer's
    reward only has to be lower.
    """
    if partial or gold <= 0:
        return reward < gold
    return reward <= LOW_SHARE * gold


# -- the fix of a fault ----------------------------------------------------------------------------

FIX_OF_CODE = {
    **FIXES,
    "environment_timeout": "give every wait and every loop in environment code an end",
    "dataset_invalid": "correct the dataset at the place named",
    "requirements_failed": f"correct {requirements.FILE}: name packages and versions that exist "
    "for this Python",
}
LIMITS_FIX = (
    f"stay within the limits, or raise them in {sandbox.FILE} "
    "(network, memory_gib, processes, file_gib)"
)
FIX_OF_TEXT = {
    rf"^{re.escape(sandbox.FILE)}": f"correct {sandbox.FILE}, or delete it: most environments need "
    "none",
    r"^there is no environment\.py": "pass the folder that holds environment.py; env_setup writes "
    "one to start from",
    "its process answered no call": "release the interpreter: make long native code release the "
    "GIL, or run it in a process",
    "the environment's process ended": "raise or return instead of ending the process: look for "
    "exit calls, signals and crashes of native code",
}
"""Fixes by a pattern of the fault's text, for faults that no exception of a method caused."""
METHODS = ("environment.py", *vars(Environment), *vars(EnvironmentSingleTurn))
"""Whose names a fix may repeat. Environment code can claim any name."""


def _failure(name: str, fault: EnvironmentFault) -> Probe:
    evidence = f"[{fault.code}]"
    if not fault.is_foreign:
        evidence += f" {fault.what}"
    evidence += quoted(fault.wrote(800))
    return Probe(name, False, evidence, remedy(fault) or _fix(name, fault))


def _fix(name: str, fault: EnvironmentFault) -> str:
    if fault.code not in ("environment_error", "environment_invalid"):
        return FIX_OF_CODE.get(fault.code, LIMITS_FIX)
    what = fault.what
    if isinstance(fault.__cause__, EnvironmentFault):
        # `_timed` put the answer before it; the words of the answer must not be matched.
        what = fault.__cause__.what
    if raised := re.match(r"(\S+) raised (\w+): ", what):
        return _fix_of_raised(name, raised[1], raised[2], what)
    for pattern, fix in FIX_OF_TEXT.items():
        if re.search(pattern, what):
            return fix
    if fault.code == "environment_invalid":
        return "correct environment.py"
    if what.startswith("the score must be"):
        return "give RewardResult a finite number as score, whatever the model wrote"
    return "return what the evidence asks for on every path: one without a return gives None"


def _fix_of_raised(name: str, method: str, error: str, what: str) -> str:
    called = re.search(r"(\w+)\(\) (?:takes|missing|got)", what)
    if error == "TypeError" and called and not called[1].startswith("_"):
        contract = getattr(EnvironmentSingleTurn, called[1], None)
        if callable(contract):
            parameters = ", ".join(inspect.signature(contract).parameters)
            return f"define it as the contract does: {called[1]}({parameters})"
    if error == "ModuleNotFoundError":
        return f"name its package in {requirements.FILE}, or correct the import"
    is_about_answer = name != "gold" and error not in ("NameError", "ImportError")
    if is_about_answer and method in ("score_episode", "normalize_response_text"):
        return "return a low score instead of raising, whatever the model wrote"
    if is_about_answer and method == "step_episode":
        return "answer with a message or done=True instead of raising, whatever the model wrote"
    return f"correct {method if method in METHODS else 'the code'} at the line named"


# -- small things ----------------------------------------------------------------------------------


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


def _range(rewards: Sequence[float]) -> str:
    return f"from {min(rewards):g} to {max(rewards):g}"


def _show(answers: Answers) -> str:
    return " / ".join(_brief(answer, 80) for answer in answers) or "nothing"


def _brief(value: Any, limit: int) -> str:
    """Its repr. Long texts in it lose their middle, so quotes stay closed."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = limit
    return brief.repr(value)


def _score_text(score: Score) -> str:
    reason = f" ({score.reason:.200})" if score.reason else ""
    return f"reward {score.reward:g}, success {str(score.success).lower()}{reason}"


def _difference(one: Played, other: Played) -> str:
    """The first thing in which two different conversations differ."""
    for what, ours, theirs in (
        ("prompt", one.prompt, other.prompt),
        ("reply", one.replies, other.replies),
        ("score", [one.score], [other.score]),
    ):
        for left, right in zip_longest(ours, theirs):
            if left != right:
                return f"{what} {_brief(left, 200)} and {_brief(right, 200)}"
    return "nothing"
