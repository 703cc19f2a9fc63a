"""The control plane: how soon a server answers, how fast `status` is on a full store, and how many
claims a second.

The store holds 10,000 ended runs of 50 steps and 20 metrics each, 10 million metric points,
2,000 that are queued, and one that is running. The newest ended ones have two evaluations of 200
tasks. No supervisor takes them. Agents are real MCP
clients over HTTP in processes of their own; each polls the status of some run and thinks for a
second in between. 50 browsers, in a process of their own, show the running run, which changes each
second, while one more client asks for a run. Claims are of runs that were enqueued before, each one
claimed and ended; huey's SQLite storage enqueued and dequeued as many. huey deletes a task when it
is handed out and syncs the disk only with fsync=True; ours keeps a lease and always syncs. Both are
measured on the same disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from mcp import Client, StdioServerParameters

from environments.process.host import EnvironmentHost
from flash_mcp.extensions.pages import live
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue
from flash_mcp.state.store import Store
from flash_mcp.supervisor.process import take_lock
from flash_mcp.tools import status

Json = dict[str, Any]
STEPS, METRICS = 50, 20
EVALUATED, TASKS = 25, 200
"""Runs with evaluations, as many as a page of the overview has, and the tasks of each."""
CALCULATOR = Path(__file__).parents[1] / "environments" / "examples" / "calculator"
THINK_S = 1.0
AGENT_PROCESSES = 2
PAGES_S = 20.0
"""For so long pages are open."""
GOALS = {"first answer": 1.5, "status p50": 0.010, "status p99": 0.050, "agents p99": 0.5}
"""Seconds, from PERFORMANCE."""
GOALS_P50 = {"status, the list": 15, "status, the list of queued runs": 15}
"""Milliseconds; 10 for others."""


def run(model: Path, *, repeat: int, quick: bool) -> Json:
    """Every figure, in seconds. `model` is not used: nothing here trains."""
    runs, polls, agents = (200, 3, 8) if quick else (10_000, 20, 50)
    queued, pages = (100, 5) if quick else (2_000, 50)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        started = time.monotonic()
        ids = fill(Store(base), runs)
        queued_ids = add_queued(Store(base), queued)
        evaluated = add_evaluations(Store(base), ids)
        filled_s = time.monotonic() - started
        return {
            "runs": runs,
            "queued": queued,
            "metric_points": runs * STEPS * METRICS,
            "filled_s": filled_s,
            "first_answer_s": [first_answer(base) for _ in range(max(repeat, 1))],
            **time_status(base, ids, queued_ids, evaluated, 100 if quick else 1000),
            "agents": poll_over_http(base, ids, agents, polls),
            "pages": open_pages(base, ids, pages, PAGES_S / 4 if quick else PAGES_S),
            "environment_starts": environment_starts(base, 3 if quick else 20),
            "claims": [claims(50 if quick else 2000) for _ in range(max(repeat, 1))],
        }


def rows(result: Json) -> list[list[str]]:
    """The table: a header and its lines."""
    first = statistics.median(result["first_answer_s"])
    lines = [["what", "measured", "goal"]]
    lines.append(
        ["import and first answer over stdio", f"{first:.2f} s", f"< {GOALS['first answer']} s"]
    )
    for name, times in result["status_s"].items():
        goal = f"< {GOALS_P50.get(name, 10)} ms"
        cpu = f"{quantile(result['status_cpu_s'][name], 0.5) * 1000:.1f} ms"
        lines.append([f"{name}: p50", f"{quantile(times, 0.5) * 1000:.1f} ms", goal])
        lines.append([f"{name}: p50 of the processor's time", cpu, goal])
        lines.append([f"{name}: p99", f"{quantile(times, 0.99) * 1000:.1f} ms", "< 50 ms"])
    agents = result["agents"]
    lines.append(
        [f"{agents['agents']} agents polling over HTTP: errors", f"{agents['errors']}", "0"]
    )
    slowest = f"{max(agents['first']):.1f} s"
    lines.append(
        [f"{agents['agents']} agents arriving at once: the last one's first answer", slowest, ""]
    )
    for share in (0.5, 0.99):
        name = f"{agents['agents']} agents polling over HTTP: p{share * 100:.0f}"
        lines.append(
            [
                name,
                f"{quantile(agents['seconds'], share) * 1000:.0f} ms",
                "< 500 ms" if share > 0.9 else "",
            ]
        )
    pages = result["pages"]
    p50 = f"{quantile(pages['seconds'], 0.5) * 1000:.0f} ms"
    what = f"{pages['pages']} open pages, a run changes each second: another client's p50"
    lines.append([what, p50, "< 100 ms"])
    lines.append([f"{pages['pages']} open pages: loaded anew", f"{pages['loads']} times", ""])
    for_one = f"{pages['server_cpu_s'] / pages['loads'] * 1000:.1f} ms"
    lines.append(["processor's time of the server for each page loaded", for_one, ""])
    for name, what in (("seconds", "p50"), ("cpu_s", "p50 of the processor's time")):
        start = statistics.median(result["environment_starts"][name])
        lines.append([f"start of an environment's process: {what}", f"{start * 1000:.0f} ms", ""])
    for name in result["claims"][0]:
        rate = statistics.median(round_[name] for round_ in result["claims"])
        lines.append([f"claims a second: {name}", f"{rate:,.0f}", ""])
    return lines


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- the store -------------------------------------------------------------------------------------


def fill(store: Store, runs: int) -> list[str]:
    """Ended runs, and a running one last, as the supervisor would have left them; their ids."""
    environment = store.add_environment(name="calc", digest="abcdef123456", path="/e", size_bytes=1)
    queue.enqueue(store, resolve(RunSpec(environment="calc")), environment)
    first = queue.claim(store)
    assert first
    template = store.query("SELECT * FROM runs")[0]
    template.pop("gpus")  # the database computes it
    noise = random.Random(0)
    ids = [f"run-{number:08d}" for number in range(runs - 1)] + [first.id]
    for start in range(0, len(ids), 500):
        with store.transaction():
            for number, run_id in enumerate(ids[start : start + 500], start):
                if run_id != first.id:
                    created = template["created"] - runs + number
                    values = {"id": run_id, "state": "succeeded", "created": created}
                    values |= {"started": 1.0, "ended": 2.0, "idempotency_key": None}
                    store.insert("runs", {**template, **values})
                for step in range(1, STEPS + 1):
                    reward = 0.5 + 0.4 * step / STEPS + noise.gauss(0, 0.02)
                    metrics = {
                        f"group/metric{index}": reward * index for index in range(METRICS - 3)
                    }
                    metrics |= {"reward/mean": reward, "success/rate": reward, "time/step_s": 1.0}
                    store.put_metrics(
                        run_id, {"step": step, "epoch": 1, "time": 1.0, "metrics": metrics}
                    )
                store.put_event(
                    run_id,
                    "0001-launched",
                    {"time": 1.0, "epoch": 1, "kind": "attempt", "message": "m"},
                )
    return ids


def add_evaluations(store: Store, ids: list[str]) -> list[str]:
    """The first evaluation and the last of the newest ended runs; their ids."""
    evaluated = ids[-1 - EVALUATED : -1]
    words = "The quick brown fox jumps over 13 lazy dogs. " * 20
    for run_id in evaluated:
        for step in (0, STEPS):
            rollouts: list[Json] = []
            for index in range(TASKS):
                is_solved = index * 7 % TASKS < 20 + 2 * step
                messages = [{"role": "user", "content": f"What is {index} + 4? {words}"}]
                messages.append({"role": "assistant", "content": f"{words} {index + 4}"})
                task = {"step": step, "index": index, "task_id": f"eval/{index}", "split": "eval"}
                score = {"reward": float(is_solved), "success": is_solved, "expected": str(index)}
                counts = {"turns": 1, "completion_tokens": 230, "truncated": False, "error": None}
                rollouts.append({**task, **score, **counts, "kind": "sum", "messages": messages})
            summary = {"n": TASKS, "success": (20 + 2 * step) / TASKS, "reward": 0.5, "errors": 0}
            row = {"step": step, "epoch": 1, "time": float(step), "summary": summary}
            store.put_evaluation(run_id, {**row, "rollouts": rollouts})
    return evaluated


def add_queued(store: Store, count: int) -> list[str]:
    """Runs that wait, newer than all others; their ids."""
    template = store.query("SELECT * FROM runs ORDER BY created DESC LIMIT 1")[0]
    template.pop("gpus")
    blank: Json = {"state": "queued", "idempotency_key": None, "attempt": 0}
    blank |= {"started": None, "ended": None, "beat": None}
    ids = [f"run-q{number:07d}" for number in range(count)]
    with store.transaction():
        for number, run_id in enumerate(ids, 1):
            created = template["created"] + number
            store.insert("runs", {**template, **blank, "id": run_id, "created": created})
    return ids


def first_answer(base: Path) -> float:
    """From starting `flash-mcp serve` to the answer of its first tool call."""

    async def call() -> float:
        command = StdioServerParameters(
            command=sys.executable,
            args=["-m", "flash_mcp.cli", "serve"],
            env={**os.environ, "FLASH_HOME": str(base)},
        )
        started = time.perf_counter()
        async with Client(command) as client:
            result = await client.call_tool("status", {"limit": 1})
            assert not result.is_error
            return time.perf_counter() - started

    return asyncio.run(call())


def time_status(
    base: Path, ids: list[str], queued: list[str], evaluated: list[str], count: int
) -> dict[str, dict[str, list[float]]]:
    """The tool's function, called as the server calls it; it starts no supervisor. By the clock,
    and by the processor's time of this process, which other programs lengthen little.
    """
    os.environ["FLASH_HOME"] = str(base)
    chosen = random.Random(1).choices(ids[:-1], k=count)
    waiting = random.Random(1).choices(queued, k=count // 5)

    results: dict[str, dict[str, list[float]]] = {"status_s": {}, "status_cpu_s": {}}

    async def measure(name: str, call: Callable[[str], Any], run_ids: list[str]) -> None:
        times, cpu_times = list[float](), list[float]()
        for run_id in run_ids:
            started, cpu_started = time.perf_counter(), time.process_time()
            await call(run_id)
            times.append(time.perf_counter() - started)
            cpu_times.append(time.process_time() - cpu_started)
        results["status_s"][name], results["status_cpu_s"][name] = times, cpu_times

    def one(run_id: str) -> Any:
        return status.status(run_id=run_id)

    def page(run_id: str) -> Any:
        return status.status(cursor=run_id)

    def newest(_: str) -> Any:
        return status.status(state="succeeded")

    async def overview(_: str) -> None:
        live.overview(Store(base), "/live", live.Listing(state="succeeded"))

    asyncio.run(one(chosen[0]))
    asyncio.run(measure("status of a run", one, chosen))
    asyncio.run(measure("status, the list", page, chosen))
    asyncio.run(measure("status of a queued run", one, waiting))
    asyncio.run(measure("status, the list of queued runs", page, waiting))
    tried = random.Random(1).choices(evaluated, k=count // 20)
    asyncio.run(measure("status of a run with evaluations", one, tried))
    asyncio.run(measure("status, the list of runs with evaluations", newest, tried))
    asyncio.run(measure("overview of runs with evaluations", overview, tried))
    return results


# -- agents over HTTP ------------------------------------------------------------------------------


def poll_over_http(base: Path, ids: list[str], agents: int, polls: int) -> Json:
    """Latencies of every poll, and how many failed."""
    environment = {**os.environ, "FLASH_HOME": str(base)}
    with _serving(base) as (port, _):
        share = [
            agents // AGENT_PROCESSES + (number < agents % AGENT_PROCESSES)
            for number in range(AGENT_PROCESSES)
        ]
        children: list[subprocess.Popen[bytes]] = []
        for number, count in enumerate(share):
            settings = (str(port), str(count), str(polls), *ids[number * 40 :][:40])
            command = [sys.executable, "-m", "bench.control", *settings]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        outputs = [child.communicate(timeout=300)[0] for child in children]
        if any(child.returncode for child in children):
            raise RuntimeError("the agents' processes failed; what they print says how")
        told = [json.loads(output) for output in outputs]
    seconds = [value for one in told for value in one["seconds"]]
    first = [value for one in told for value in one["first"]]
    errors = sum(one["errors"] for one in told)
    return {
        "agents": agents,
        "polls": agents * polls,
        "errors": errors,
        "first": first,
        "seconds": seconds,
    }


@contextmanager
def _serving(base: Path) -> Generator[tuple[int, psutil.Process]]:
    """A server over HTTP: its port and its process. The caller holds the supervisor's lock, so that
    nobody takes the runs that are queued.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    lock = take_lock(base)
    assert lock is not None
    with lock:
        server = subprocess.Popen(
            [sys.executable, "-m", "flash_mcp.cli", "serve", "--http", "--port", str(port),
             "--unauthenticated"],
            stderr=subprocess.DEVNULL, env={**os.environ, "FLASH_HOME": str(base)},
        )  # fmt: skip
        try:
            _wait_for(f"http://127.0.0.1:{port}/mcp")
            yield port, psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait(20)


