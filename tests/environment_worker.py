"""A worker without a model: it plays every train task of the run's environment once, through the real host, and
reports as worker.main does. Run as that is: FOLDER --attempt N."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.sandbox.confinement import describe
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter


async def play(job: dict[str, Any], writer: RunWriter) -> None:
    secrets = {name: os.environ.pop(name) for name in job["spec"]["secrets"]}
    async with await EnvironmentHost.start(Path(job["environment"]["path"]), secrets=secrets) as host:
        writer.event("sandbox", describe(host.sandbox))
        rows = [await roll(host, index) for index in range(host.splits["train"])]
    writer.rollouts(1, rows)
    names = {name: value for row in rows for name, value in row["metrics"].items()}
    writer.metrics(1, {"reward/mean": 0.5, **{f"reward/{name}": value for name, value in names.items()}})
    for row in rows:
        if row["error"]:
            writer.event("warning", str(FlashError(row["error"]["code"], row["error"]["what"])))


async def roll(host: EnvironmentHost, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": 1, "index": index, "group": 0, "task_id": f"train/{index}", "messages": [],
                           "reward": 0.0, "success": False, "metrics": {}, "reason": None, "error": None, "turns": 1,
                           "truncated": False, "finish": "done", "completion_tokens": 1}  # fmt: skip
    try:
        opening = await host.open("train", index)
        row["messages"] += opening.messages
        row["messages"] += (await host.step(opening.episode, "tell me")).messages
        score = await host.score(opening.episode)
        row |= {"reward": score.reward, "metrics": score.metrics, "reason": score.reason}
    except EnvironmentFault as fault:
        row["error"] = {"code": fault.code, "what": fault.what}
        logging.warning("rollout %s: %s\n%s", index, fault.what, fault.traceback)
    return row


def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    folder = RunFolder(sys.argv[1])
    writer = RunWriter(folder, int(sys.argv[3]))
    writer.beat(0, "environment")
    asyncio.run(play(folder.job(), writer))
    writer.beat(1, "train")
    writer.commit_result("succeeded", 1)


if __name__ == "__main__":
    main()
