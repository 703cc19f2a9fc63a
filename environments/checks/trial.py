"""What the probes of the gate share: the environment's processes, the tasks that are tried, what
was seen of them, and how conversations are played."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from environments.checks.answers import JUNK, cut, parts
from environments.checks.playing import (
    Answers,
    Played,
    Task,
    call_values,
    play,
    prompt_text,
    together,
)
from environments.checks.report import Report, shown
from environments.process.host import EnvironmentFault, EnvironmentHost, Opening

SLOW_S = 0.25
"""Once a call takes longer, conversations are played at once: else there is no time for all."""
AT_ONCE = 16

T = TypeVar("T")
Plan = tuple[Task, Answers]


class ProbeFailed(Exception):
    """The environment is at fault. The arguments are the evidence and the fix."""


class ProbeSkipped(Exception):
    """The probe cannot be made, or tells nothing. The arguments are the evidence and the fix."""


@dataclass
class Trial:
    host: EnvironmentHost
    start_other: Callable[[], Awaitable[EnvironmentHost]]
    report: Report
    ends: float  # when all checks end, by time.monotonic()
    max_tokens: int | None = None  # how many tokens a model may write in one turn, if that is known
    tasks: list[Task] = field(default_factory=list[Task])
    openings: dict[Task, Opening] = field(default_factory=dict[Task, Opening])
    golds: dict[Task, tuple[str, ...]] = field(default_factory=dict[Task, tuple[str, ...]])
    played: dict[Task, Played] = field(default_factory=dict[Task, Played])
    """The conversations with gold answers."""
    junk_rewards: dict[Answers, list[float]] = field(default_factory=dict[Answers, list[float]])
    junk_successes: float = 0.0  # share of the tasks on which the luckiest junk text succeeds
    is_substring_scorer: bool = False  # whether gold answers win beside anything else
    open_ended: set[Task] = field(default_factory=set[Task])
    """The tasks that a gold answer wins whatever its last turn says."""
    seen: dict[Task, tuple[str, tuple[str, ...]]] = field(
        default_factory=dict[Task, tuple[str, tuple[str, ...]]]
    )
    """Prompt and gold turns of all tasks whose gold answer was played."""
    replayed: list[tuple[Plan, Played]] = field(default_factory=list[tuple[Plan, Played]])
    slowest_s: dict[str, float] = field(default_factory=dict[str, float])
    """The longest call of each method, in seconds."""

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    @property
    def all_tasks(self) -> list[Task]:
        sizes = self.report.splits.items()
        return [Task(split, index) for split, size in sizes for index in range(size)]

    def other_tasks(self, count: int) -> list[Task]:
        """Up to `count` tasks by chance that are not among those tried."""
        others = [task for task in self.all_tasks if task not in self.openings]
        return random.Random(0).sample(others, min(count, len(others)))

    @property
    def at_once(self) -> int:
        return AT_ONCE if max(self.slowest_s.values(), default=0.0) > SLOW_S else 1

    @property
    def junk(self) -> list[str]:
        """Worthless answers that a model of `max_tokens` could write."""
        return [cut(text, self.max_tokens) for text in JUNK]

    def keep_gold(self, task: Task, turns: tuple[str, ...], played: Played) -> None:
        self.golds[task] = turns
        self.played[task] = played
        self.see(task, turns, played)

    def see(self, task: Task, turns: tuple[str, ...], played: Played) -> None:
        self.seen[task] = prompt_text(played.prompt), turns

    def last_gold(self, task: Task) -> str:
        """The last turn of the gold answer; "" if there is none."""
        return self.golds[task][-1] if task in self.golds else ""

    def told(self, turns: tuple[str, ...]) -> str:
        """What a gold answer says: in its last turn or, if that does not count, in its calls."""
        said = call_values(turns) if self.open_ended else []
        return " ".join(said) or parts(turns[-1])[1].strip()

    def other_gold(self, task: Task) -> str:
        """The last turn of another task's gold answer, if it differs; else ""."""
        if task not in self.golds:
            return ""
        last = self.last_gold(task).strip()
        others = (turns[-1] for turns in reversed(self.golds.values()))
        return next((text for text in others if text.strip() != last), "")

    def prompt(self, task: Task) -> str:
        return prompt_text(self.openings[task].messages)

    def question(self, task: Task) -> str:
        """What the prompt asks about, such as the words to sort; "" if that is the gold answer."""
        _, colon, question = self.openings[task].messages[-1]["content"].rpartition(":")
        question = question.strip(" .\n")
        return question if colon and question != self.last_gold(task).strip() else ""

    # -- playing -----------------------------------------------------------------------------------

    async def open(self, task: Task) -> None:
        """Open and close the task, and keep its opening."""
        opening = await self.timed(
            task, (), "start_episode", self.host.open(task.split, task.index)
        )
        self.openings[task] = opening
        await self.timed(task, (), "close_episode", self.host.close(opening.episode))

    async def gather(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """The results of these calls, one by one, or many at once if the environment is slow."""
        results: list[T] = []
        while len(results) < len(calls):
            batch = calls[len(results) :][: self.at_once]
            results += await together(call() for call in batch)
        return results

    async def play(
        self,
        task: Task,
        answers: Answers,
        *,
        repeat: bool = False,
        draw: int = 0,
        host: EnvironmentHost | None = None,
    ) -> Played:
        """Play a conversation with these model turns; see `playing.play`."""
        watch = partial(self.timed, task, answers)
        return await play(host or self.host, task, answers, repeat=repeat, draw=draw, watch=watch)

    async def play_all(self, plans: Sequence[Plan], *, repeat: bool = False) -> list[Played]:
        """The same with several conversations, in their order."""
        return await self.gather([partial(self.play, *plan, repeat=repeat) for plan in plans])

    async def replay(self, plan: Plan, host: EnvironmentHost, draw: int = 0) -> Played:
        """Play a conversation; answers of one turn that are no gold are repeated to its end."""
        task, answers = plan
        is_repeated = len(answers) == 1 and answers != self.golds.get(task)
        return await self.play(task, answers, repeat=is_repeated, host=host, draw=draw)

    async def timed(self, task: Task, answers: Answers, method: str, call: Awaitable[Any]) -> Any:
        """Await a call into the environment. Its fault names the task and the answers."""
        begun = time.monotonic()
        try:
            return await call
        except EnvironmentFault as fault:
            suffix = ""
            if answers and method != "start_episode":
                suffix = f" with the answer {shown(answers)}"
            raise fault.reworded(f"{task}{suffix}: {fault.what}") from fault
        finally:
            seconds = time.monotonic() - begun
            self.slowest_s[method] = max(self.slowest_s.get(method, 0.0), seconds)


def fail_if_many(hits: Mapping[Task, str], tasks: int, fix: str, share: float) -> str:
    """Fail if answers win on more than this share of the tasks; else the doubt that remains. What
    the environment wrote stays behind the first line of a hit.
    """
    if not hits:
        return ""
    first, line, wrote = next(iter(hits.values())).partition("\n")
    if len(hits) > share * tasks:
        raise ProbeFailed(f"{first} (so on {len(hits)} of {tasks} tasks){line}{wrote}", fix)
    return f"{first} (on {len(hits)} of {tasks} tasks: maybe by chance){line}{wrote}"


def skip_if(*doubts: str) -> None:
    if result := "; ".join(filter(None, doubts)):
        raise ProbeSkipped(result, "")
