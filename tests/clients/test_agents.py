"""Claude Code, Codex, OpenCode and Gemini CLI, as they come from npm, each led through the loop by a scripted model.

What is asserted is what the model was shown: that is all that an agent knows of a server."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.state.store import open_store
from flash_mcp.supervisor.process import LockOwner
from flash_mcp.tools.shared.truncation import RESULT_CHARACTERS
from tests.clients.helpers import PROGRAMS, ROOT, SERVE, each, inspect, needs, node_path, run, server_environment
from tests.clients.scripted_model import Json, Model, Step, serving
from tests.places import VOWELS
from tests.supervisor.test_model_servers import stop_all

LOOP_TIMEOUT_S = 280
MAX_CALLS = 40
QUICK = {"steps": 2, "batch_size": 2, "group_size": 2, "max_tokens": 8, "max_length": 256, "lora_rank": 8,
         "lora_alpha": 16, "save_every": 1, "learning_rate": 0.01}  # fmt: skip

pytestmark = pytest.mark.timeout(300)


def run_id_in(results: Sequence[str]) -> str:
    return next(found[0] for text in results if (found := re.search(r"run-[0-9a-z]{8}", text)))


def loop(model: Path) -> list[Step]:
    """Push, a mistake, train, status until it has ended, rollouts, deploy until it is ready, chat, undeploy."""
    given: Json = {"environment": "vowels", "model": str(model), **QUICK}

    def always(arguments: Json) -> Callable[[Sequence[str]], Json]:
        return lambda results: arguments

    def of_run(**arguments: Any) -> Callable[[Sequence[str]], Json]:
        return lambda results: {"run_id": run_id_in(results), **arguments}

    return [
        Step("env_push", always({"name": "vowels", "folder": str(VOWELS)})),
        Step("train", always({**given, "step": 3})), Step("train", always({**given, "idempotency_key": "loop"})),
        Step("status", of_run(wait_s=20), until='"state":"succeeded"'), Step("rollouts", of_run(limit=1)),
        Step("deploy", of_run(wait_s=20), until='"state":"ready"'),
        Step("chat", always({"message": "Hello", "max_tokens": 8})), Step("undeploy", always({})),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left_running(flash_home: Path) -> Generator[None]:
    """End the supervisor and the servers that the loop started, however it went."""
    yield
    with suppress(ProcessLookupError):
        if holder := LockOwner.read(flash_home):
            os.kill(holder.pid, signal.SIGTERM)
    stop_all(flash_home)


def environment_of(folder: Path, **variables: str) -> dict[str, str]:
    """An agent's own environment: a home of its own, nothing of ours, no calls home."""
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    return {**kept, **node_path(), "HOME": str(folder), "TERM": "dumb", **variables}


def check(model: Model, output: str) -> None:
    """The loop was played to its end, and every result said what it had to, compactly, with what to do next."""
    ends = model.played()
    assert len(ends) == len(model.script), f"{output}\n{model.results}"
    pushed, refused, started, status, rollouts, deployed, chat, stopped = ends
    assert '"environment":"vowels@' in pushed and "[unknown_argument argument=step]" in refused
    assert "did you mean 'steps'?" in refused and '"created":true' in started
    assert '"state":"succeeded"' in status and '"role":"assistant"' in rollouts
    assert '"base_url":"http://127.0.0.1' in deployed and '"adapter":{"text":' in chat and '"state":"stop' in stopped
    for text in (pushed, started, status, rollouts, deployed, chat, stopped):
        assert '"next":"' in text
        assert len(text) <= RESULT_CHARACTERS + 500  # a client may put a few words around it
    assert open_store().run(run_id_in(ends)).step == QUICK["steps"]