def open_pages(base: Path, ids: list[str], pages: int, seconds: float) -> Json:
    """Latencies of a client that asks for a run while pages are open that load anew with each
    change, and how often they did.
    """
    with _serving(base) as (port, server):
        return asyncio.run(_pages(base, port, server, ids, pages, seconds))


async def _pages(
    base: Path, port: int, server: psutil.Process, ids: list[str], pages: int, seconds: float
) -> Json:
    store, times = Store(base), list[float]()

    def change(step: int) -> None:
        metrics = {"reward/mean": 0.5}
        body: Json = {"step": step, "epoch": 1, "time": time.time(), "metrics": metrics}
        store.put_metrics(ids[-1], body)

    async def changes() -> None:
        for step in range(STEPS + 1, STEPS + 1_000):
            await asyncio.to_thread(change, step)
            await asyncio.sleep(1.0)

    # The browsers' own work is not the client's: they have a process of their own.
    settings = ("pages", str(port), str(pages), ids[-1])
    browsers = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.control", *settings, stdout=PIPE
    )
    assert browsers.stdout is not None
    assert await browsers.stdout.readline() == b"open\n"
    async with Client(f"http://127.0.0.1:{port}/mcp") as client, asyncio.TaskGroup() as group:
        ends = time.monotonic() + seconds
        cpu_started = sum(server.cpu_times()[:2])
        changing = group.create_task(changes())
        while time.monotonic() < ends:
            await asyncio.sleep(0.2)
            began = time.perf_counter()
            result = await client.call_tool("status", {"run_id": ids[0]})
            assert not result.is_error
            times.append(time.perf_counter() - began)
        server_cpu_s = sum(server.cpu_times()[:2]) - cpu_started
        changing.cancel()
    browsers.terminate()
    output, _ = await browsers.communicate()
    return {
        "pages": pages,
        "loads": len(output.splitlines()),
        "seconds": times,
        "server_cpu_s": server_cpu_s,
    }


