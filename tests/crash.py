"""Crash tests with real signals; bench/faults.md holds their table.

    python -m tests.crash [--runs N] [--seed S] [--real N] [--at-once N] [--json FILE]

Each run is one agent with a state directory of its own: a real MCP client drives a real server over
stdio, which starts the supervisor, which starts the worker, which starts the environment's process;
`serving` and `engine` runs deploy the adapter and chat with it too. Meanwhile processes are killed
(SIGKILL) or stopped and continued (SIGSTOP, SIGCONT) at random moments. Nothing is shortened:
time-outs are the product's. The quick runs train in worker.train's place a loop whose state is a
chain of hashes (tests/stand_ins); `--real N` of them train the tiny model with the real one.

A `zombie` run stops a worker, hides it from the launcher as a machine would that lost its network,
and wakes it after its successor has ended the run."""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from mcp import Client, StdioServerParameters
from rich.console import Console
from rich.table import Table

from flash_mcp.protocol.errors import CODES
from flash_mcp.protocol.paths import scratch_prefix
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state.store import Store
from tests.places import VOWELS
from tests.stand_ins.worker.train import state_after

ROOT = Path(__file__).parents[1]
STAND_INS = Path(__file__).with_name("stand_ins")
KINDS = ("server", "supervisor", "worker", "host", "zombie", "serving", "engine")
STEPS = {"quick": 12, "real": 4}
SPAN_S = {"quick": 5.0, "real": 30.0}
"""Moments are drawn from the first so many seconds after `train` was called, or `deploy` where that is the target."""
DEADLINE_S = {"quick": 800.0, "real": 420.0}
CALL_TIMEOUT_S = 60.0
MAX_ATTEMPTS = 10
REAL_AT_ONCE = 2


@dataclass
class Fault:
    """One signal: at which moment, to whom, and whether there was such a process before the run ended."""

    kind: str
    signal: str
    at_s: float
    stopped_s: float = 0.0
    struck: bool = False


@dataclass
class Outcome:
    number: int
    kind: str
    flavour: str
    faults: list[Fault]
    attempts: int = 0
    seconds: float = 0.0
    restarts: int = 0  # how often the client found its server gone and started another
    told: list[str] = field(default_factory=list[str])  # codes of the errors that the agent was shown
    defects: list[str] = field(default_factory=list[str])


def processes(base: Path, run_id: str = "") -> dict[str, list[psutil.Process]]:
    """Every process that belongs to the state directory, by kind. A serving process's children are its engine."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = " ".join(process.cmdline())
            if (
                str(base) in words
                or f"FLASH_HOME={base}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            ):
                found.setdefault(_kind(words), []).append(process)
    return found


def _kind(words: str) -> str:
    names = {"environments.process": "host", "worker.main": "worker",
             "worker.engine.serve": "serving", "api_server": "serving", "flash_mcp.supervisor": "supervisor",
             "flash_mcp.cli": "server", "resource_tracker": "helper"}  # fmt: skip
    return next((kind for name, kind in names.items() if name in words), "engine")


class Chaos(threading.Thread):
    """Strikes the processes of one state directory as planned."""

    def __init__(self, base: Path, faults: list[Fault]) -> None:
        super().__init__(daemon=True)
        self.base, self.faults = base, faults
        self.began, self.over = threading.Event(), threading.Event()
        self.sleeping: list[psutil.Process] = []
        """Zombies, which are woken when all is over."""

    def run(self) -> None:
        self.began.wait()
        start = time.monotonic()
        for fault in sorted(self.faults, key=lambda fault: fault.at_s):
            self.over.wait(max(0.0, start + fault.at_s - time.monotonic()))
            while not fault.struck and not self.over.is_set():
                victims = processes(self.base).get("worker" if fault.kind == "zombie" else fault.kind, [])
                if victims:
                    self.strike(fault, victims[0])
                else:
                    time.sleep(0.02)

    def strike(self, fault: Fault, victim: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            if fault.kind == "zombie":
                return self.hide(fault, victim)
            if fault.signal == "KILL":
                victim.kill()
            else:
                victim.suspend()
                time.sleep(fault.stopped_s)
                victim.resume()
            fault.struck = True
        return None

    def hide(self, fault: Fault, victim: psutil.Process) -> None:
        """Stop a worker, and have the launcher forget it."""
        # KEY.PID is there for an instant while KEY is made
        keys = [path for path in (self.base / "attempts").iterdir() if not path.suffix]
        records = [path for path in keys if f" {victim.pid} " in path.read_text()]
        if not records or not list((self.base / "runs").glob("*/beat.json")):
            return
        victim.suspend()
        records[0].unlink()
        for supervisor in processes(self.base).get("supervisor", []):
            supervisor.kill()  # it would know its own child
        self.sleeping.append(victim)
        fault.struck = True


class Agent:
    """An MCP client that starts its server anew when that is gone, and then calls again."""

    def __init__(self, environment: dict[str, str], outcome: Outcome) -> None:
        command = [sys.executable, "-m", "flash_mcp.cli", "serve"]
        self._server = StdioServerParameters(command=command[0], args=command[1:], env=environment, cwd=ROOT)
        self._outcome, self._client, self._stack = outcome, None, AsyncExitStack()

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured content, or {"error": code}."""
        deadline = time.monotonic() + DEADLINE_S[self._outcome.flavour]
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    client = self._client or await self._connect()
                    result = await client.call_tool(tool, arguments)
            except Exception:  # the server is gone, at whatever point
                await self.close()
                self._outcome.restarts += 1
                continue
            if not result.is_error:
                return result.structured_content
            text = result.content[0].text
            code = text.removeprefix("[").partition("]")[0].partition(" ")[0]
            self._outcome.told.append(code)
            if code not in CODES or code in ("internal", "unknown_argument"):
                self._outcome.defects.append(f"{tool}: {text[:300]}")
            return {"error": code, "text": text}
        raise TimeoutError(f"{tool} was not answered")

    async def _connect(self) -> Client:
        self._client = await self._stack.enter_async_context(Client(self._server))
        return self._client

    async def close(self) -> None:
        stack, self._client, self._stack = self._stack, None, AsyncExitStack()
        with suppress(Exception):
            await stack.aclose()


