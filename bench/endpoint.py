"""An agent through the endpoint beside the same conversation as a native environment.

    native     EnvironmentMultiTurn: the worker gives it each turn of the model
    endpoint   EnvironmentAgent: a program with the `openai` package asks for each turn

Both run in the sandbox, with the same engine, prompts, seeds and token budgets. No turn ends early,
so that both generate the same number of tokens."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer

from bench.rollouts import GROUP, MAX_LENGTH, REPLY, TOKENS, MeteredEngine, messages, rotated
from environments.process.host import EnvironmentHost
from worker.event_loop import AsyncRunner
from worker.rollouts.scheduler import Generator, Limits, Rollout, Task, collect
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

    def start_episode(self, example, prompt_text):
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


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """Seconds and tokens of every repeat of both, and the median ratio of their throughputs."""
    count = 8 if quick else 32
    template = ChatTemplate(AutoTokenizer.from_pretrained(model_path))
    engine = MeteredEngine(model_path, count)
    seconds: dict[str, list[float]] = {name: [] for name in SOURCES}
    tokens: dict[str, list[int]] = {name: [] for name in SOURCES}
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
                    _rollouts(runner, hosts[name], engine, template, count)
                    seconds[name].append(perf_counter() - started)
                    tokens[name].append(engine.tokens)
        finally:
            for host in hosts.values():
                runner.run(host.stop())
    pairs = zip(seconds["native"], seconds["endpoint"], strict=True)
    ratio = statistics.median(native / endpoint for native, endpoint in pairs)
    return {"rollouts": count, "seconds": seconds, "tokens": tokens, "throughput_share": ratio}


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
    tasks = [Task("train", n, n // GROUP, n, seed=n) for n in range(count)]
    made: list[Rollout] = runner.run(
        collect(tasks, host, generator, template, Limits(TOKENS, MAX_LENGTH))
    )
    runner.run(generator.aclose())
    assert all(rollout.turns == TURNS and not rollout.error for rollout in made)


def rows(result: Json) -> Iterator[list[str]]:
    """The table, its header first."""
    yield ["rollouts", "native, s", "endpoint, s", "endpoint's share of the throughput"]
    medians = [f"{statistics.median(result['seconds'][name]):.2f}" for name in SOURCES]
    yield [str(result["rollouts"]), *medians, f"{result['throughput_share']:.2f}"]
