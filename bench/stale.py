"""What `max_staleness` saves where an environment is slow, and what it costs in learning.

Steps: runs by the real worker of conversations of 1, 2, 4 or 6 turns, whose environment takes so
long for each call; exact ones, and such with groups that go on beside the training. `over_exact` is
the mean step over that of an environment that takes no time, without staleness.

Learning: runs of the calculator with its own config, exactly and with groups one step ahead; the
reward of their last steps. `noise` is twice the standard error of the difference over the seeds."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import whole
from bench.endpoint import LATE_STEPS, curve, late_rewards
from bench.rollouts import TOKENS, rotated

Json = dict[str, Any]
CASES = ((0.0, 0), (0.0, 1), (0.0, 2), (1.0, 0), (1.0, 1), (1.0, 2))
"""(seconds of a call into the environment, max_staleness)"""
GOALS = {(1.0, 1): "1.2", (1.0, 2): "1.1"}
STALENESS = (0, 1)
ENVIRONMENT = """
import random
import time

from environments import EnvironmentMultiTurn, EnvironmentStepResult, RewardResult, TaskExample

draw = random.Random(0)
TASKS = [TaskExample({{"turns": draw.choice((1, 2, 4, 6))}}, "", id=str(n)) for n in range(400)]


class Slow(EnvironmentMultiTurn):
    dataset = TASKS
    turns = 0

    def start_episode(self, example):
        text = f"This is task {{example.id}}. Write about numbers, one after the other."
        return [{{"role": "user", "content": text}}]

    def max_episode_turns(self, example):
        return 6

    def step_episode(self, example, messages, assistant_response):
        time.sleep({seconds})
        self.turns += 1
        reply = [{{"role": "user", "content": "Go on."}}]
        return EnvironmentStepResult(self.turns == example.record["turns"], reply)

    def score_episode(self, example, episode):
        return RewardResult(len(episode.messages[-1]["content"]) % 10 / 10)


def load_environment():
    return Slow()
"""


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """{"steps", "cases": [one for each of CASES], "learning"}."""
    steps = 3 if quick else 10
    cases: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (seconds, staleness) in enumerate(CASES[::5] if quick else CASES):
            folder = Path(scratch, f"slow_{number}")
            folder.mkdir()
            source = ENVIRONMENT.format(seconds=seconds / 10 if quick else seconds)
            (folder / "environment.py").write_text(source)
            fields = {"max_staleness": staleness, "max_tokens": TOKENS, "max_length": 1024}
            attempt = whole.attempt("worker.main", model_path, 0, steps, folder, **fields)
            case = {"seconds": seconds, "staleness": staleness, "step_s": attempt["step_s"]}
            for name in ("staleness/mean", "is_ratio/effective_share", "time/train_s"):
                values = [step.get(name, 0.0) for step in attempt["metrics"][1:]]
                case[name] = statistics.fmean(values)
            cases.append(case)
            sys.stderr.write(f"{case}\n")
    exact = cases[0]["step_s"]
    for case in cases:
        case["over_exact"] = case["step_s"] / exact
    learning = _learning(model_path, repeat, 2 if quick else 12)
    return {"steps": steps, "cases": cases, "learning": learning, "load": os.getloadavg()[0]}


def _learning(model_path: Path, seeds: int, steps: int) -> Json:
    attempts: dict[str, list[Json]] = {str(staleness): [] for staleness in STALENESS}
    for seed in range(seeds):
        for name in rotated(list(attempts), seed):
            fields = {"max_staleness": int(name), "save_every": steps}
            attempt = whole.attempt("worker.main", model_path, seed, steps, **fields)
            attempts[name].append({"reward": attempt["reward"]})
            sys.stderr.write(f"staleness {name}, seed {seed}: {curve(attempt)}\n")
    return {"steps": steps, "attempts": attempts, **late_rewards(attempts)}


def rows(result: Json) -> Iterator[list[str]]:
    """The table, its header first."""
    yield ["a call takes", "max_staleness", "step", "over the first row", "goal", "mean staleness"]
    for case in result["cases"]:
        key = case["seconds"], case["staleness"]
        times = f"{case['step_s']:.2f} s", f"{case['over_exact']:.2f}", GOALS.get(key, "")
        yield [f"{key[0]:g} s", str(key[1]), *times, f"{case['staleness/mean']:.2f}"]
    learning = result["learning"]
    for name, rewards in learning["late_reward"].items():
        values = " ".join(f"{value:.2f}" for value in rewards)
        what = f"calculator, last {LATE_STEPS} of {learning['steps']} steps"
        yield [what, name, values, "", "", ""]
    difference = f"{learning['difference']:+.3f}", f"noise {learning['noise']:.3f}"
    yield ["the difference", "", *difference, "within the noise", ""]
    yield [f"load {result['load']:.1f} at the end", "", "", "", "", ""]
