"""Environment folders for tests, written from a few lines of source."""

import textwrap
from pathlib import Path

ADDITION = '''
import asyncio, dataclasses, os, random, re, sys, time
from environments import (
    DatasetError, EnvironmentMultiTurn, EnvironmentSingleTurn, EnvironmentStepResult, RewardMetric, RewardResult,
    TaskExample, load_dataset,
)
def tasks(count=6, first=0):
    return [
        TaskExample({}, f"Add {n} and {n + 1}.", id=f"t{n}", output=str(2 * n + 1), group="sums")
        for n in range(first, first + count)
    ]
class Addition(EnvironmentSingleTurn):
    """Sound in every way; tests override one thing."""
    def __init__(self):
        self.dataset, self.eval_dataset = tasks(6), tasks(4, first=100)
    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]
    def score_response(self, example, response_text):
        right = (response_text or "").strip() == example.output
        return RewardResult(score=float(right), success=right)
class Echo(EnvironmentMultiTurn):
    """Answers every turn with its text and an exclamation mark, three turns long."""
    def __init__(self):
        self.dataset = tasks()
    def start_episode(self, example):
        return [{"role": "user", "content": example.input}]
    def max_episode_turns(self, example):
        return 3
    def step_episode(self, example, messages, assistant_response):
        return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": f"{assistant_response}!"}])
    def score_episode(self, example, episode):
        return RewardResult(score=0.5, success=False)
'''


def allow(home: Path, *lines: str) -> None:
    """Write what the operator allows environments to settings.toml."""
    home.mkdir(exist_ok=True)
    (home / "settings.toml").write_text("\n".join(["[environments]", *lines]))


def environment_folder(folder: Path, source: str, *, returns: str = "Sample()", needs: str = "") -> Path:
    """A folder whose environment.py holds the classes above, then `source`; load_environment returns `returns`.
    Its environment.toml holds `needs`."""
    folder.mkdir(parents=True, exist_ok=True)
    loader = f"\n\ndef load_environment(**args):\n    return {returns}\n"
    (folder / "environment.py").write_text(ADDITION + textwrap.dedent(source) + loader)
    if needs:
        (folder / "environment.toml").write_text(needs)
    return folder


ASK = '''
import http.client, json
from urllib.parse import urlsplit
from environments import EnvironmentAgent
def asked(base_url, api_key, model, messages, **headers):
    """The model's message, or the error of the API."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": f"Bearer {api_key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    body = json.dumps({"model": model, "messages": messages})
    connection.request("POST", url.path + "/chat/completions", body, headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["message"] if "choices" in answer else answer["error"]
'''
"""What an environment's source begins with whose agent asks by `asked`."""


GENERATOR = '''
"""Stands in for the package: every load makes other items."""
import os
from fractions import Fraction
class Numbers:
    def __getitem__(self, index):
        number = str(int.from_bytes(os.urandom(4), "big"))
        metadata = {"keys": {1: number, (2, None): [0.5]}, "share": Fraction(1, 3)}
        return {"question": f"Write {number}.", "answer": number, "metadata": metadata}
    def score_answer(self, answer, entry):
        assert entry["metadata"]["keys"] == {1: entry["answer"], (2, None): [0.5]}
        return float(answer == entry["answer"])
def create_dataset(name, seed, size, **config):
    return Numbers()
'''


def generated_files(size: int = 6, source: str = "") -> dict[str, str]:
    """An environment whose tasks are other ones at every load, through reasoning-gym's adapter.
    `source` may change the loaded `environment`."""
    environment = f"""
from environments import RewardResult
from environments.adapters import reasoning_gym
def load_environment(**kwargs):
    sizes = {{"train_size": {size}, "eval_size": 2}}
    environment = reasoning_gym.load("numbers", **(sizes | kwargs))
{textwrap.indent(textwrap.dedent(source), "    ")}
    return environment
"""
    return {
        "environment.py": environment,
        "reasoning_gym/__init__.py": GENERATOR,
        "reasoning_gym/factory.py": 'DATASETS = {"numbers": None}\n',
    }
