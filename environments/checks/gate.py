"""The gate: what an environment has to withstand before a model is trained on it.

    report = await check(folder)
    report.passed, [(probe.name, probe.passed, probe.evidence, probe.fix) for probe in report.probes]

Everything runs in child processes through EnvironmentHost. Faults of the environment end up in the
report, none is raised. Nothing here proves a scorer right; it finds those that are wrong in ways
seen before."""

from __future__ import annotations

import asyncio
import inspect
import re
import reprlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from environments.base import ChatMessage, EnvironmentSingleTurn
from environments.checks.splits import shared_tasks
from environments.process import requirements, sandbox
from environments.process.faults import remedy
from environments.process.host import EnvironmentFault, EnvironmentHost, Score

ROWS = {"train": 5, "eval": 3}
"""Tasks tried of each split, spread over it."""
LOW_SHARE = 0.5
"""A worthless answer may score at most this share of what the gold answer scores."""
JUNK = (
    "asdf qwer zxcv",
    "I cannot help with that.",
    "<answer></answer> {} [] <<>> \\boxed{}",
    "\u2603 \u00ff \u202e \U0001f9ea \x00 \ud800",
    "bla " * 5000,
)
PAID = "set success in RewardResult to whether the answer is right; left out, any score > 0 is one"
SUCCESSES = {
    "truncated": "right where the first half of a gold answer says all; else have the scorer ask for a whole answer",
    "prompt_echo": "the prompt holds what the scorer takes for an answer: have it look in one place, a tag or the last "
    "line, and set success in RewardResult",
}
"""What to do where a worthless answer counts as a success; of all others PAID."""
OUT_OF_TIME = "not finished: the time for all checks was used up"

Answers = Sequence[str | None]


@dataclass(frozen=True)
class Probe:
    """One check. `passed` is None where it was not made or says nothing; `fix` is empty where
    nothing is to be done.
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
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing failed. A check that could not be made is no failure, unless loading was it."""
        return all(probe.passed is not False for probe in self.probes)


@dataclass(frozen=True)
class Task:
    split: str
    index: int

    def __str__(self) -> str:
        return f"{self.split}[{self.index}]"


@dataclass(frozen=True)
class Played:
    """A conversation in which the model's turns were given beforehand."""

    prompt: list[ChatMessage]
    replies: list[ChatMessage]
    score: Score


async def check(
    folder: Path,
    *,
    args: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
    deadline_s: float = 38.0,
    install_timeout_s: float | None = None,
    on_progress: requirements.Listener | None = None,
) -> Report:
    """Check the environment in `folder`. One call into it may take `timeout_s`, all of it about
    `deadline_s`.

    Raises EnvironmentFault(not_ready) where its packages are not installed after
    `install_timeout_s`."""
    gate = _Gate(folder, args or {}, secrets or {}, timeout_s, deadline_s)
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
    def __init__(self, evidence: str, fix: str) -> None:
        super().__init__(evidence)
        self.evidence, self.fix = evidence, fix


class _SkippedError(_FailedError):
    """The check cannot be made on this environment."""