def plan(number: int, seed: int, kind: str, flavour: str) -> list[Fault]:
    """One to three faults of the kind, and in half of the runs one of another kind too."""
    chance = random.Random(f"{seed}-{number}-{kind}-{flavour}")
    span = SPAN_S[flavour]
    kinds = [kind] if kind == "zombie" else [kind] * chance.randint(1, 3 if flavour == "quick" else 2)
    if chance.random() < 0.5 and kind != "zombie":
        kinds.append(chance.choice(["server", "supervisor", "worker" if kind not in ("serving", "engine") else kind]))
    return [
        Fault(each, chance.choice(["KILL", "STOP"]) if each != "zombie" else "STOP", round(chance.uniform(0, span), 3),
              round(chance.uniform(0.1, 3.0), 3))
        for each in kinds
    ]  # fmt: skip


def crash_run(number: int, seed: int, kind: str, flavour: str = "quick", model: Path | None = None) -> Outcome:
    """One run with its faults; what was wrong afterwards stands in `defects`."""
    outcome = Outcome(number, kind, flavour, plan(number, seed, kind, flavour))
    base = Path(tempfile.mkdtemp(prefix="flash-crash-"))
    if flavour != "real":  # a stand-in has no packages to import beforehand
        (base / "settings.toml").write_text("[workers]\nkeep_warm = false\n")
    chaos = Chaos(base, outcome.faults)
    chaos.start()
    started = time.monotonic()
    try:
        asyncio.run(asyncio.wait_for(_live(base, chaos, outcome, model), DEADLINE_S[flavour]))
    except Exception as error:
        outcome.defects.append(f"{type(error).__name__}: {error}")
    finally:
        chaos.over.set()
        chaos.join(10)
        outcome.seconds = round(time.monotonic() - started, 1)
        _end(base)
    if outcome.defects:
        outcome.defects.append(f"left in {base}")
    else:
        shutil.rmtree(base)
    return outcome


