"""Rollouts: our scheduler, flash's and a turn barrier, one after the other on one engine.

    ours      worker.rollouts.scheduler.collect
    flash     rollout_async of freesolo-flash-dev: no barrier, one thread for the environment
    barrier   TRL's tool loop: at each turn all rollouts wait for the slowest, and environment calls
              run one by one

All three get the same prompts, seeds, token budgets and environment, whose every call takes
`latency_s`. No turn ends early, so that all of them generate the same number of tokens whatever
they sample."""

from __future__ import annotations

import asyncio
import functools
import importlib
import random
import statistics
import sys
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from environments.process.host import NO_USAGE, Ended, Opening, Score, Step, Usage
from flash_mcp.protocol.errors import FlashError
from worker.engine.vllm import VllmEngine
from worker.event_loop import AsyncRunner
from worker.model_files import ModelFiles
from worker.rollouts.scheduler import Generator, RolloutTask, TalkLimits, collect
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion, Sampling

Json = dict[str, Any]
PEERS = Path(sys.prefix) / "peers"
"""Where scripts/bench puts packages that only the bench needs."""
TOKENS = 24
"""Tokens of every turn."""
GROUP = 8
ENV_SLOTS = 32
"""Environment calls at once: the recipe's env_concurrency."""
MAX_LENGTH = 1536
SYSTEM = (
    "You work through questions step by step. Write down what is known, name what is missing, and "
    "go on from there. When you are told to go on, take up your last thought instead of starting "
    "again. Keep every line short, do not repeat the question, and do not apologise. Nobody minds "
    "a wrong turn that is noticed; a right answer without its way is worth nothing here."
)
REPLY = [{"role": "user", "content": "Go on: what follows from that?"}]


@dataclass(frozen=True)
class Workload:
    """Rollouts by their number of turns, all of which call the environment."""

    label: str
    turns: tuple[int, ...]
    latency_s: float

    @property
    def tokens(self) -> int:
        return TOKENS * sum(self.turns)


