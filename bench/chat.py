"""Chats with a deployment that nobody else uses: when the first token comes, and each after it.

The same prompt of some 80 tokens, with another number at its start, so that the prefix cache holds
nothing of it, is sent to the base model and to an adapter. Answers are greedy and streamed. The
processor's time is that of the whole server."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import free_port
from worker.adapter import save_adapter, with_noise
from worker.model_files import ModelFiles
from worker.process import PROCESS_SETTINGS
from worker.training.policy import load_policy

Json = dict[str, Any]
RANK = 32
PROMPT = (
    "{number} apples cost {number} coins. " * 6 + "How many coins do three apples cost, and why?"
)
TOKENS = 25
START_S = 300.0


def run(model_path: Path, *, repeat: int, quick: bool) -> Json:
    """{"models": {name: {"first_s", "token_s", "cpu_s": for each chat}}}"""
    made: dict[str, list[Json]] = {"base": [], "adapter": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base = ModelFiles(model_path)
        policy = load_policy(base, rank=RANK, alpha=RANK, seed=0, dtype=base.config.dtype)
        save_adapter(policy, Path(scratch, "plain"))
        adapter = Path(scratch, "adapter")
        adapter.mkdir()
        with_noise(Path(scratch, "plain"), adapter)
        with _served(model_path, Path(scratch)) as (client, process):
            body = {"lora_name": "adapter", "lora_path": str(adapter)}
            headers = {"Authorization": "Bearer admin"}
            client.post("/v1/load_lora_adapter", json=body, headers=headers).raise_for_status()
            for number in range(2 if quick else 10 * repeat):
                for name, chats in made.items():
                    chats.append(_chat(client, process, name, 10 + number))
    keys = ("first_s", "token_s", "cpu_s")
    return {
        "models": {
            name: {key: [chat[key] for chat in chats[1:]] for key in keys}
            for name, chats in made.items()
        }
    }


@contextmanager
def _served(model_path: Path, scratch: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    port, log = free_port(), scratch / "log"
    chosen = {*PROCESS_SETTINGS, "OMP_NUM_THREADS"}  # a deployment chooses for itself
    variables = {name: value for name, value in os.environ.items() if name not in chosen}
    variables |= {
        "VLLM_API_KEY": "user",
        "FLASH_ADMIN_KEY": "admin",
        "FLASH_HOME": f"{scratch}/home",
    }
    command = [sys.executable, "-m", "worker.engine.serve", "--model", str(model_path)]
    command += ["--port", str(port), "--max-lora-rank", str(RANK), "--name", "base"]
    with (
        log.open("wb") as out,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client,
    ):
        process = subprocess.Popen(command, stdout=out, stderr=out, env=variables)
        try:
            deadline = time.monotonic() + START_S
            while not _is_up(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise FlashError("worker_failed", log.read_text()[-2000:])
                time.sleep(0.2)
            yield client, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def _chat(client: httpx.Client, process: psutil.Process, model: str, number: int) -> Json:
    messages = [{"role": "user", "content": PROMPT.format(number=number)}]
    body = {"model": model, "messages": messages, "max_tokens": TOKENS}
    body |= {"temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
    before, started, came = cpu_s(process), time.perf_counter(), list[float]()
    headers = {"Authorization": "Bearer user"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if '"token_ids":[' in line:  # not in the first event, which only says who speaks
                came.append(time.perf_counter() - started)
    each = (came[-1] - came[0]) / (len(came) - 1)
    return {"first_s": came[0], "token_s": each, "cpu_s": cpu_s(process) - before}


def cpu_s(process: psutil.Process) -> float:
    """Of it and its children: it depends less on other load than the clock does."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def rows(result: Json) -> list[list[str]]:
    figures_of = (
        "first token, ms: least, median",
        "each after it, ms",
        "processor's time of a chat, ms",
    )
    table = [["model", *figures_of]]
    for name, figures in result["models"].items():
        cells = [
            f"{1000 * min(of):.1f}, {1000 * statistics.median(of):.1f}" for of in figures.values()
        ]
        table.append([name, *cells])
    return table
