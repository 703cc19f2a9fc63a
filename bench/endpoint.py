"""An agent through the endpoint beside the same conversation as a native environment.

    native     EnvironmentMultiTurn: the worker gives it each turn of the model
    endpoint   EnvironmentAgent: a program with the `openai` package asks for each turn

Throughput: both run in the sandbox, with the same engine, prompts, seeds and token budgets. No turn
ends early, so that both generate the same number of tokens.

Learning: runs of the calculator with its own config, by a real worker. The endpoint's agent plays
the same conversation with the same scorer. Their samples differ, because the seed of an agent's
turn depends on its prompt. `noise` is twice the standard error of the difference over the seeds.

Both take turns: a load on the machine hits both."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from transformers import AutoTokenizer

from bench import whole
from bench.chat import cpu_s
from bench.rollouts import GROUP, MAX_LENGTH, REPLY, TOKENS, MeteredEngine, messages, rotated
from environments.process.host import EnvironmentHost
from worker.event_loop import AsyncRunner
from worker.rollouts.scheduler import Generator, PlayedRollout, RolloutTask, TalkLimits, collect
from worker.rollouts.transcript import ChatTemplate

Json = dict[str, Any]
TURNS = 3
COMMON = """
import json
from pathlib import Path
from environments import (
    EnvironmentAgent, EnvironmentMultiTurn, EnvironmentStepResult, RewardResult, TaskExample
)

known = json.loads((Path(__file__).parent / "known.json").read_text())
TASKS = [TaskExample({"messages": each}, "", id=str(n)) for n, each in enumerate(known["openings"])]
"""
SOURCES = {
    "native": """
class Sample(EnvironmentMultiTurn):
    dataset = TASKS
    turns = 0

    def start_episode(self, example):
        return example.record["messages"]

    def max_episode_turns(self, example):
        return known["turns"]

    def step_episode(self, example, messages, assistant_response):
        self.turns += 1
        return EnvironmentStepResult(self.turns == known["turns"], known["reply"])

    def score_episode(self, example, episode):
        return RewardResult(0.0)
""",
    "endpoint": """
from openai import OpenAI

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")


class Sample(EnvironmentAgent):
    dataset = TASKS

    def run(self, example, base_url, api_key, model):
        chat = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions
        messages = list(example.record["messages"])
        for _ in range(known["turns"]):
            answer = chat.create(model=model, messages=messages).choices[0].message
            messages += [{"role": "assistant", "content": answer.content}, *known["reply"]]
        return RewardResult(0.0)
""",
}
LEARNER = """
from copy import copy

from calculator import MAX_TURNS, Calculator
from environments import EnvironmentAgent, EnvironmentEpisode
from openai import OpenAI

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")


class Agent(EnvironmentAgent):
    max_calls = MAX_TURNS

    def __init__(self):
        self.calculator = Calculator()
        self.dataset = self.calculator.dataset
        self.eval_dataset = self.calculator.eval_dataset

    def run(self, example, base_url, api_key, model):
        chat = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions
        calculator = copy(self.calculator)
        messages = calculator.start_episode(example)
        prompt = len(messages)
        for _ in range(MAX_TURNS):
            text = chat.create(model=model, messages=messages).choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            step = calculator.step_episode(example, messages, text)
            if step.done:
                break
            messages += step.messages
        return calculator.score_episode(example, EnvironmentEpisode(messages, text, prompt))


def load_environment():
    return Agent()
"""
"""The calculator's own class and scorer, played by an agent."""
LATE_STEPS = 3


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """{"throughput", "learning", "load"}; the load is the machine's average at the start and the
    end.
    """
    before = os.getloadavg()[0]
    throughput = _throughput(model_path, repeat, quick)
    learning = _learning(model_path, repeat, 2 if quick else 8)
    return {
        "throughput": throughput,
        "learning": learning,
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
    }


def _learning(model_path: Path, seeds: int, steps: int) -> Json:
    """Runs of both with each seed; the rewards of the last steps, their difference and its noise;
    and the median ratio of the times that rollouts took.
    """
    attempts: dict[str, list[Json]] = {name: [] for name in SOURCES}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"native": whole.CALCULATOR, "endpoint": _learner(Path(scratch, "calculator"))}
        for seed in range(seeds):
            for name in rotated(list(SOURCES), seed):
                attempt = whole.attempt("worker.main", model_path, seed, steps, folders[name])
                attempts[name].append(attempt)
                length = f"{attempt['rollout_s']:.2f} s of rollouts a step"
                sys.stderr.write(f"{name}, seed {seed}: {curve(attempt)}; {length}\n")
    pairs = zip(attempts["native"], attempts["endpoint"], strict=True)
    return {
        "steps": steps,
        "attempts": attempts,
        **late_rewards(attempts),
        "throughput_share": statistics.median(
            native["rollout_s"] / endpoint["rollout_s"] for native, endpoint in pairs
        ),
    }


def late_rewards(attempts: dict[str, list[Json]]) -> Json:
    """The rewards of the last steps of two systems' runs, by seed; by how much the second's are
    higher, and twice the standard error of that.
    """
    late: dict[str, list[float]] = {}
    for name, runs in attempts.items():
        late[name] = [statistics.fmean(run["reward"][-LATE_STEPS:]) for run in runs]
    first, second = late.values()
    return {
        "late_reward": late,
        "difference": statistics.fmean(second) - statistics.fmean(first),
        "noise": 2 * math.hypot(_standard_error(first), _standard_error(second)),
    }