class _Gate:
    def __init__(
        self,
        folder: Path,
        args: Mapping[str, Any],
        secrets: Mapping[str, str],
        timeout_s: float,
        deadline_s: float,
    ) -> None:
        self.report = Report()
        self._folder, self._args, self._secrets, self._timeout_s = folder, args, secrets, timeout_s
        self._started, self._deadline_s = time.monotonic(), deadline_s
        self._slowest_s: dict[str, float] = {}
        self._tasks: list[Task] = []
        self._prompts: dict[Task, list[ChatMessage]] = {}
        self._golds: dict[Task, list[str]] = {}
        self._played: dict[Task, Played] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def add(self, probe: Probe) -> None:
        self.report.probes.append(probe)

    async def run(self) -> None:
        async with await self._start() as host:
            sizes = ", ".join(f"{size} {split} tasks" for split, size in host.splits.items())
            self.add(Probe("loads", True, f"in {self.elapsed_s:.2f} s: {sizes}"))
            self.report.splits = dict(host.splits)
            self._tasks = [
                Task(split, index)
                for split, size in host.splits.items()
                for index in _spread(size, ROWS[split])
            ]
            await self._probe("tasks", lambda: self._check_tasks(host))
            if not await self._probe("prompts", lambda: self._check_prompts(host)):
                return
            await self._probe("gold", lambda: self._check_gold(host))
            for name, answers in self._worthless().items():
                await self._probe(
                    name,
                    lambda name=name, answers=answers: self._check_worthless(host, name, answers),
                )
            await self._probe("isolation", lambda: self._check_isolation(host))
            await self._probe("determinism", self._check_determinism)
            self._add_times()

    async def _start(self) -> EnvironmentHost:
        return await EnvironmentHost.start(
            self._folder,
            args=self._args,
            secrets=self._secrets,
            timeout_s=self._timeout_s,
            start_timeout_s=max(1.0, self._deadline_s / 2),
        )

    async def _probe(self, name: str, body: Callable[[], Awaitable[str]]) -> bool:
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - self.elapsed_s)):
                self.add(Probe(name, True, await body()))
        except _SkippedError as skipped:
            self.add(Probe(name, None, skipped.evidence, skipped.fix))
        except _FailedError as failed:
            self.add(Probe(name, False, failed.evidence, failed.fix))
        except EnvironmentFault as fault:
            self.add(_failure(name, fault))
        except TimeoutError:
            self.add(Probe(name, None, OUT_OF_TIME, "make its calls quicker and test again"))
        return self.report.probes[-1].passed is True

    # -- probes: each returns its evidence, or raises ----------------------------------------------

    async def _check_tasks(self, host: EnvironmentHost) -> str:
        train, held_out = await host.tasks("train"), await host.tasks("eval")
        for split, tasks in (("train", train), ("eval", held_out)):
            ids = [task_id for task_id, _ in tasks]
            if repeated := _repeated(ids):
                raise _FailedError(
                    f"{len(ids) - len(set(ids))} of {len(ids)} {split} tasks repeat an id, for instance {repeated!r}",
                    "give every row an id of its own, or none: load_dataset derives one from the row",
                )
        if not held_out:
            raise _SkippedError(
                "there is no eval split",
                "set eval_dataset, as a rule from datasets/eval.jsonl: only tasks held back can show learning",
            )
        overlap = shared_tasks(train, held_out)
        if overlap.shared:
            raise _FailedError(
                f"contaminated: {overlap.shared} of {len(held_out)} eval tasks are train tasks too: {overlap}",
                "take them out of one of the splits, or give different tasks different ids: an evaluation on trained "
                "tasks measures memory",
            )
        return f"{len(train)} train and {len(held_out)} eval tasks; ids are unique, no task is in both splits"

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
                raise _SkippedError(
                    f"no gold answer: {fault.what}",
                    "give rows an output, or override sft_completion: then this gate and algorithm='sft' can use it",
                ) from fault
            answers = [message["content"] for message in gold if message["role"] == "assistant"]
            played = await self._play(host, task, answers)
            if not answers or not played.score.success:
                raise _FailedError(
                    f"the gold answer of {task} is no success: {_show(answers)} earned {_told(played.score)}",
                    "make the gold answer and the scorer agree; success must be true for it",
                )
            self._golds[task], self._played[task] = answers, played
        rewards = [played.score.reward for played in self._played.values()]
        return f"{len(rewards)} gold answers are successes, with rewards from {min(rewards):g} to {max(rewards):g}"

    def _worthless(self) -> dict[str, Callable[[Task], list[Answers]]]:
        """Answers that must not pay, by the name of their probe."""
        return {
            "junk": lambda task: [[text] for text in JUNK],
            "empty": lambda task: [[""], [" \n"]],
            "none": lambda task: [[None]],
            "truncated": lambda task: [
                [*gold[:-1], gold[-1][:size]]
                for gold in self._gold_of(task)
                for size in sorted({len(gold[-1]) // 2, min(1, len(gold[-1]) // 2)})
            ],
            "prompt_echo": lambda task: [
                [self._prompts[task][-1]["content"]],
                ["\n".join(message["content"] for message in self._prompts[task])],
            ],
        }

    async def _check_worthless(
        self, host: EnvironmentHost, name: str, answers_of: Callable[[Task], list[Answers]]
    ) -> str:
        rewards: list[float] = []
        in_half = None
        for task in self._tasks:
            for answers in answers_of(task):
                score = (await self._play(host, task, answers, repeat=True)).score
                gold = self._played[task].score.reward if task in self._played else None
                rewards.append(score.reward)
                if score.success:
                    what = f"{task}: {_show(answers)} counts as a success, with {_told(score)}"
                    said = what, SUCCESSES.get(name, PAID)
                    if name != "truncated" or _is_in_a_word(
                        answers[-1] or "", self._golds[task][-1]
                    ):
                        raise _FailedError(*said)
                    in_half = in_half or said  # half of a long answer may hold what counts
                    continue
                if gold is not None and not _is_low(
                    score.reward, gold, partial=name == "truncated"
                ):
                    raise _FailedError(
                        f"{task}: {_show(answers)} earned {_told(score)}, the gold answer {gold:g}",
                        "pay less for what a model can write without solving the task",
                    )
        if in_half:
            raise _SkippedError(*in_half)
        if not rewards:
            raise _SkippedError("there is no gold answer to cut short", "")
        return (
            f"{len(rewards)} answers, no success, rewards from {min(rewards):g} to {max(rewards):g}"
        )

    async def _check_isolation(self, host: EnvironmentHost) -> str:
        alone = self._played or {
            task: await self._play(host, task, [JUNK[0]], repeat=True) for task in self._tasks
        }
        together = await asyncio.gather(*(self._replay(host, task) for task in alone))
        different = [
            task for task, played in zip(alone, together, strict=True) if played != alone[task]
        ]
        if different:
            raise _FailedError(
                f"{different[0]} went otherwise beside other episodes than alone: "
                f"{_difference(alone[different[0]], together[list(alone).index(different[0])])}",
                "keep an episode's state in attributes set in start_episode (each episode has a copy of the object); "
                "never change a list or dict that the copies share",
            )
        return f"{len(together)} episodes at once went as they did one by one"

    async def _check_determinism(self) -> str:
        async with await self._start() as first, await self._start() as second:
            for split in self.report.splits:
                if await first.tasks(split) != await second.tasks(split):
                    raise _FailedError(
                        f"two processes disagree on the {split} tasks or their order",
                        "build the dataset without unseeded randomness, the clock or the network",
                    )
            for task in self._tasks:
                one, other = await self._replay(first, task), await self._replay(second, task)
                if one != other:
                    raise _FailedError(
                        f"two processes disagree on {task}: {_difference(one, other)}",
                        "seed randomness from the task (random.Random(example.id)), never from the clock or hash()",
                    )
        return f"two fresh processes agree on all task ids and on {len(self._tasks)} conversations"

    def _add_times(self) -> None:
        slowest = ", ".join(
            f"{method} {seconds * 1000:.1f} ms" for method, seconds in self._slowest_s.items()
        )
        slow = [method for method, seconds in self._slowest_s.items() if seconds > self._timeout_s]
        self.add(
            Probe(
                "time",
                not slow,
                f"slowest calls: {slowest}",
                f"{', '.join(slow)} must answer within {self._timeout_s:g} s" if slow else "",
            )
        )

    # -- playing -----------------------------------------------------------------------------------

    async def _play(
        self, host: EnvironmentHost, task: Task, answers: Answers, *, repeat: bool = False
    ) -> Played:
        """Play a conversation with these turns; `repeat` says the last one again until the
        environment has enough.
        """
        opening = await self._timed("start_episode", task, host.open(task.split, task.index))
        replies: list[ChatMessage] = []
        try:
            for turn in range(
                opening.max_turns if repeat else min(len(answers), opening.max_turns)
            ):
                answer = answers[min(turn, len(answers) - 1)]
                step = await self._timed(
                    "step_episode", task, host.step(opening.episode, answer), answers
                )
                replies += step.messages
                if step.done:
                    break
            score = await self._timed("score_episode", task, host.score(opening.episode), answers)
        except EnvironmentFault:
            await host.close(opening.episode)
            raise
        return Played(opening.messages, replies, score)

    async def _replay(self, host: EnvironmentHost, task: Task) -> Played:
        """The gold conversation of a task; one with junk where it has none."""
        return await self._play(
            host, task, self._golds.get(task, [JUNK[0]]), repeat=task not in self._golds
        )

    def _gold_of(self, task: Task) -> list[list[str]]:
        return [self._golds[task]] if task in self._golds else []

    async def _timed(
        self, method: str, task: Task, call: Awaitable[Any], answers: Answers = ()
    ) -> Any:
        begun = time.monotonic()
        try:
            return await call
        except EnvironmentFault as fault:
            given = f" with the answer {_show(answers)}" if answers else ""
            raise EnvironmentFault(
                fault.code, f"{task}{given}: {fault.what}", fault.traceback
            ) from fault
        finally:
            self._slowest_s[method] = max(
                self._slowest_s.get(method, 0.0), time.monotonic() - begun
            )


def _is_in_a_word(beginning: str, whole: str) -> bool:
    """Whether it ends within the first word of the whole."""
    return beginning.isalnum() and whole[len(beginning) : len(beginning) + 1].isalnum()


def _is_low(reward: float, gold: float, *, partial: bool) -> bool:
    """Whether a worthless answer's reward is well below the gold one's; a partial answer's need
    only be lower.
    """
    return reward < gold if partial or gold <= 0 else reward <= LOW_SHARE * gold


def _failure(name: str, fault: EnvironmentFault) -> Probe:
    trace = f"\n{fault.traceback.strip()[-800:]}" if fault.traceback.strip() else ""
    return Probe(
        name, False, f"[{fault.code}] {fault.what}{trace}", remedy(fault) or _fix(name, fault)
    )


def _fix(name: str, fault: EnvironmentFault) -> str:
    fixes = {
        "environment_timeout": "give every wait and every loop in environment code an end",
        "dataset_invalid": "mend the dataset at the place named",
        "requirements_failed": f"mend {requirements.FILE}: name packages and versions that exist for this Python",
    }
    if fault.code not in ("environment_error", "environment_invalid"):
        wall = f"stay within the limits, or raise them in {sandbox.FILE} (network, memory_gib, processes, file_gib)"
        return fixes.get(fault.code, wall)
    # Without the answer that `_timed` puts before it, whose words would be taken for the fault's.
    what = fault.__cause__.what if isinstance(fault.__cause__, EnvironmentFault) else fault.what
    if raised := re.match(r"(\S+) raised (\w+): ", what):
        return _fix_of_raised(name, raised[1], raised[2], what)
    if what.startswith(sandbox.FILE):
        return f"mend {sandbox.FILE}, or leave it out: most environments need none"
    if what.startswith("there is no environment.py"):
        return "pass the folder that holds environment.py; env_setup writes one to start from"
    if "its process answered no call" in what:
        return "release the interpreter: have native code that runs long give the GIL up, or call it in a process"
    if "the environment's process ended" in what:
        return "raise or return instead of ending the process: look for exit calls, signals and crashes of native code"
    if fault.code == "environment_invalid":
        return "mend environment.py"
    if what.startswith("the score must be"):
        return "give RewardResult a finite number as score, whatever the model wrote"
    return "return what the evidence asks for on every path: one without a return gives None"


def _fix_of_raised(name: str, method: str, error: str, what: str) -> str:
    called = re.search(r"(\w+)\(\) (?:takes|missing|got)", what)
    contract = (
        getattr(EnvironmentSingleTurn, called[1], None)
        if called and not called[1].startswith("_")
        else None
    )
    if error == "TypeError" and called and callable(contract):
        return f"define it as the contract has it: {called[1]}({', '.join(inspect.signature(contract).parameters)})"
    if error == "ModuleNotFoundError":
        return f"name its package in {requirements.FILE}, or mend the import"
    is_about_answer = name != "gold" and error not in ("NameError", "ImportError")
    if is_about_answer and method in ("score_episode", "normalize_response_text"):
        return "return a low score instead of raising, whatever the model wrote"
    if is_about_answer and method == "step_episode":
        return "answer with a message or done=True instead of raising, whatever the model wrote"
    return f"mend {method} at the line named"


def _spread(size: int, count: int) -> list[int]:
    """Up to `count` indices over the whole of range(size), first and last included."""
    if size <= count:
        return list(range(size))
    return [round(place * (size - 1) / (count - 1)) for place in range(count)]


def _repeated(ids: Iterable[str]) -> str | None:
    seen: set[str] = set()
    return next((each for each in ids if each in seen or seen.add(each)), None)


def _show(answers: Answers) -> str:
    return " / ".join(_brief(answer, 80) for answer in answers) or "nothing"


def _brief(value: Any, limit: int) -> str:
    """Its repr, whose texts are cut to `limit` in their middle: quotes stay closed."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = limit
    return brief.repr(value)


def _told(score: Score) -> str:
    return f"reward {score.reward:g}, success {str(score.success).lower()}" + (
        f" ({score.reason:.200})" if score.reason else ""
    )


def _difference(one: Played, other: Played) -> str:
    for what, left, right in (
        *(("prompt", *pair) for pair in zip_longest(one.prompt, other.prompt)),
        *(("reply", *pair) for pair in zip_longest(one.replies, other.replies)),
        ("score", one.score, other.score),
    ):
        if left != right:
            return f"{what} {_brief(left, 200)} and {_brief(right, 200)}"
    return "nothing"
