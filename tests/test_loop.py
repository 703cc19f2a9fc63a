"""The scripted loop as scripts/loop plays it, on the tiny model, through a real server and real
workers.
"""

from __future__ import annotations

import io
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from bench.loop import Json, Task, markdown, play
from flash_mcp.cli.demo import connected, outcome
from flash_mcp.protocol.errors import FlashError
from tests.attempts import VOWELS

pytestmark = pytest.mark.slow

SHORT: Json = {"batch_size": 4, "lora_rank": 4, "learning_rate": 1e-3}


def test_the_loop_ends_with_what_each_round_was_worth(
    tiny_model: Path, tmp_path: Path, flash_home: Path
) -> None:
    said, folder = io.StringIO(), tmp_path / "environment"
    folder.mkdir()
    easy = (VOWELS / "environment.py").read_text().replace("share > 0.3", "share > 0.1")
    (folder / "environment.py").write_text(easy)

    async def loop() -> Json:
        async with connected(Console(file=said, width=200)) as session:
            pushed = await session.call("env_push", folder=str(folder), name="vowels")
            task = Task(
                "write vowels",
                pushed["environment"],
                {"max_tokens": 8},
                {"attempts": 4},
                {"epochs": 1, **SHORT},
                {"steps": 2, "group_size": 4, **SHORT},
            )
            return await play(session, task, str(tiny_model), tmp_path)

    found = anyio.run(loop)
    assert [*found["evaluations"]] == ["base", "sft", "grpo"]
    assert found["curated"]["train_rows"] > 0 and found["sampled"]["n"] == 48
    assert [(row["base"], row["other"]) for row in found["comparisons"]] == [
        ("base", "sft"),
        ("sft", "grpo"),
        ("base", "grpo"),
    ]
    table = markdown({"vowels": found})
    base = found["evaluations"]["base"]
    assert f"| base | {base['success']:.3f} | {base['low']:.3f} to {base['high']:.3f} |" in table
    assert f"{found['curated']['train_rows']} conversations" in table
    assert all(row["verdict"] in table for row in found["comparisons"])
    assert "init_from_adapter" in said.getvalue() and "dataset" in said.getvalue()


def test_what_failed_is_shown_with_its_code() -> None:
    async def fail(console: Console, code: str) -> Json:
        async with anyio.create_task_group():
            raise FlashError(code, "no [such] run", run_id="run-1", fix="list them")

    said = io.StringIO()
    assert outcome(Console(file=said, width=200), fail, "unknown_run") is None
    assert said.getvalue().startswith("[unknown_run run_id=run-1] no [such] run")