async def _browse(port: int, pages: int, run_id: str) -> None:
    """Browsers that show a run and load it anew with each change; a line is printed for each."""
    everyone = asyncio.Barrier(pages + 1)
    limits = httpx.Limits(max_connections=None)

    async def page(browser: httpx.AsyncClient) -> None:
        (await browser.get(f"/ui/runs/{run_id}")).raise_for_status()
        async with browser.stream("GET", f"/ui/events?run={run_id}") as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await everyone.wait()
            async for line in lines:
                if line.startswith("data:"):
                    (await browser.get(f"/ui/runs/{run_id}")).raise_for_status()
                    sys.stdout.write("loaded\n")
                    sys.stdout.flush()

    async with (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60, limits=limits
        ) as browser,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(pages):
            group.create_task(page(browser))
        await everyone.wait()
        sys.stdout.write("open\n")
        sys.stdout.flush()


def environment_starts(base: Path, count: int) -> dict[str, list[float]]:
    """How long the process of the calculator example takes to start, in its sandbox, and to end."""
    folder = base / "environments" / "calculator" / "1"
    shutil.copytree(CALCULATOR, folder)
    times: dict[str, list[float]] = {"seconds": [], "cpu_s": []}

    async def start() -> None:
        async with await EnvironmentHost.start(folder):
            pass

    for _ in range(count):
        before, started = _cpu_of_children(), time.perf_counter()
        asyncio.run(start())
        times["seconds"].append(time.perf_counter() - started)
        times["cpu_s"].append(_cpu_of_children() - before)
    return times


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            httpx.get(url, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(url)


async def _agents(port: int, count: int, polls: int, ids: list[str]) -> Json:
    """`count` agents of this process. They arrive at once; when all had an answer, they poll, and
    think in between.

    The arrival is a figure of its own: most of it is the clients' own work, which shares our cores.
    """
    seconds: list[float] = []
    first: list[float] = []
    errors = 0
    everyone = asyncio.Barrier(count)

    async def agent(number: int) -> None:
        nonlocal errors
        chance = random.Random(number)
        arrived = time.perf_counter()
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            await client.call_tool("status", {"run_id": ids[0]})
            first.append(time.perf_counter() - arrived)
            await everyone.wait()
            for _ in range(polls):
                await asyncio.sleep(THINK_S * chance.uniform(0.5, 1.5))
                started = time.perf_counter()
                try:
                    failed = (
                        await client.call_tool("status", {"run_id": chance.choice(ids)})
                    ).is_error
                except Exception:  # whatever it was, the agent got no answer
                    failed = True
                errors += failed
                seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(agent(number) for number in range(count)))
    return {"seconds": seconds, "first": first, "errors": errors}


