"""The whole loop on a small real model: what an agent would do, through a real MCP client over
stdio.

    flash-mcp demo [--json FILE] [--curve FILE.png]

Scaffolds the calculator environment, publishes and checks it, trains, watches, reads rollouts,
compares base and trained model on held-out tasks, deploys the adapter and talks to it. State is
kept in FLASH_HOME, so that every flash-mcp command shows the run afterwards."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import BlobResourceContents, TextContent
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from flash_mcp.cli import follow
from flash_mcp.cli.output import visible
from flash_mcp.judgement import curve
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import ACTIVE
from flash_mcp.state.store import open_store

Json = dict[str, Any]
MOST_LINES = 12


class Session:
    """Calls tools, shows what is called and what comes back, and keeps the time."""

    def __init__(self, client: Client, console: Console) -> None:
        self.client, self.console = client, console
        self.tools_called: list[str] = []
        self.seconds: dict[str, float] = {}

    async def call(self, tool: str, *, quiet: bool = False, **arguments: Any) -> Json:
        """The tool's structured result; FlashError with its text where it failed."""
        if tool not in self.tools_called:
            self.tools_called.append(tool)
        if not quiet:
            shown = ", ".join(f"{name}={_brief(value)}" for name, value in arguments.items())
            self.console.print(f"\n[bold cyan]{tool}[/]({_escaped(shown)})", highlight=False)
        result = await self.client.call_tool(tool, arguments)
        if result.is_error:
            text = " ".join(
                block.text for block in result.content if isinstance(block, TextContent)
            )
            raise FlashError(
                "internal",
                f"{tool} failed: {text}",
                fix="mend what it names and run the demo again",
            )
        content = cast(Json, result.structured_content)
        if not quiet and "next" in content:
            self.console.print(f"  [dim]next: {_escaped(content['next'])}[/]", highlight=False)
        return content

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 1)


async def run(
    console: Console,
    folder: Path,
    curve_path: Path,
    model: str | None = None,
    environment: str | None = None,
) -> Json:
    """Play the demo with `environment`, or with the one that it writes to `folder`; the figures of
    --json.
    """
    started = time.monotonic()
    async with connected(console) as session:
        call = session.call
        with session.timed("environment"):
            known = await call("catalog")
            console.print(
                f"  models: {', '.join(entry['name'] for entry in known.get('models', []))}"
            )
            await call("env_setup", folder=str(folder), template="calculator")
            if environment is None:
                environment = (await call("env_push", folder=str(folder), name="calculator"))[
                    "environment"
                ]
            checked = await call("env_test", environment=environment)
            _show_probes(console, checked)
        wanted: Json = {"config": str(folder / "configs" / "rl.toml"), "environment": environment}
        if model:
            wanted["model"] = model
        with session.timed("train"):
            estimate = (await call("train", **wanted, validate_only=True))["estimate"]
            console.print(f"  {estimate['steps']} steps, {estimate['rollouts']} rollouts")
            run_id = (await call("train", **wanted))["run_id"]
            view = await watch(session, run_id)
        _show_verdict(console, view)
        await _show_rollout(session, run_id)
        saved = (await call("checkpoints", run_id=run_id))["checkpoints"]
        console.print(
            f"  {len(saved)} checkpoints, the newest at step {saved[0]['step']} in {saved[0]['path']}"
        )
        await _draw(session, run_id, curve_path)
        with session.timed("deploy"):
            deployment = await _deploy(session, run_id)
        with session.timed("chat"):
            talk = await _chat(session, run_id, deployment)
        await call("undeploy", deployment=deployment)
        with session.timed("cancel"):
            await _cancel_another(session, wanted)
        held_out: list[Json] = view["held_out"]
        session.seconds["all"] = round(time.monotonic() - started, 1)
        return {
            "run_id": run_id,
            "steps": view["step"],
            "reward_first": view["reward"]["first"],
            "reward_last": view["reward"]["last"],
            "heldout_base": {key: held_out[0][key] for key in ("n", "success", "band")},
            "heldout_trained": {key: held_out[-1][key] for key in ("n", "success", "band")},
            "verdict": view["verdict"]["outcome"],
            "tools_called": session.tools_called,
            "seconds": session.seconds,
            "chat": {"base": talk["base"]["text"], "adapter": talk["adapter"]["text"]},
        }


@asynccontextmanager
async def connected(console: Console) -> AsyncGenerator[Session]:
    """A server of our own as a child, spoken to over its stdin and stdout."""
    command = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "flash_mcp.cli", "serve"], env=dict(os.environ)
    )
    with tempfile.TemporaryFile("w+") as log:
        async with Client(stdio_client(command, errlog=cast(TextIO, log))) as client:
            yield Session(client, console)