def workloads(*, quick: bool) -> list[Workload]:
    spread, count = ((1, 2, 4), 8) if quick else ((1, 2, 4, 6), 64)
    mixed = tuple(random.Random(0).choices(spread, k=count))
    latencies = (0.0, 0.02) if quick else (0.0, 0.02, 0.2, 1.0)
    label = f"of {', '.join(map(str, spread))}"
    return [
        *(Workload(label, mixed, latency_s) for latency_s in latencies),
        Workload("3 each", (3,) * count, latencies[len(latencies) // 2]),
    ]


def messages(rollout: int) -> list[Json]:
    """The start of a conversation; the rollouts of a group share it."""
    group = rollout // GROUP
    question = f"A train leaves at {group + 5} o'clock and needs {group + 90} minutes. And then?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


class MeteredEngine(VllmEngine):
    """Counts iterations and tokens. Turns run to their full length; their seed follows from what
    they go on from.
    """

    def __init__(self, model_path: Path, sequences: int) -> None:
        super().__init__(ModelFiles(model_path), max_length=MAX_LENGTH, max_num_seqs=sequences)
        engine: Any = self._engine
        add_request = engine.add_request

        def add_without_end(request_id: str, prompt: Any, params: Any, **others: Any) -> Any:
            params.ignore_eos = True
            return add_request(request_id, prompt, params, **others)

        engine.add_request = add_without_end
        self.clear()

    def clear(self) -> None:
        """Begin anew, with an empty prefix cache."""
        self._engine.reset_prefix_cache()
        self.iterations = self.tokens = 0
        self._seen: Counter[int] = Counter()

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        start = zlib.crc32(array("q", prompt_ids).tobytes())
        seed = (
            start + self._seen[start]
        ) & 0x7FFFFFFF  # the rollouts of a group start alike and shall differ
        self._seen[start] += 1
        super().submit(request_id, prompt_ids, replace(sampling, seed=seed))

    def step(self) -> list[tuple[str, Completion]]:
        finished = super().step()
        self.iterations += 1
        self.tokens += sum(len(completion.token_ids) for _, completion in finished)
        return finished

    def generate(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Completion]:
        """Completions of all prompts at once, in their order."""
        for number, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
            self.submit(str(number), prompt, Sampling(count))
        done: dict[str, Completion] = {}
        while len(done) < len(prompts):
            done.update(self.step())
        return [done[str(number)] for number in range(len(prompts))]


# -- ours ------------------------------------------------------------------------------------------


class Host:
    """The environment behind the worker's Host protocol, in process."""

    scores_groups = False

    def __init__(self, work: Workload) -> None:
        self._latency_s, self._left = work.latency_s, list(work.turns)
        self._slots = asyncio.Semaphore(ENV_SLOTS)

    async def open(self, split: str, index: int) -> Opening:
        return Opening(index, f"{split}/{index}", messages(index), max_turns=100)

    async def step(
        self,
        episode: int,
        assistant_text: str | None,
        tool_calls: Sequence[Json] = (),
        usage: Usage = NO_USAGE,
    ) -> Step:
        async with self._slots:
            await asyncio.sleep(self._latency_s)
        self._left[episode] -= 1
        done = self._left[episode] == 0
        return Step(done, [] if done else REPLY)

    async def score(self, episode: int, *, latency_ms: int, total_tokens: int) -> Score:
        return Score(0.0, False, {}, None, None)

    async def score_group(self, ended: Sequence[Ended]) -> list[Score]:
        raise NotImplementedError

    async def close(self, episode: int) -> None:
        pass


def ours(engine: MeteredEngine, template: ChatTemplate, work: Workload) -> None:
    tasks = [
        RolloutTask("train", index, index // GROUP, index, seed=index)
        for index in range(len(work.turns))
    ]
    with AsyncRunner() as runner:
        generator = Generator(engine, run_step=lambda: runner.call_waiting(engine.step))
        runner.run(collect(tasks, Host(work), generator, template, TalkLimits(TOKENS, MAX_LENGTH)))
        runner.run(generator.aclose())


# -- flash -----------------------------------------------------------------------------------------


class FlashEnvironment:
    """The environment as flash's scheduler calls it: `env_reply` after every turn, from its one
    thread.
    """

    def __init__(self, work: Workload) -> None:
        self._work = work

    def new_rollout_state(self, example: Json) -> Json:
        return {"prompt": messages(example["index"]), "left": self._work.turns[example["index"]]}

    def record_model_turn(self, state: Json, content: str) -> None:
        pass

    def env_reply(self, messages: list[Json], state: Json) -> list[Json]:
        time.sleep(self._work.latency_s)
        state["left"] -= 1
        return REPLY if state["left"] else []

    def rollout_done(self, state: Json, max_turns: int) -> bool:
        return not state["left"]

    def reward(self, completion: str, example: Json, state: Json) -> float:
        return 0.0


def flash(engine: MeteredEngine, template: ChatTemplate, work: Workload) -> None:
    under_way: set[str] = set()

    def submit(request_id: str, prefix_ids: list[int], max_tokens: int, initial: bool) -> None:
        under_way.add(request_id)
        engine.submit(request_id, prefix_ids, Sampling(max_tokens))

    def poll() -> list[tuple[str, list[int], list[float], str]]:
        finished = engine.step()
        under_way.difference_update(request_id for request_id, _ in finished)
        return [
            (name, turn.token_ids, turn.logprobs, template.text(turn.token_ids))
            for name, turn in finished
        ]

    @functools.cache
    def start_ids(question: str) -> list[int]:  # its own worker keeps what it rendered, too
        return template.prompt_ids(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        )

    _flash_scheduler()(
        examples=[{"index": index} for index in range(len(work.turns))],
        active_env=FlashEnvironment(work),
        render=lambda conversation, _: start_ids(conversation[-1]["content"]),
        submit=submit,
        poll=poll,
        busy=lambda: bool(under_way),
        env_glue=lambda replies: template.glue_ids(replies, ended=False),
        max_turns=100,
        per_turn_max_tokens=TOKENS,
        engine_max_len=MAX_LENGTH,
    )


@functools.cache
def _flash_scheduler() -> Callable[..., Any]:
    """FlashError(engine_missing) where scripts/bench has not installed it."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    try:
        return importlib.import_module("flash.engine.multiturn_rollout").rollout_async
    except ModuleNotFoundError as error:
        raise FlashError(
            "engine_missing", f"the peer is not installed: {error}", fix="run scripts/bench"
        ) from error


# -- a turn barrier --------------------------------------------------------------------------------


def barrier(engine: MeteredEngine, template: ChatTemplate, work: Workload) -> None:
    transcripts = [Transcript(template, messages(index)) for index in range(len(work.turns))]
    for turn in range(1, max(work.turns) + 1):
        going = [
            transcript
            for transcript, turns in zip(transcripts, work.turns, strict=True)
            if turns >= turn
        ]
        turns_left = [turns - turn for turns in work.turns if turns >= turn]
        completions = engine.generate(
            [transcript.ids for transcript in going], [TOKENS] * len(going)
        )
        for transcript, completion, left in zip(going, completions, turns_left, strict=True):
            transcript.add_answer(completion)
            time.sleep(work.latency_s)
            if left:
                transcript.add_environment(REPLY)


SYSTEMS = {"ours": ours, "flash": flash, "barrier": barrier}


# -- measuring -------------------------------------------------------------------------------------


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """{"cells": [one for every workload], ...}: seconds of every repeat, and medians of what
    follows from them.
    """
    _flash_scheduler()  # before minutes are spent
    template = ChatTemplate(AutoTokenizer.from_pretrained(model_path))
    works = workloads(quick=quick)
    engine = MeteredEngine(model_path, len(works[0].turns))
    ours(
        engine, template, replace(works[0], latency_s=0.0)
    )  # the first iterations of an engine are slow
    cells: list[Json] = [
        {"turns": work.label, "latency_s": work.latency_s, "systems": {}} for work in works
    ]
    bounds: dict[tuple[int, ...], list[Json]] = {}
    for number in range(repeat):
        for turns in {work.turns: None for work in works}:
            bounds.setdefault(turns, []).append(_engine_bound(engine, template, turns))
        for work, cell in zip(works, cells, strict=True):
            for name in rotated(list(SYSTEMS), number):
                cell["systems"].setdefault(name, []).append(
                    _measure(engine, template, work, SYSTEMS[name])
                )
    for work, cell in zip(works, cells, strict=True):
        _sum_up(cell, work, bounds[work.turns])
    peer = importlib.import_module("flash").__version__
    return {
        "flash": peer,
        "rollouts": len(works[0].turns),
        "tokens_a_turn": TOKENS,
        "env_slots": ENV_SLOTS,
        "cells": cells,
    }


def rotated(names: list[str], by: int) -> list[str]:
    """Everybody goes first in turn: a machine that slows down shall not decide."""
    by %= len(names)
    return names[by:] + names[:by]


def _measure(
    engine: MeteredEngine, template: ChatTemplate, work: Workload, system: Callable[..., None]
) -> Json:
    engine.clear()
    started = time.perf_counter()
    system(engine, template, work)
    return {
        "seconds": time.perf_counter() - started,
        "iterations": engine.iterations,
        "tokens": engine.tokens,
    }


def _engine_bound(engine: MeteredEngine, template: ChatTemplate, turns: tuple[int, ...]) -> Json:
    """Seconds that the engine needs at least.

    `decode_s`: every rollout as a single turn of all its tokens, all at once. `prefill_s`: what
    environments add, in one go. `alone_s`: the longest rollout as a single turn with the engine to
    itself."""
    starts = [template.prompt_ids(messages(index)) for index in range(len(turns))]
    glue = template.glue_ids(REPLY, ended=False)
    # A first token of its own keeps each of them out of the prefix cache.
    added = [[index, *glue * (count - 1)] for index, count in enumerate(turns) if count > 1]
    longest = max(turns)

    def timed(prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> float:
        engine.clear()
        started = time.perf_counter()
        engine.generate(prompts, tokens)
        return time.perf_counter() - started

    return {
        "decode_s": timed(starts, [TOKENS * count for count in turns]),
        "prefill_s": timed(added, [1] * len(added)),
        "alone_s": timed(starts[:1], [TOKENS * longest]),
    }


def _sum_up(cell: Json, work: Workload, bounds: list[Json]) -> None:
    """Medians over the repeats; ratios are taken within a repeat."""
    mine = [once["seconds"] for once in cell["systems"]["ours"]]
    for name, runs in list(cell["systems"].items()):
        iterations = statistics.median(once["iterations"] for once in runs)
        cell["systems"][name] = {
            "seconds": [once["seconds"] for once in runs],
            "tokens": [once["tokens"] for once in runs],
            "iterations": iterations,
            "decode_batch": work.tokens / iterations,
            "iterations_over_longest": iterations / (TOKENS * max(work.turns)),
            "ours_is_faster_by": statistics.median(
                once["seconds"] / own for once, own in zip(runs, mine, strict=True)
            ),
        }
    terms = {name: statistics.median(bound[name] for bound in bounds) for name in bounds[0]}
    environment_s = work.latency_s * sum(work.turns) / ENV_SLOTS
    alone_s = terms["alone_s"] + work.latency_s * max(work.turns)
    bound_s = max(terms["decode_s"] + terms["prefill_s"], environment_s, alone_s)
    cell["bound"] = {
        **terms,
        "environment_s": environment_s,
        "longest_s": alone_s,
        "bound_s": bound_s,
    }
    cell["bound_share"] = bound_s / statistics.median(mine)


def rows(result: Json) -> Iterator[list[str]]:
    """The table, its header first."""
    yield [
        "turns",
        "latency",
        "ours / flash / barrier, s",
        "over flash",
        "over barrier",
        "decode batch",
        "iterations / longest",
        "engine, env, longest: bound s",
        "share",
    ]
    for cell in result["cells"]:
        systems = [cell["systems"][name] for name in SYSTEMS]
        bound = cell["bound"]
        engine_s = bound["decode_s"] + bound["prefill_s"]
        yield [
            cell["turns"],
            f"{1000 * cell['latency_s']:.0f} ms",
            _joined(f"{statistics.median(system['seconds']):.1f}" for system in systems),
            *(f"{system['ours_is_faster_by']:.2f}" for system in systems[1:]),
            _joined(f"{system['decode_batch']:.1f}" for system in systems),
            _joined(f"{system['iterations_over_longest']:.2f}" for system in systems),
            f"{engine_s:.1f}, {bound['environment_s']:.1f}, {bound['longest_s']:.1f}",
            f"{cell['bound_share']:.2f}",
        ]


def _joined(parts: Iterator[str]) -> str:
    return " / ".join(parts)
