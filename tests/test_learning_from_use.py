"""Learning from use: a deployment is used and rated, and what users liked is learnt, if that helps."""

import io
import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from rich.console import Console

from bench.loop import _evaluated
from flash_mcp.cli.demo import DemoSession, connected, watch
from flash_mcp.cli.main import main
from tests.folders import environment_folder

pytestmark = pytest.mark.long

SOURCE = """
class Sample(EnvironmentSingleTurn):
    def __init__(self):
        self.dataset = [TaskExample({}, f"Write {n}", id=f"t{n}") for n in range(40)]
        self.eval_dataset = [TaskExample({}, f"Say {n}", id=f"v{n}") for n in range(60)]

    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]

    def score_response(self, example, response_text):
        length = len(response_text)
        return RewardResult(max(0.0, 1 - length / 40) if length else 0.0, success=1 <= length <= 10)
"""
REQUESTS = 30
SHAPE: dict[str, Any] = {"max_tokens": 48, "lora_rank": 8, "lora_alpha": 16}
LIKED = 0.75  # users like answers of at most ten characters; of the model's own, four of ten are so short


def liking(text: str) -> float:
    return max(0.0, 1 - len(text) / 40) if text else 0.0


async def deployed(session: DemoSession, **arguments: Any) -> dict[str, Any]:
    while True:
        deployment = await session.call("deploy", **arguments)
        if deployment["state"] != "starting":
            assert deployment["state"] == "ready", deployment
            return deployment


async def use(deployment: dict[str, Any]) -> dict[str, float]:
    """Ask the deployment through its API, and rate each answer: by the route, or in the metadata of the next
    request. {id of an answer: its rating}"""
    key = json.loads(await anyio.Path(deployment["api_key_file"]).read_text())["api_key"]
    rated: dict[str, float] = {}
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=deployment["base_url"], headers=headers, timeout=120) as client:
        metadata: dict[str, str] = {}
        for number in range(REQUESTS):
            # The first one asks what the model is judged by.
            text = f"Write {number}" if number else "Say 1"
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 48, "seed": number}
            body |= {"model": deployment["deployment"], "user": f"user {number % 3}", "temperature": 1.0}
            answer = await client.post("/chat/completions", json={**body, "metadata": metadata})
            assert answer.is_success, answer.text
            reply = answer.json()
            liked = liking(reply["choices"][0]["message"]["content"])
            metadata = {}
            if number % 2 or number >= REQUESTS - 2:
                rating = {"model": deployment["deployment"], "id": reply["id"], "rating": liked}
                rate = await client.post("/ratings", json=rating)
                assert rate.is_success, rate.text
            else:
                metadata = {"rates": reply["id"], "rating": str(liked)}
            rated[reply["id"]] = liked
    return rated


async def learns_from_use(session: DemoSession, folder: Path, model: str) -> None:
    pushed = await session.call("env_push", folder=str(folder), name="short")
    common = {"environment": pushed["environment"], "max_tokens": 48}
    first = {**common, **SHAPE, "model": model, "steps": 1, "batch_size": 2, "group_size": 2}
    run_id = (await session.call("train", **first))["run_id"]
    assert (await watch(session, run_id))["state"] == "succeeded"
    deployment = await deployed(session, run_id=run_id, record=True)
    assert len(await use(deployment)) == REQUESTS
    shown = await session.call("rollouts", run_id=deployment["deployment"], success=False, limit=10)
    assert shown["total"] == REQUESTS and all(row["reward"] < 1 for row in shown["rollouts"])
    # A user who wants to be forgotten.
    command = ["recordings", deployment["deployment"], "--user", "user 2"]
    assert main([*command, "--delete"]) == 0
    chosen = {"runs": [deployment["deployment"]], "success_threshold": LIKED}
    curated = await session.call("curate", **chosen, name="liked")
    counts = curated["counts"]
    assert counts["attempts"] == REQUESTS * 2 // 3 and counts["eval_attempts"] == 1
    assert 0 < counts["train_rows"] <= counts["always_solved"] < counts["tasks"]
    learn = {"algorithm": "sft", "dataset": curated["dataset"], "init_from_adapter": f"{run_id}@1"}
    learn |= {"epochs": 60, "batch_size": 4, "learning_rate": 5e-3}
    better = (await session.call("train", **common, model=model, **learn))["run_id"]
    assert (await watch(session, better))["state"] == "succeeded"
    before = await _evaluated(session, **common, model=run_id, attempts=2)
    after = await _evaluated(session, **common, model=better, attempts=2)
    pair = {"base": before["run_id"], "other": after["run_id"]}
    compared = await session.call("compare", **pair)
    verdict = compared["verdict"]
    if verdict == "improved":
        await deployed(session, run_id=better)
    served = (await session.call("catalog", kind="deployments"))["deployments"]
    assert verdict == "improved", compared
    assert {row["run_id"] for row in served} == {run_id, better}
    for row in served:
        await session.call("undeploy", deployment=row["deployment"])


def test_what_users_liked_is_learnt_and_deployed_as_it_is_better(tiny_model: Path, tmp_path: Path, flash_home: Path):
    folder = environment_folder(tmp_path / "environment", SOURCE)

    async def loop() -> None:
        async with connected(Console(file=io.StringIO(), width=200)) as session:
            await learns_from_use(session, folder, str(tiny_model))

    anyio.run(loop)
