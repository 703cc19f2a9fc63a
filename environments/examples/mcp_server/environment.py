"""The tools of an MCP server: each task is a call that the model has to make and to report.

user       Multiply two numbers.
           left: 12
           right: 7
assistant  multiply({"left": 12, "right": 7})
tool       84
assistant  84

make_tasks.py makes the tasks by calling the tools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from make_tasks import SIZES, VALUES, make_rows

from environments import (
    EnvironmentEpisode,
    EnvironmentToolUse,
    RewardMetric,
    RewardResult,
    TaskExample,
    task_cache,
)
from environments.adapters.mcp import McpServer

SERVER = ["python", "server.py"]
"""The command that starts it. Its packages stand in requirements.txt."""
INSTRUCTIONS = "Call the tool that does what is asked. Then answer with its result alone."
WEIGHTS = {"called": 0.2, "right_call": 0.4, "right_answer": 0.4}


class ServerTools(EnvironmentToolUse):
    """`success` means that a tool gave the right result and the model repeated it."""

    max_turns = 3

    def __init__(self) -> None:
        self.server = McpServer(SERVER, Path(__file__).parent)
        self.tools = self.server.tools
        name = task_cache.name_of(SERVER, VALUES, SIZES)
        rows = task_cache.rows(name, lambda: make_rows(self.server))
        share = SIZES["eval"] / sum(SIZES.values())
        held_out = round(share * len(rows))
        self.eval_dataset = list(map(task, rows[:held_out]))
        self.dataset = list(map(task, rows[held_out:]))

    def start_episode(self, example: TaskExample) -> list[dict[str, Any]]:
        # Each episode has its own copy of this object, so this list belongs to one conversation.
        # A server that remembers what it was told needs one for each episode: start it here too.
        self.results: list[str] = []
        return [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": example.input},
        ]

    def call_tool(self, example: TaskExample, name: str, arguments: dict[str, Any]) -> str:
        result = self.server.call(name, arguments)
        self.results.append(result.strip())
        return result

    def score_episode(self, example: TaskExample, episode: EnvironmentEpisode) -> RewardResult:
        answer = plain(episode.response_text or "")
        parts = {
            "called": bool(self.results),
            "right_call": example.output in self.results,
            "right_answer": bool(self.results) and answer == plain(example.output),
        }
        missing = [name for name, reached in parts.items() if not reached]
        return RewardResult(
            score=round(sum(WEIGHTS[name] for name in parts if name not in missing), 6),
            success=not missing,
            metrics=[RewardMetric(name, score=float(reached)) for name, reached in parts.items()],
            reason=f"not {missing[0]}" if missing else None,
        )

    def sft_completion(self, example: TaskExample) -> list[dict[str, Any]]:
        name, result = example.record["tool"], example.output
        call = {"name": name, "arguments": example.record["arguments"]}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00000", "name": name, "content": result},
            {"role": "assistant", "content": result},
        ]


def plain(text: str) -> str:
    return " ".join(text.split())


def task(row: dict[str, Any]) -> TaskExample:
    lines = [f"{name}: {shown(value)}" for name, value in row["arguments"].items()]
    return TaskExample(row, "\n".join([row["says"], *lines]), row["id"], output=row["result"])


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def load_environment() -> ServerTools:
    return ServerTools()