async def watch(session: Session, run_id: str) -> Json:
    """Follow the run to its end with a progress bar."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    session.console.print(
        f"\n[bold cyan]status[/](run_id={run_id!r}, wait_s=20), until it ends", highlight=False
    )
    with Progress(*columns, console=session.console) as progress:
        task = progress.add_task("queued", total=None)
        while True:
            view = (await session.call("status", quiet=True, run_id=run_id, wait_s=20))["run"]
            _show_progress(progress, task, view)
            if view["state"] not in ACTIVE:
                break
    if view["state"] != "succeeded":
        error: Json = view.get("error") or {}
        raise FlashError(
            "worker_failed",
            f"the run {view['state']}: {error.get('what')}",
            fix=error.get("fix") or "",
        )
    return view


def _show_progress(progress: Progress, task: TaskID, view: Json) -> None:
    phase = view.get("phase") or view["state"]
    reward = (
        f", reward {view['reward']['last']:.2f} {view['reward']['spark']}"
        if view.get("reward")
        else ""
    )
    progress.update(
        task, description=f"{phase}{reward}", completed=view["step"], total=view.get("steps")
    )


def _show_probes(console: Console, checked: Json) -> None:
    for probe in checked["probes"]:
        mark = {True: "[green]passed[/]", False: "[red]failed[/]"}.get(
            probe.get("passed"), "[dim]left out[/]"
        )
        console.print(f"  {mark} {probe['name']}: {_escaped(probe['evidence'])}", highlight=False)


def _show_verdict(console: Console, view: Json) -> None:
    for row in view["held_out"]:
        console.print(
            f"  held out, step {row['step']}: {row['success']:.3f} ± {row['band']:.3f} of {row['n']} tasks"
        )
    console.print(
        f"  [bold]{view['verdict']['outcome']}[/]: {_escaped(view['verdict']['explanation'])}",
        highlight=False,
    )


async def _show_rollout(session: Session, run_id: str) -> None:
    found = await session.call(
        "rollouts", run_id=run_id, which="best", limit=1, max_characters=2000
    )
    for rollout in found["rollouts"]:
        for message in rollout["messages"][-4:]:
            session.console.print(
                f"  {message['role']:>9}  {visible(message['content'])}",
                markup=False,
                highlight=False,
            )
        session.console.print(f"  reward {rollout['reward']}, success {rollout['success']}")


async def _draw(session: Session, run_id: str, path: Path) -> None:
    picture = await session.client.read_resource(f"flash://runs/{run_id}/curve.png")
    blob = next(
        content for content in picture.contents if isinstance(content, BlobResourceContents)
    )
    await anyio.Path(path).write_bytes(base64.b64decode(blob.blob))
    session.console.print()
    print(visible(curve.terminal(open_store().curve(run_id))))  # noqa: T201  rich would wrap it
    session.console.print(f"  the same as a picture: {path}", highlight=False)


async def _deploy(session: Session, run_id: str) -> str:
    deployed = await session.call("deploy", run_id=run_id)
    while deployed["state"] == "starting":
        deployed = await session.call("deploy", quiet=True, run_id=run_id)
    session.console.print(
        f"  {deployed['state']} at {deployed['base_url']} after {deployed['seconds']:.0f} s"
    )
    return deployed["deployment"]


async def _chat(session: Session, run_id: str, deployment: str) -> Json:
    """Ask base and adapter a held-out question as the environment asks it."""
    shown = await session.call(
        "rollouts", quiet=True, run_id=run_id, split="eval", which="index", limit=2
    )
    question: list[Json] = [*(shown.get("opening") or []), shown["rollouts"][0]["messages"][0]]
    messages = [{"role": message["role"], "content": message["content"]} for message in question]
    talk = await session.call(
        "chat", deployment=deployment, messages=messages, side_by_side=True, max_tokens=48
    )
    said = {
        "user": question[-1]["content"],
        "base": talk["base"]["text"],
        "adapter": talk["adapter"]["text"],
    }
    for who, text in said.items():
        session.console.print(f"  {who:>9}  {visible(text)}", markup=False, highlight=False)
    return talk


async def _cancel_another(session: Session, wanted: Json) -> None:
    """Start a second run and end it: a cancelled run ends as cancelled, whatever it was doing."""
    run_id = (await session.call("train", **wanted, seed=1))["run_id"]
    state = (await session.call("cancel", run_id=run_id))["state"]
    while state in ACTIVE:
        state = (await session.call("status", quiet=True, run_id=run_id, wait_s=20))["run"]["state"]
    session.console.print(f"  {run_id}: {state}", highlight=False)


def _escaped(text: str) -> str:
    return escape(visible(text))


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 70 else f"{text[:69]}…"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="flash-mcp demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--curve", type=Path, metavar="FILE", default=Path("reward-curve.png"), help="the picture"
    )
    parser.add_argument("--model", help="base model (default: the config's)")
    parser.add_argument(
        "--environment", help="NAME, NAME@DIGEST or reasoning-gym:DATASET (default: the calculator)"
    )
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="flash-demo-") as folder:
        target = Path(folder) / "calculator"
        figures = told(console, run, target, options.curve, options.model, options.environment)
    if figures is None:
        return 1
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(
        f"\n{figures['seconds']['all']:.0f} s in all.  flash-mcp status {figures['run_id']}  shows it again."
    )
    return 0


def told(console: Console, act: Callable[..., Awaitable[Json]], *arguments: Any) -> Json | None:
    """What `act(console, *arguments)` returns; None once a FlashError of it was shown."""
    try:
        return follow.run(act, console, *arguments)
    except FlashError as error:
        console.print(visible(str(error)), style="red", markup=False, highlight=False)
    except BaseExceptionGroup as group:
        known, _ = group.split(FlashError)
        if known is None:
            raise
        console.print(visible(str(_first(known))), style="red", markup=False, highlight=False)
    return None


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    inner = group.exceptions[0]
    return (
        _first(cast("BaseExceptionGroup[Any]", inner))
        if isinstance(inner, BaseExceptionGroup)
        else inner
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
