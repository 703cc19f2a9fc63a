"""`flash-mcp demo`: the whole loop on a small real model, as an agent would play it, through a real
MCP client over stdio. `flash-mcp demo --help` says what it does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import CallToolResult, TextContent
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_mcp.cli import follow
from flash_mcp.cli.output import say, visible
from flash_mcp.judgement import curve
from flash_mcp.protocol.errors import FlashError, first_of
from flash_mcp.protocol.records import ACTIVE, Json
from flash_mcp.state.database import pick
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.truncation import to_text
from flash_mcp.tools.starters import TEMPLATES

NOT_INSTALLED = "[not_ready environment="
INSTALL_S = 600.0
"""The longest time that an environment's packages are waited for."""
AGAIN_S = 15.0
HELD_OUT = ("n", "success", "low", "high")
SIDE = ("tasks", "success", "low", "high")


@dataclass
class DemoSession:
    """Calls tools, shows calls and results, and measures the time."""

    client: Client
    console: Console
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    results: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(tool, text of its result) of every call."""

    @property
    def tools_called(self) -> list[str]:
        return list(dict.fromkeys(tool for tool, _ in self.results))

    async def call(
        self, tool: str, *, quiet: bool = False, waits: bool = False, **arguments: Any
    ) -> Json:
        """The tool's structured result. FlashError with the error's text if it failed. With
        `waits` it takes progress, so that `until` may last an hour.
        """
        if not quiet:
            shown = ", ".join(f"{name}={to_text(value):.70}" for name, value in arguments.items())
            self.console.print(f"\n[bold cyan]{tool}[/]({_escaped(shown)})", highlight=False)
        deadline = time.monotonic() + INSTALL_S
        result, text = await self._once(tool, arguments, waits=waits)
        while result.is_error and NOT_INSTALLED in text and time.monotonic() < deadline:
            await anyio.sleep(AGAIN_S)
            result, text = await self._once(tool, arguments, waits=waits)
        if result.is_error:
            what = f"{tool} failed: {text}"
            raise FlashError("internal", what, fix="fix this error and run the demo again")
        content = cast(Json, result.structured_content)
        if not quiet and "next" in content:
            self.console.print(f"  [dim]next: {_escaped(content['next'])}[/]", highlight=False)
        return content

    async def _once(self, tool: str, arguments: Json, *, waits: bool) -> tuple[CallToolResult, str]:
        listener = _ignored if waits else None
        result = await self.client.call_tool(tool, arguments, progress_callback=listener)
        text = " ".join(block.text for block in result.content if isinstance(block, TextContent))
        self.results.append((tool, text))
        return result, text

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 1)


async def _ignored(progress: float, total: float | None, message: str | None) -> None:
    """Take progress."""


async def run(
    console: Console, folder: Path, arguments: Json, environment: str | None = None
) -> Json:
    """Play the demo with `environment`, or with the one that it writes to `folder`, and with
    `arguments` of `train`; the figures of --json.
    """
    async with connected(console) as session:
        with session.timed("environment"):
            names = [entry["name"] for entry in (await session.call("catalog")).get("models", [])]
            console.print(f"  models: {', '.join(names)}")
            await session.call("env_setup", folder=str(folder), template="calculator")
            if environment is None:
                pushed = await session.call("env_push", folder=str(folder), name="calculator")
                environment = str(pushed["environment"])
            _show_probes(console, await session.call("env_test", environment=environment))
        config = str(folder / "configs" / "rl.toml")
        requested: Json = {"config": config, "environment": environment, **arguments}
        with session.timed("train"):
            view = await _train(session, requested)
        run_id: str = view["run_id"]
        for row in view["held_out"]:
            _show_success(console, f"step {row['step']}", row, row["n"])
        _show_verdict(console, view["verdict"]["outcome"], view["verdict"]["explanation"])
        await _show_rollout(session, run_id)
        saved = (await session.call("checkpoints", run_id=run_id))["checkpoints"]
        newest = f"the newest at step {saved[0]['step']} in {saved[0]['path']}"
        console.print(f"  {len(saved)} checkpoints, {newest}")
        console.print()
        say(curve.terminal(open_store().curve(run_id)))  # rich would wrap it
        with session.timed("deploy"):
            deployment = await _deploy(session, run_id, arguments)
        with session.timed("chat"):
            talk = await _chat(session, run_id, deployment)
        await session.call("undeploy", deployment=deployment)
        with session.timed("cancel"):  # a second run, which ends as cancelled from any state
            another = (await session.call("train", **requested, seed=1))["run_id"]
            state = (await session.call("cancel", run_id=another))["state"]
            while state in ACTIVE:
                seen = await session.call("status", quiet=True, run_id=another, wait_s=20)
                state = seen["run"]["state"]
            console.print(f"  {another}: {state}", highlight=False)
        held_out: list[Json] = view["held_out"]
        return {
            "run_id": view["run_id"],
            "steps": view["step"],
            "reward_first": view["reward"]["first"],
            "reward_last": view["reward"]["last"],
            "heldout_base": pick(held_out[0], *HELD_OUT),
            "heldout_trained": pick(held_out[-1], *HELD_OUT),
            "verdict": view["verdict"]["outcome"],
            "tools_called": session.tools_called,
            "seconds": session.seconds,
            "chat": {"base": talk["base"]["text"], "adapter": talk["adapter"]["text"]},
        }


async def _train(session: DemoSession, requested: Json) -> Json:
    estimate = (await session.call("train", **requested, validate_only=True))["estimate"]
    of = "rollouts" if "rollouts" in estimate else "examples"
    session.console.print(f"  {estimate['steps']} steps, {estimate[of]} {of}")
    run_id = (await session.call("train", **requested))["run_id"]
    return await watch(session, run_id)


async def run_agent(console: Console, arguments: Json) -> Json:
    """Train the agent of the example agent_calculator with `arguments` of `train`: a warm-up on
    gold calls, then GRPO; the figures of --json.
    """
    folder = TEMPLATES / "agent_calculator"
    async with connected(console) as session:
        with session.timed("environment"):
            pushed = await session.call("env_push", folder=str(folder), name="agent_calculator")
            checked = await session.call("env_test", environment=pushed["environment"])
            _show_probes(console, checked)
        requested: Json = {"environment": pushed["environment"], **arguments}
        with session.timed("sft"):
            config = str(folder / "configs" / "sft.toml")
            warmed = await _train(session, {**requested, "config": config})
        begun = f"{warmed['run_id']}@{warmed['step']}"
        with session.timed("grpo"):
            config = str(folder / "configs" / "rl.toml")
            continued = {**requested, "config": config, "init_from_adapter": begun}
            view = await _train(session, continued)
        run_id: str = view["run_id"]
        base = f"{warmed['run_id']}@0"
        verdict = await session.call("compare", base=base, other=run_id)
        for side in (verdict["base"], verdict["other"]):
            _show_success(console, _escaped(side["of"]), side, side["tasks"])
        _show_verdict(console, verdict["verdict"], verdict["success"]["explanation"])
        await _show_rollout(session, run_id)
        console.print()
        say(curve.terminal(open_store().curve(run_id)))  # rich would wrap it
        return {
            "run_id": run_id,
            "warm_up": begun,
            "heldout_base": pick(verdict["base"], *SIDE),
            "heldout_warm": pick(warmed["held_out"][-1], *HELD_OUT),
            "heldout_trained": pick(verdict["other"], *SIDE),
            "verdict": verdict["verdict"],
            "tools_called": session.tools_called,
            "seconds": session.seconds,
        }


def _show_success(console: Console, of: str, row: Json, tasks: int) -> None:
    interval = f"95 % interval {row['low']:.3f} to {row['high']:.3f}"
    console.print(f"  held out, {of}: {row['success']:.3f} of {tasks} tasks ({interval})")


@asynccontextmanager
async def connected(console: Console) -> AsyncGenerator[DemoSession]:
    """A session with a server of its own, a child process, over stdin and stdout."""
    command = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "flash_mcp.cli", "serve"], env=dict(os.environ)
    )
    with tempfile.TemporaryFile("w+") as log:
        async with Client(stdio_client(command, errlog=cast(TextIO, log))) as client:
            yield DemoSession(client, console)


async def watch(session: DemoSession, run_id: str) -> Json:
    bar = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn())
    session.console.print(
        f"\n[bold cyan]status[/](run_id={run_id!r}, wait_s=20), until it ends", highlight=False
    )
    with Progress(*bar, TimeElapsedColumn(), console=session.console) as progress:
        task = progress.add_task("queued", total=None)
        while True:
            view = (await session.call("status", quiet=True, run_id=run_id, wait_s=20))["run"]
            text = view.get("phase") or view["state"]
            if reward := view.get("reward"):
                text += f", reward {reward['last']:.2f} {reward['spark']}"
            progress.update(task, description=text, completed=view["step"], total=view.get("steps"))
            if view["state"] not in ACTIVE:
                break
    if view["state"] != "succeeded":
        error: Json = view.get("error") or {}
        what = f"the run {view['state']}: {error.get('what')}"
        raise FlashError("worker_failed", what, fix=error.get("fix") or "")
    return view


def _show_probes(console: Console, checked: Json) -> None:
    marks = {None: "[green]passed[/]", "failed": "[red]failed[/]", "open": "[dim]left out[/]"}
    for probe in checked["probes"]:
        text = f"{marks[probe.get('result')]} {probe['name']}: {_escaped(probe['evidence'])}"
        console.print(f"  {text}", highlight=False)


def _show_verdict(console: Console, outcome: str, explanation: str) -> None:
    console.print(f"  [bold]{outcome}[/]: {_escaped(explanation)}", highlight=False)


async def _show_rollout(session: DemoSession, run_id: str) -> None:
    requested: Json = {"run_id": run_id, "which": "best", "limit": 1, "max_characters": 2000}
    for rollout in (await session.call("rollouts", **requested))["rollouts"]:
        for message in rollout["messages"][-4:]:
            _show_said(session.console, message["role"], message["content"])
        session.console.print(f"  reward {rollout['reward']}, success {rollout['success']}")


def _show_said(console: Console, who: str, text: str) -> None:
    console.print(f"  {who:>9}  {visible(text)}", markup=False, highlight=False)


async def _deploy(session: DemoSession, run_id: str, arguments: Json) -> str:
    requested: Json = {"run_id": run_id}
    if "target" in arguments:
        requested["target"] = arguments["target"]
    deployed = await session.call("deploy", **requested)
    while deployed["state"] == "starting":
        deployed = await session.call("deploy", quiet=True, **requested)
    where = f"{deployed['state']} at {deployed['base_url']}"
    session.console.print(f"  {where} after {deployed['seconds']:.0f} s")
    return deployed["deployment"]


async def _chat(session: DemoSession, run_id: str, deployment: str) -> Json:
    requested: Json = {"run_id": run_id, "split": "eval", "which": "index", "limit": 2}
    shown = await session.call("rollouts", quiet=True, **requested)
    question: list[Json] = [*(shown.get("opening") or []), shown["rollouts"][0]["messages"][0]]
    messages = [{"role": message["role"], "content": message["content"]} for message in question]
    talk = await session.call(
        "chat", deployment=deployment, messages=messages, side_by_side=True, max_tokens=48
    )
    _show_said(session.console, "user", question[-1]["content"])
    for who in ("base", "adapter"):
        _show_said(session.console, who, talk[who]["text"])
    return talk


def _escaped(text: str) -> str:
    return escape(visible(text))


def play(
    figures_path: Path | None, arguments: Json, environment: str | None, *, agent: bool = False
) -> int:
    if figures_path and not figures_path.absolute().parent.is_dir():  # missed after minutes
        fix = "make that folder, or name a file in another one"
        raise FlashError("invalid_argument", "there is no such folder", file=figures_path, fix=fix)
    console = Console(soft_wrap=True)
    started = time.monotonic()
    if agent:
        figures = outcome(console, run_agent, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="flash-demo-") as folder:
            target = Path(folder) / "calculator"
            figures = outcome(console, run, target, arguments, environment)
    if figures is None:
        return 1
    seconds = round(time.monotonic() - started, 1)
    figures["seconds"]["all"] = seconds
    if figures_path:
        figures_path.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"\n{seconds:.0f} s in all. Show it again: flash-mcp status {figures['run_id']}")
    return 0


def outcome(console: Console, act: Callable[..., Awaitable[Json]], *arguments: Any) -> Json | None:
    """The result of `act(console, *arguments)`; None after a FlashError, which is shown."""
    try:
        return follow.run(act, console, *arguments)
    except FlashError as error:
        exception: BaseException = error
    except BaseExceptionGroup as group:
        matching, _ = group.split(FlashError)
        if matching is None:
            raise
        exception = first_of(matching)
    console.print(visible(str(exception)), style="red", markup=False, highlight=False)
    return None
