"""A training loop whose state is a chain of hashes: a step left out, done twice or begun from a torn file shows."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

from environments.process.host import EnvironmentFault, EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunWriter
from worker.event_loop import AsyncRunner
from worker.heartbeat import Heartbeat

STEP_S = 0.15
TASKS = 3


def state_after(steps: int) -> str:
    """What the policy of an undisturbed run is after so many steps."""
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return state


def train(job: dict[str, Any], spec: Any, writer: RunWriter, heartbeat: Heartbeat, scratch: Path, ranks: Any) -> int:
    """As worker.train.train: the last step."""
    resumed = writer.folder.checkpoints.newest_good() or 0
    state = ""
    if resumed:
        state = (writer.folder.checkpoints.fetch(resumed, scratch / "resume") / "state").read_text()
    writer.event("phase", f"going on from checkpoint {resumed}", step=resumed)
    with AsyncRunner() as runner:
        heartbeat.enter("environment", resumed)
        environment = Path(job["environment"]["path"])
        host = runner.run(EnvironmentHost.start(environment, timeout_s=spec.env_timeout_s))
        try:
            for step in range(resumed + 1, spec.steps + 1):
                heartbeat.enter("rollout", step - 1)
                rollouts = runner.run(_rollouts(host, step), stop=heartbeat.cancelled)
                errors = [rollout["error"] for rollout in rollouts if rollout["error"]]
                if len(errors) > spec.max_error_share * len(rollouts):
                    what = f"{len(errors)} of {len(rollouts)} rollouts failed: {errors[0]}"
                    raise FlashError("environment_error", what)
                time.sleep(STEP_S)
                state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
                writer.rollouts(step, rollouts)
                writer.metrics(step, {"reward/mean": step / spec.steps, "loss": 0.0})
                _save(writer, step, state, scratch)
                heartbeat.enter("train", step)
            if not writer.folder.evaluation(spec.steps):
                rollouts = runner.run(_rollouts(host, spec.steps))
                writer.evaluation(spec.steps, {"n": TASKS, "success": 1.0, "reward_mean": 1.0}, rollouts)
        finally:
            runner.run(host.stop())
    return spec.steps


async def _rollouts(host: EnvironmentHost, step: int) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_rollout(host, step, index) for index in range(TASKS)))


async def _rollout(host: EnvironmentHost, step: int, index: int) -> dict[str, Any]:
    rollout = {"step": step, "index": index, "group": 0, "task_id": f"t{index}", "messages": [], "reward": 0.0,
               "success": False, "advantage": 0.0, "metrics": {}, "reason": None, "error": None, "turns": 1,
               "truncated": False, "finish": "done", "seconds": 0.0}  # fmt: skip
    try:
        opening = await host.open("train", index)
        rollout["messages"] = [*opening.messages, {"role": "assistant", "content": "aeiou"}]
        await host.step(opening.episode, "aeiou")
        rollout["reward"] = (await host.score(opening.episode)).reward
    except EnvironmentFault as fault:
        rollout["error"] = {"code": fault.code, "what": fault.what}
    return rollout


def _save(writer: RunWriter, step: int, state: str, scratch: Path) -> None:
    folder = scratch / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "state").write_text(state)
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(200_000))
    writer.commit_checkpoint(step, folder, {"reward/mean": 0.5})
    writer.event("checkpoint", f"checkpoint {step}", step=step)