@needs(PROGRAMS / "claude")
def test_claude_code_plays_the_loop(tiny_model: Path, tmp_path: Path):
    config = tmp_path / "mcp.json"
    server = {"command": SERVE[0], "args": [*SERVE[1:]], "env": server_environment()}
    config.write_text(json.dumps({"mcpServers": {"flash": server}}))
    model = Model(loop(tiny_model), prefix="mcp__flash__")
    with serving(model) as address:
        quiet = {"DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        variables = {**quiet, "ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": "none", "IS_SANDBOX": "1"}
        ended = run(
            [PROGRAMS / "claude", "-p", "go", "--mcp-config", config, "--strict-mcp-config", "--allowedTools",
             "mcp__flash", "--output-format", "json"],
            timeout_s=LOOP_TIMEOUT_S, environment=environment_of(tmp_path, **variables), cwd=ROOT,
        )  # fmt: skip
    check(model, ended.stdout)


@needs(PROGRAMS / "codex")
def test_codex_plays_the_loop(tiny_model: Path, tmp_path: Path):
    model = Model(loop(tiny_model))
    with serving(model) as address:
        (tmp_path / ".codex").mkdir()
        lines = [
            'model = "scripted"', 'model_provider = "scripted"', 'approval_policy = "never"',
            'sandbox_mode = "danger-full-access"', "[model_providers.scripted]", 'name = "scripted"',
            f'base_url = "{address}/v1"', 'wire_api = "responses"', "[mcp_servers.flash]",
            f"command = {json.dumps(SERVE[0])}", f"args = {json.dumps(SERVE[1:])}", f"cwd = {json.dumps(str(ROOT))}",
            "tool_timeout_sec = 60",
            # the first turn waits for its tools: a scripted model calls what it was not shown yet
            "required = true", 'default_tools_approval_mode = "approve"', "[mcp_servers.flash.env]",
            *(f"{name} = {json.dumps(value)}" for name, value in server_environment().items()),
        ]  # fmt: skip
        (tmp_path / ".codex" / "config.toml").write_text("\n".join(lines))
        ended = run(
            [PROGRAMS / "codex", "exec", "--skip-git-repo-check", "go"],
            timeout_s=LOOP_TIMEOUT_S, environment=environment_of(tmp_path), cwd=tmp_path,
        )  # fmt: skip
    check(model, ended.stdout)


@needs(PROGRAMS / "opencode")
def test_opencode_plays_the_loop(tiny_model: Path, tmp_path: Path):
    model = Model(loop(tiny_model))
    with serving(model) as address:
        provider = {
            "npm": "@ai-sdk/openai-compatible", "name": "scripted",
            "options": {"baseURL": f"{address}/v1", "apiKey": "none"}, "models": {"scripted": {"name": "scripted"}},
        }  # fmt: skip
        server = {"type": "local", "command": [*SERVE], "environment": server_environment(), "enabled": True,
                  "cwd": str(ROOT), "timeout": 60_000}  # fmt: skip
        settings = {
            "provider": {"scripted": provider}, "model": "scripted/scripted", "small_model": "scripted/scripted",
            "autoupdate": False, "share": "disabled", "mcp": {"flash": server},
        }  # fmt: skip
        (tmp_path / "opencode.json").write_text(json.dumps(settings))
        ended = run(
            [PROGRAMS / "opencode", "run", "go"],
            timeout_s=LOOP_TIMEOUT_S, environment=environment_of(tmp_path), cwd=tmp_path,
        )  # fmt: skip
    check(model, ended.stdout)


@needs(PROGRAMS / "gemini")
def test_gemini_plays_the_loop(tiny_model: Path, tmp_path: Path):
    server = {"command": SERVE[0], "args": [*SERVE[1:]], "env": server_environment(), "cwd": str(ROOT),
              "timeout": 60_000, "trust": True}  # fmt: skip
    settings = {
        "mcpServers": {"flash": server}, "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False},
    }  # fmt: skip
    (tmp_path / ".gemini").mkdir()
    (tmp_path / ".gemini/settings.json").write_text(json.dumps(settings))
    model = Model(loop(tiny_model), prefix="mcp_flash_")
    with serving(model) as address:
        variables = {"GEMINI_API_KEY": "none", "GOOGLE_GEMINI_BASE_URL": address, "GEMINI_CLI_TRUST_WORKSPACE": "true"}
        ended = run(
            [PROGRAMS / "gemini", "-m", "gemini-2.5-flash", "--yolo", "-p", "go"],
            timeout_s=LOOP_TIMEOUT_S, environment=environment_of(tmp_path, **variables), cwd=tmp_path,
        )  # fmt: skip
    check(model, ended.stdout)


@needs(PROGRAMS / "mcp-inspector")
def test_the_inspector_plays_the_loop(tiny_model: Path):
    model = Model(loop(tiny_model))
    while (played := len(model.played())) < len(model.script) and len(model.results) < MAX_CALLS:
        step = model.script[played]
        arguments = [f"{name}={_text(value)}" for name, value in step.arguments(model.results).items()]
        ended = inspect("--method", "tools/call", "--tool-name", step.tool, *each("--tool-arg", arguments))
        model.results.append(ended.stdout)
    check(model, "\n".join(model.results))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
