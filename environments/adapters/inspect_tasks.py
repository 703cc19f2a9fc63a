"""Tasks of Inspect (the package inspect_ai), as a function with its decorator @task returns them.

    from inspect_evals.agent_threat_bench import (
        agent_threat_bench_memory_poison as load_environment,
    )

with endpoint = true. Inspect itself evaluates each sample, by `inspect_ai.eval`, with the rollout's
endpoint as its model. One process can do that for one sample at a time, so each rollout is a
process of its own, forked from one that has loaded the task. Seen to work with inspect_ai 0.3.285.

The reward is the mean of all scores: 1 for C, 0.5 for P, 0 for I, and numbers as they are. A
rollout succeeds if that is at least 1."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from environments.adapters import refuse_images, tasks_of
from environments.base import (
    EnvironmentAgent,
    RewardMetric,
    RewardResult,
    TaskExample,
    UnsupportedError,
)

LOCAL = "local"
"""The one kind of Inspect's sandboxes that needs no other program: files of this sandbox."""
MAX_CALLS = 64
MAX_REPLY_BYTES = 1 << 16


def adapt(task: Any) -> InspectEnvironment:
    """The environment of a Task. Raises UnsupportedError."""
    if not hasattr(task, "dataset") or not hasattr(task, "solver"):
        raise UnsupportedError(f"{type(task).__name__} of inspect_ai is no Task")
    importlib.import_module("openai")  # Inspect asks the model by it, in a process that says less
    for holder in (task, *task.dataset):
        kind: Any = holder.sandbox and getattr(holder.sandbox, "type", holder.sandbox)
        if kind and kind != LOCAL:
            raise UnsupportedError(f"it needs a sandbox of Inspect's kind {kind!r:.60}")
    return InspectEnvironment(task)


class InspectEnvironment(EnvironmentAgent):
    """A Task. Its samples are split as rows without a held-out split are."""

    max_calls = MAX_CALLS

    def __init__(self, task: Any) -> None:
        rows = [
            {"id": index if sample.id is None else sample.id, "question": _question(sample)}
            for index, sample in enumerate(task.dataset, start=1)
        ]
        self.dataset, self.eval_dataset = tasks_of(rows, [], lambda row: row["question"])
        self._runner = _Runner(task)

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        job = {"sample": example.record["id"], "base_url": base_url, "key": api_key, "model": model}
        result = await self._runner.run(job)
        if result["error"]:
            raise RuntimeError(f"Inspect reports: {result['error']}")
        scores: Mapping[str, float] = result["scores"]
        if not scores:
            raise RuntimeError("Inspect gave no score: the task has no scorer")
        reward = sum(scores.values()) / len(scores)
        metrics = [RewardMetric(name, score=value) for name, value in scores.items()]
        return RewardResult(reward, reason=result["reason"], metrics=metrics)


def _question(sample: Any) -> str:
    if isinstance(sample.input, str):
        return sample.input
    for message in sample.input:
        refuse_images(getattr(part, "type", "text") for part in message.content)
    return "\n\n".join(str(message.text) for message in sample.input)


class _Runner:
    """A process that forks another one for each job. Both ends speak JSON in whole datagrams."""

    def __init__(self, task: Any) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # On the main thread: what is being loaded here is all that this process does.
        if os.fork() == 0:
            self._socket.close()
            _serve(task, other)
        other.close()
        self._socket.setblocking(False)
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._jobs = 0

    async def run(self, job: dict[str, Any]) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        if self._reading is None:
            self._reading = loop.create_task(self._read())
        self._jobs += 1
        number = self._jobs
        answer = self._waiting[number] = loop.create_future()
        try:
            await loop.sock_sendall(self._socket, json.dumps({**job, "number": number}).encode())
            return await answer
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while reply := await loop.sock_recv(self._socket, MAX_REPLY_BYTES):
            result = json.loads(reply)
            waiting = self._waiting.get(result["number"])
            if waiting is not None and not waiting.done():
                waiting.set_result(result)
        for waiting in self._waiting.values():
            waiting.set_exception(RuntimeError("the process that runs Inspect ended"))


# -- in the forked processes -----------------------------------------------------------------------


def _serve(task: Any, jobs: socket.socket) -> None:
    """Fork a process for each job, until the other end is gone."""
    # Have Inspect import what an evaluation needs: each process would need seconds for that.
    inspect_ai = importlib.import_module("inspect_ai")
    datasets = importlib.import_module("inspect_ai.dataset")
    models = importlib.import_module("inspect_ai.model")
    models.get_model("openai-api/flash/none", base_url="http://127.0.0.1:9/v1", api_key="none")
    nothing = inspect_ai.Task(dataset=[datasets.Sample("nothing")])
    with tempfile.TemporaryDirectory() as folder, suppress(Exception):
        inspect_ai.eval(nothing, model="mockllm/model", display="none", log_dir=folder)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while job := jobs.recv(MAX_REPLY_BYTES):
        if os.fork() == 0:
            _play(task, json.loads(job), jobs)
    os._exit(0)


def _play(task: Any, job: Mapping[str, Any], jobs: socket.socket) -> None:
    """Evaluate one sample, send what came of it, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    results: dict[str, Any] = {"number": job["number"], "scores": {}, "reason": None, "error": None}
    try:
        with tempfile.TemporaryDirectory() as folder:
            sample = _evaluated(task, job, folder)
        results["error"] = sample.error and sample.error.message[:2000]
        scores: Mapping[str, Any] = sample.scores or {}
        to_float = importlib.import_module("inspect_ai.scorer").value_to_float()
        for name, score in scores.items():
            parts: Any = score.value
            if not isinstance(parts, dict):
                parts = {"": parts}
            for part, value in cast("dict[str, Any]", parts).items():
                results["scores"][f"{name}.{part}".rstrip(".")] = float(to_float(value))
        reasons = [score.explanation for score in scores.values() if score.explanation]
        results["reason"] = "; ".join(reasons)[:2000] or None
    except BaseException:
        results["error"] = traceback.format_exc()[-2000:]
    with suppress(OSError):
        jobs.send(json.dumps(results).encode())
    sys.stderr.flush()
    os._exit(0)


def _evaluated(task: Any, job: Mapping[str, Any], folder: str) -> Any:
    inspect_ai = importlib.import_module("inspect_ai")
    models = importlib.import_module("inspect_ai.model")
    model = models.get_model(
        f"openai-api/flash/{job['model']}", base_url=job["base_url"], api_key=job["key"]
    )
    (log,) = inspect_ai.eval(
        task,
        model=model,
        sample_id=job["sample"],
        epochs=1,
        display="none",
        log_dir=folder,
        max_retries=0,
        fail_on_error=False,
    )
    if not log.samples:
        raise RuntimeError(f"no sample was evaluated: {log.error and log.error.message}")
    return log.samples[0]