async def _live(base: Path, chaos: Chaos, outcome: Outcome, model: Path | None) -> None:
    flavour, serves = outcome.flavour, outcome.kind in ("serving", "engine")
    path = str(ROOT) if flavour == "real" else f"{STAND_INS}{os.pathsep}{ROOT}"
    quietly = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    agent = Agent({**os.environ, **quietly, "FLASH_HOME": str(base), "PYTHONPATH": path}, outcome)
    if not serves:
        chaos.began.set()
    try:
        await _until_fine(agent, "env_push", name="vowels", folder=str(VOWELS))
        fields: dict[str, Any] = {"environment": "vowels", "steps": 3 if serves else STEPS[flavour],
                                  "max_attempts": MAX_ATTEMPTS, "save_every": 1,
                                  "keep_checkpoints": 100}  # fmt: skip
        if model:
            fields |= {"model": str(model), "batch_size": 4, "group_size": 4, "max_tokens": 16, "max_length": 256,
                       "lora_rank": 8, "lora_alpha": 16}  # fmt: skip
        run_id = (await _until_fine(agent, "train", **fields, idempotency_key="once"))["run_id"]
        while (view := (await agent.call("status", run_id=run_id, wait_s=5)).get("run", {})).get("state") not in (
            "succeeded", "failed", "cancelled",
        ):  # fmt: skip
            pass
        if view["state"] != "succeeded":
            outcome.defects.append(f"ended as {view['state']}: {view.get('error')}")
        if serves:
            chaos.began.set()
            await _serve(agent, chaos, run_id)
        store = Store(base)
        run = store.run(run_id)
        outcome.attempts = run.attempt
        before = _everything(store, run)
        check(store, run, fields["steps"], outcome)
        for zombie in chaos.sleeping:
            zombie.resume()
            with suppress(psutil.NoSuchProcess):
                await asyncio.to_thread(zombie.wait, 60)
        await agent.call("status", run_id=run_id)
        after = _everything(store, store.run(run_id)) if chaos.sleeping else before
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        outcome.defects += [f"a zombie changed {name}" for name in changed]
    finally:
        chaos.over.set()
        await asyncio.to_thread(chaos.join, 10)
        await agent.close()
    left = await _orphans(base)
    outcome.defects += [f"orphan: {words}" for words in left]