def curve(attempt: Json) -> str:
    return " ".join(f"{value:.2f}" for value in attempt["reward"])


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / math.sqrt(len(values))


def _learner(folder: Path) -> Path:
    shutil.copytree(whole.CALCULATOR, folder)
    (folder / "environment.py").rename(folder / "calculator.py")
    (folder / "environment.py").write_text(LEARNER)
    (folder / "environment.toml").write_text("endpoint = true\n")
    return folder


def _throughput(model_path: Path, repeat: int, quick: bool) -> Json:
    """Seconds, CPU seconds and tokens of every repeat; the median ratio of the throughputs."""
    count = 8 if quick else 32
    template = ChatTemplate(AutoTokenizer.from_pretrained(model_path))
    engine = MeteredEngine(model_path, count)
    seconds: dict[str, list[float]] = {name: [] for name in SOURCES}
    tokens: dict[str, list[int]] = {name: [] for name in SOURCES}
    cpu: dict[str, list[float]] = {name: [] for name in SOURCES}
    with tempfile.TemporaryDirectory() as scratch, AsyncRunner() as runner:
        hosts: dict[str, EnvironmentHost] = {}
        try:
            for name in SOURCES:
                folder = _folder(Path(scratch) / name, name, count)
                hosts[name] = runner.run(EnvironmentHost.start(folder, concurrency=count))
                _rollouts(runner, hosts[name], engine, template, count)  # the first ones are slow
            for number in range(repeat):
                for name in rotated(list(SOURCES), number):
                    engine.clear()
                    started = perf_counter()
                    used = cpu_s(psutil.Process())
                    _rollouts(runner, hosts[name], engine, template, count)
                    cpu[name].append(cpu_s(psutil.Process()) - used)
                    seconds[name].append(perf_counter() - started)
                    said = f"{name}: {seconds[name][-1]:.2f} s, {cpu[name][-1]:.2f} CPU s"
                    sys.stderr.write(f"{said}\n")
                    tokens[name].append(engine.tokens)
        finally:
            for host in hosts.values():
                runner.run(host.stop())
    pairs = zip(seconds["native"], seconds["endpoint"], strict=True)
    ratio = statistics.median(native / endpoint for native, endpoint in pairs)
    return {
        "rollouts": count,
        "seconds": seconds,
        "cpu_s": cpu,
        "tokens": tokens,
        "throughput_share": ratio,
    }


def _folder(folder: Path, name: str, count: int) -> Path:
    folder.mkdir()
    known = {"openings": [messages(n) for n in range(count)], "reply": REPLY, "turns": TURNS}
    (folder / "known.json").write_text(json.dumps(known))
    load = "\n\ndef load_environment():\n    return Sample()\n"
    (folder / "environment.py").write_text(COMMON + SOURCES[name] + load)
    (folder / "environment.toml").write_text(f"endpoint = {str(name == 'endpoint').lower()}\n")
    return folder


def _rollouts(
    runner: AsyncRunner,
    host: EnvironmentHost,
    engine: MeteredEngine,
    template: ChatTemplate,
    count: int,
) -> None:
    generator = Generator(engine, run_step=lambda: runner.call_waiting(engine.step))
    tasks = [RolloutTask("train", n, n // GROUP, n, seed=n) for n in range(count)]
    made: list[PlayedRollout] = runner.run(
        collect(tasks, host, generator, template, TalkLimits(TOKENS, MAX_LENGTH))
    )
    runner.run(generator.aclose())
    assert all(rollout.turns == TURNS and not rollout.error for rollout in made)


def rows(result: Json) -> Iterator[list[str]]:
    """The table, its header first."""
    yield ["", "native", "endpoint", "endpoint to native", "goal"]
    found = result["throughput"]
    medians = [f"{statistics.median(found['seconds'][name]):.2f} s" for name in SOURCES]
    share = f"{found['throughput_share']:.2f} of the throughput"
    used = [f"{statistics.median(found['cpu_s'][name]):.2f} s" for name in SOURCES]
    yield [f"{found['rollouts']} rollouts of {TURNS} turns", *medians, share, "0.9"]
    yield ["of the processors", *used, "", ""]
    learning = result["learning"]
    attempts = learning["attempts"]
    medians = [
        f"{statistics.median(each['rollout_s'] for each in attempts[name]):.2f} s"
        for name in SOURCES
    ]
    share = f"{learning['throughput_share']:.2f} of the throughput"
    yield ["rollouts of a calculator step", *medians, share, "0.9"]
    late = [" ".join(f"{value:.2f}" for value in learning["late_reward"][name]) for name in SOURCES]
    difference = f"{learning['difference']:+.3f}, noise {learning['noise']:.3f}"
    what = f"reward of the last {LATE_STEPS} of {learning['steps']} steps, by seed"
    yield [what, *late, difference, "in the noise"]
    for seed, pair in enumerate(zip(*attempts.values(), strict=True)):
        yield [f"reward by step, seed {seed}", *map(curve, pair), "", ""]
    yield [f"load {result['load'][0]} at the start, {result['load'][1]} at the end", "", "", "", ""]