# -- claims ----------------------------------------------------------------------------------------


def claims(count: int) -> dict[str, float]:
    """Claims a second of one consumer, per system."""
    with tempfile.TemporaryDirectory() as folder:
        rates = _our_claims(Path(folder), count)
        peers = Path(sys.prefix) / "peers"
        if (peers / "huey").exists():
            for name, fsync in (
                ("huey, synced (dequeue)", True),
                ("huey, as it comes (dequeue)", False),
            ):
                rates[name] = _huey_claims(peers, Path(folder, f"huey-{fsync}.db"), count, fsync)
    return rates


def _our_claims(folder: Path, count: int) -> dict[str, float]:
    store = Store(folder)
    environment = store.add_environment(name="calc", digest="abcdef123456", path="/e", size_bytes=1)
    resolved = resolve(RunSpec(environment="calc"))
    with store.transaction():
        for _ in range(count):
            queue.enqueue(store, resolved, environment)
    started, taken = time.perf_counter(), list[Run]()
    while claimed := queue.claim(store):
        taken.append(claimed)
    claimed_at = time.perf_counter()
    for row in taken:
        queue.finish(store, row.id, row.attempt, "succeeded")
    ended = time.perf_counter()
    assert store.run_counts() == {"succeeded": count}
    return {
        "ours, synced (claim)": count / (claimed_at - started),
        "ours, synced (claim and finish)": count / (ended - started),
    }


def _huey_claims(peers: Path, file: Path, count: int, fsync: bool) -> float:
    if str(peers) not in sys.path:
        sys.path.append(str(peers))
    from huey.storage import SqliteStorage  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    storage = SqliteStorage("bench", filename=str(file), fsync=fsync)
    for number in range(count):
        storage.enqueue(b"x" * 200, priority=number % 3)
    started, taken = time.perf_counter(), 0
    while storage.dequeue() is not None:
        taken += 1
    assert taken == count
    return count / (time.perf_counter() - started)


def main() -> None:
    """The clients of one process: `pages PORT PAGES RUN`, or `PORT AGENTS POLLS RUN...`."""
    if sys.argv[1] == "pages":
        port, pages, run_id = sys.argv[2:]
        asyncio.run(_browse(int(port), int(pages), run_id))
    else:
        port, count, polls, *ids = sys.argv[1:]
        json.dump(asyncio.run(_agents(int(port), int(count), int(polls), ids)), sys.stdout)


if __name__ == "__main__":
    main()