async def _until_fine(agent: Agent, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call until it is not refused: an environment that was killed while the server looked at it, for instance."""
    while True:
        answer = await agent.call(tool, **arguments)
        if "error" not in answer:
            return answer
        await asyncio.sleep(0.2)


async def _serve(agent: Agent, chaos: Chaos, run_id: str) -> None:
    """Deploy and chat, again where the server was lost, until all faults are over and an answer came."""
    while True:
        settled = not chaos.is_alive()
        deployed = await agent.call("deploy", run_id=run_id)
        answer = deployed if "error" in deployed else await agent.call("chat", message="hello")
        if settled and "error" not in answer:
            break
        await asyncio.sleep(0.2)
    assert answer["adapter"]["text"] or answer["adapter"]["finish"] == "stop", answer  # the tiny model may say nothing
    await _until_fine(agent, "undeploy", deployment=deployed["deployment"])


def check(store: Store, run: Run, steps: int, outcome: Outcome) -> None:
    """What has to be true of a store with one run, whatever happened to it."""
    if len(store.runs()) != 1:
        outcome.defects.append(f"{len(store.runs())} runs instead of 1")
    outcome.defects += defects_of(store, run, steps, is_quick=outcome.flavour == "quick")
    integrity = store.query("PRAGMA integrity_check")
    if integrity != [{"integrity_check": "ok"}]:
        outcome.defects.append(f"integrity: {integrity}")


def defects_of(store: Store, run: Run, steps: int, *, is_quick: bool) -> list[str]:
    """What is wrong with a run that must have succeeded after so many steps, each saved. The state of a quick one is
    the chain of hashes."""
    defects: list[str] = []

    def expect(what: str, found: object, wanted: object) -> None:
        if found != wanted:
            defects.append(f"{what}: {found!r} instead of {wanted!r}")

    folder, every = RunFolder(run.folder), list(range(1, steps + 1))
    expect("state and step", (run.state, run.step), ("succeeded", steps))
    expect("result", (folder.result() or {}).get("state"), "succeeded")
    expect("steps with metrics", [row.step for row in store.metrics(run.id)], every)
    expect("files of metrics", list(folder.metric_steps()), every)
    expect("steps with rollouts", store.rollout_steps(run.id), every)
    for step in every:
        rows = store.rollouts(run.id, step=step, order="index", limit=999)
        expect(f"rollouts of step {step}", [row.index for row in rows], list(range(len(rows))))
    expect("steps with checkpoints", [row.step for row in store.checkpoints(run.id)], every)
    with tempfile.TemporaryDirectory() as scratch, folder.listed():
        for step in folder.checkpoints.steps():
            saved = folder.checkpoints.fetch(step, Path(scratch, str(step)))
            if is_quick:
                expect(f"state after step {step}", (saved / "state").read_text(), state_after(step))
    expect("scratch folders", list(Path(tempfile.gettempdir()).glob(f"{scratch_prefix(run.folder)}*")), [])
    return defects


def seen_in(folder: RunFolder) -> list[object]:
    """What a reader sees of a run folder that no attempt may change any more."""
    with folder.listed():
        steps = [folder.metrics(step) for step in folder.metric_steps()]
        saved = [folder.checkpoints.manifest(step) for step in folder.checkpoints.steps()]
        return [*steps, *saved, folder.result()]


def _everything(store: Store, run: Run) -> dict[str, Any]:
    """All that the run left behind, but for what its attempts printed, and hidden files: those are being written."""
    kept = {
        table: store.query(f"SELECT * FROM {table} WHERE run_id = ?", [run.id])
        for table in ("metrics", "rollouts", "evals", "events", "checkpoints")
    }
    for path in Path(run.folder).rglob("*"):
        name = path.relative_to(run.folder)
        if path.is_file() and not any(part.startswith((".", "log.")) for part in name.parts):
            kept[str(name)] = path.read_bytes()
    return {"run": run, **kept}


async def _orphans(base: Path) -> list[str]:
    """What runs on although no run, no deployment and no client is left; the supervisor may, until it is told."""
    deadline = time.monotonic() + 60
    while True:
        left = processes(base)
        for supervisor in left.get("supervisor", []):
            with suppress(psutil.Error):
                supervisor.terminate()
        if not left or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return [f"{kind} {' '.join(process.cmdline())}" for kind, found in left.items() for process in found]


def _end(base: Path) -> None:
    for found in processes(base).values():
        for process in found:
            with suppress(psutil.Error):
                process.kill()


def crash_runs(runs: int, seed: int, *, real: int = 0, at_once: int = 4, first: int = 0) -> list[Outcome]:
    """`runs` runs, the kinds in turn; the `real` last ones with the real worker."""
    quick = range(first, first + runs - real)
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(lambda number: crash_run(number, seed, KINDS[number % len(KINDS)]), quick))
    if real:
        numbers = range(quick.stop, quick.stop + real)
        with _tiny_model() as model, ThreadPoolExecutor(REAL_AT_ONCE) as pool:
            outcomes += pool.map(
                lambda number: crash_run(number, seed, KINDS[-number % len(KINDS)], "real", model), numbers
            )
    return outcomes


@contextmanager
def _tiny_model() -> Generator[Path]:
    from tests.tiny import make_tiny_model  # noqa: PLC0415  torch, which the quick runs do not need

    with tempfile.TemporaryDirectory() as folder:
        yield make_tiny_model(Path(folder, "tiny"))


def table(outcomes: list[Outcome]) -> Table:
    """Runs by what was struck."""
    shown = Table("struck", "worker", "runs", "SIGKILL", "SIGSTOP", "attempts", "server restarts", "defects")
    for flavour in ("quick", "real"):
        for kind in KINDS:
            these = [outcome for outcome in outcomes if (outcome.kind, outcome.flavour) == (kind, flavour)]
            if not these:
                continue
            struck = Counter(fault.signal for outcome in these for fault in outcome.faults if fault.struck)
            shown.add_row(kind, flavour, str(len(these)), str(struck["KILL"]), str(struck["STOP"]),
                          str(sum(outcome.attempts for outcome in these)),
                          str(sum(outcome.restarts for outcome in these)),
                          str(sum(bool(outcome.defects) for outcome in these)))  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, metavar="N", help="runs in all (default 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides what is struck and when (default 0)")
    parser.add_argument("--real", type=int, default=0, metavar="N", help="runs among them with the real worker")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first: to go on after a piece")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="runs at the same time (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to FILE")
    given = parser.parse_args()
    outcomes = crash_runs(given.runs, given.seed, real=given.real, at_once=given.at_once, first=given.first)
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(outcomes))
    failed = [outcome for outcome in outcomes if outcome.defects]
    for outcome in failed:
        console.print(f"run {outcome.number} ({outcome.kind}): {outcome.defects}", markup=False)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
