"""A training run of an agent that uses the `openai` package: the tiny model and the real engine."""

import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol.run_folder import RunFolder
from tests.attempts import Attempt, make_run
from tests.places import AGENT_VOWELS


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("agent") / "run"
    run = make_run(folder, tiny_model, environment=AGENT_VOWELS, eval_before=True, eval_after=True)
    Attempt(run).ended()
    return run


def rewards(run: RunFolder, step: int) -> list[float]:
    rows: list[Any] = list(run.rollouts(step))
    assert not any(row["error"] for row in rows), rows
    return [row["reward"] for row in rows]


def test_an_agent_learns_what_its_reward_pays_for(run: RunFolder) -> None:
    first, last = statistics.mean(rewards(run, 1)), statistics.mean(rewards(run, 5))
    assert last > 1.5 * first, (first, last)
    # What it writes greedily after five steps is chance: one letter may lead, vowel or not.
    before, after = (run.evaluation(step)["summary"] for step in (0, 5))
    assert before["n"] == after["n"] == 5


def test_its_rollouts_are_the_conversations_that_it_had(run: RunFolder) -> None:
    for row in run.rollouts(1):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert row["messages"][0]["content"].startswith("Write ") and row["turns"] == 2 and row["finish"] == "done"


WISHES = """
from openai import BadRequestError, OpenAI
WORD = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"enum": ["cat", "dog"]}}}
def write(question, base_url, api_key, model):
    messages = [{"role": "user", "content": question}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        create = client.chat.completions.create
        try:
            create(model=model, messages=messages, logit_bias={"5": 100})
        except BadRequestError:
            pass
        word = create(model="gpt-5", messages=messages, response_format=WORD)
        if question.endswith("1"):
            return [word.choices[0].message.content]  # no token of it is the model's choice
        said = create(model="gpt-5", messages=messages, n=2, stop=["e"], max_tokens=8, logprobs=True)
    texts = [choice.message.content for choice in said.choices]
    assert not any("e" in text for text in texts)
    assert all(len(choice.logprobs.content) <= 8 for choice in said.choices)
    return [word.choices[0].message.content, *texts]
"""


def test_what_an_agent_asks_of_its_model_is_honoured_in_a_run(tiny_model: Path, tmp_path: Path) -> None:
    environment = tmp_path / "wishes"
    shutil.copytree(AGENT_VOWELS, environment)
    (environment / "agent.py").write_text(WISHES)
    run = make_run(tmp_path / "run", tiny_model, environment=environment, steps=2)
    Attempt(run).ended()
    rows: list[Any] = [*run.rollouts(1), *run.rollouts(2)]
    assert not any(row["error"] for row in rows), rows
    assert {row["turns"] for row in rows} <= {1, 3}
    for row in rows:
        assert row["refusals"] == {"unsupported_value: logit_bias": 1}
        words = [*row["messages"], *(said for branch in row["branches"] for said in branch["messages"])]
        assert any(said["content"] in ('"cat"', '"dog"') for said in words), words
    for step in (1, 2):
        written = run.metrics(step)
        assert written is not None
        assert written["metrics"]["refused/unsupported_value: logit_bias"] == len(list(run.rollouts(step)))
        assert written["metrics"]["rollouts/refused_share"] == 1
