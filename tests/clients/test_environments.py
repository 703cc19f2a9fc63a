"""Claude Code, Codex and OpenCode as they come from npm, each as an environment: in the sandbox, with
the model that is trained behind the API that each of them speaks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from environments.agents.calls import AgentCall
from environments.process.host import EnvironmentHost
from environments.sandbox.needs import READABLE_VARIABLE
from tests.clients.helpers import PROGRAMS, needs, node_path
from tests.folders import environment_folder

pytestmark = pytest.mark.timeout(300)
QUESTION = "What is 2 + 2? Answer with the number."
SOURCE = """
from environments import EnvironmentCommand
class Sample(EnvironmentCommand):
    dataset = [TaskExample({}, QUESTION, id="t0")]
    def command(self, example):
        return ["sh", "-c", "export HOME=$PWD; " + SCRIPT]
    def variables(self, example):
        return VARIABLES
    def reward(self, example, ended):
        return RewardResult(float("4" in ended.output), reason=f"{ended.code} {ended.output}"[-2000:])
"""
OPENCODE = {
    "provider": {
        "ours": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
            "models": {"policy": {"name": "policy"}},
        }
    },
    "model": "ours/policy",
    "small_model": "ours/policy",
    "autoupdate": False,
    "share": "disabled",
}
CODEX = """
model = "policy"
model_provider = "ours"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.ours]
name = "ours"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
SCRIPTS = {
    "claude": f"exec {PROGRAMS / 'claude'} -p '{QUESTION}' --model $MODEL --output-format json",
    "codex": f"mkdir .codex; cat >.codex/config.toml <<END\n{CODEX}\nEND\n"
    f"exec {PROGRAMS / 'codex'} exec --skip-git-repo-check '{QUESTION}'",
    "opencode": f"cat >opencode.json <<END\n{json.dumps(OPENCODE)}\nEND\nexec {PROGRAMS / 'opencode'} run '{QUESTION}'",
}
VARIABLES = {
    "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1", "ANTHROPIC_SMALL_FAST_MODEL": "policy",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(each, marks=needs(PROGRAMS / each)) for each in SCRIPTS])
async def test_an_agent_that_others_wrote_completes_a_session(name: str, tmp_path: Path, monkeypatch):
    programs = PROGRAMS.parent.parent
    monkeypatch.setenv(READABLE_VARIABLE, os.pathsep.join({str(programs), str(programs.resolve())}))
    known = {"QUESTION": QUESTION, "SCRIPT": SCRIPTS[name], "VARIABLES": {**VARIABLES, **node_path()}}
    source = "\n".join(f"{each} = {value!r}" for each, value in known.items()) + SOURCE
    environment_folder(tmp_path / "agent", source, returns="Sample()", needs="endpoint = true")
    async with await EnvironmentHost.start(tmp_path / "agent", timeout_s=150) as host:
        opening = await host.open("train", 0)
        call: AgentCall | str = opening.call
        asked: list[str] = []
        while isinstance(call, AgentCall):
            asked += [message["content"] for message in call.messages]
            await host.answer_call(opening.episode, call.number, "4")
            call = await host.next_call(opening.episode)
        score = await host.score(opening.episode)
    assert score.reward == 1 and (score.reason or "").startswith("0 "), score.reason
    assert any(QUESTION in text for text in asked)
