"""Says of environments of other packages whether each loads, passes env_test, and trains.

    scripts/hubs --check [--only PACKAGE] [--train] [--write]

The sample: ten datasets of reasoning-gym drawn by a seed, five tasks
of Inspect, the five toy text games of gymnasium. With --train, those that load are trained too: one
step of GRPO on the default model. --write puts the rows into docs/hubs.md."""

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from environments.checks import gate
from environments.process import requirements
from flash_mcp.cli import main as cli
from flash_mcp.cli.demo import DemoSession, connected, watch
from flash_mcp.extensions.certificate import signing
from flash_mcp.extensions.certificate.command import NEEDED
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state import references
from tests import docs
from tests.hubs import CALL_TIMEOUT_S, Hub

SEED = 32
TIME_S = 300.0
GAMES = ("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v3")
THREATS = "agent_threat_bench.agent_threat_bench"
INSPECT = (f"{THREATS}_memory_poison", f"{THREATS}_autonomy_hijack", f"{THREATS}_data_exfil", "gsm8k.gsm8k",
           "agent_bench.agent_bench_os")  # fmt: skip
TRAIN: dict[str, Any] = {"steps": 1, "batch_size": 2, "group_size": 2, "max_tokens": 16, "accept_failed_gate": True}


@dataclass
class Checked:
    package: str
    name: str
    loads: str = "no"
    passes: str = "-"
    trains: str = "not tried"
    why: str = ""


def sample() -> list[tuple[Hub, str]]:
    chosen = random.Random(SEED).sample(references.DATASETS, 10)
    names = [f"reasoning-gym:{dataset}" for dataset in sorted(chosen)]
    plan = [(Hub("reasoning-gym", "reasoning-gym", names), name) for name in names]
    for package, chosen in (("inspect", INSPECT), ("gymnasium", GAMES)):
        plan += [(Hub(package, package), name) for name in chosen]
    return plan


async def check_one(hub: Hub, name: str, scratch: Path) -> Checked:
    result = Checked(hub.package, name.removeprefix("reasoning-gym:"))
    folder = hub.folder(name, scratch)
    args = {} if hub.names else {"name": name}
    await requirements.interpreter(folder)
    report = await gate.check(folder, known_as=hub.name, args=args, timeout_s=CALL_TIMEOUT_S, deadline_s=TIME_S)
    first = report.probes[0]
    if first.name == "loads" and not first.passed:
        result.why = first.evidence
        return result
    result.loads, result.passes = "yes", report.verdict
    failed = [f"{probe.name}: {probe.evidence}" for probe in report.probes if probe.passed is False]
    result.why = "; ".join(failed) or ", ".join(report.unfinished)
    return result


async def train_one(session: DemoSession, hub: Hub, result: Checked, scratch: Path) -> None:
    name = f"reasoning-gym:{result.name}" if hub.names else result.name
    args = {} if hub.names else {"name": name}
    folder = hub.folder(name, scratch)
    try:
        pushed = await session.call("env_push", name=hub.name, folder=str(folder), environment_args=args, load=False)
        run = await session.call("train", environment=pushed["environment"], environment_args=args, **TRAIN)
        result.trains = "yes" if (await watch(session, run["run_id"]))["state"] == "succeeded" else "no"
    except FlashError as error:
        result.trains = f"no: {error.what:.80}"


def table(results: list[Checked]) -> str:
    rows: list[tuple[object, ...]] = []
    for result in results:
        why = " ".join(result.why.replace("|", "/").split())[:160]
        rows.append((result.package, result.name, result.loads, result.passes, result.trains, why or "-"))
    return docs.table(("package", "environment", "loads", "env_test", "trains", "why not"), rows)


async def run(only: list[str], scratch: Path, *, train: bool) -> list[Checked]:
    results: list[Checked] = []
    plan = [(hub, name) for hub, name in sample() if not only or {hub.package, name} & set(only)]
    for hub, name in plan:
        result = await check_one(hub, name, scratch)
        sys.stderr.write(f"{result}\n")
        results.append(result)
    if train:
        async with connected(Console(soft_wrap=True)) as session:
            for (hub, _), result in zip(plan, results, strict=True):
                if result.loads == "yes":
                    await train_one(session, hub, result, scratch)
    return results


def certify_one(hub: Hub, name: str, scratch: Path) -> tuple[object, ...]:
    """The row of one environment. Its packages are installed first."""
    folder, page = hub.folder(name, scratch), scratch / "certificate.html"
    page.unlink(missing_ok=True)
    asyncio.run(requirements.interpreter(folder))
    words = ["certify", name if hub.names else str(folder), "--steps", "0", "--to", str(page)]
    if not hub.names:
        words += ["--environment-args", json.dumps({"name": name})]
    cli.main(words)
    facts = signing.read(page.read_bytes()).facts
    rows = facts["questions"].values()
    why = "; ".join(row["because"] for row in rows if row["answer"] == "no").replace("|", "/")
    answers = (row["answer"] for row in rows)
    seconds = round(sum(facts["seconds"].values()))
    return hub.package, name.removeprefix("reasoning-gym:"), *answers, seconds, " ".join(why.split())[:200] or "-"


def certify(only: list[str], scratch: Path) -> str:
    plan = [(hub, name) for hub, name in sample() if not only or {hub.package, name} & set(only)]
    head = ("package", "environment", *NEEDED, "seconds", "why not")
    return docs.table(head, [certify_one(hub, name, scratch) for hub, name in plan])


def main(only: list[str], scratch: Path, *, train: bool) -> str:
    return table(asyncio.run(run(only, scratch, train=train)))
