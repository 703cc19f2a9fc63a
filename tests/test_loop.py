"""The scripted loop as scripts/loop plays it, on the tiny model, through a real server and real workers."""

import io
import os
import shutil
import tempfile
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from bench import bare, dates, lessons, rows
from bench.dates import Plan
from bench.loop import Json, Task, markdown, play
from flash_mcp.cli.demo import connected, outcome
from flash_mcp.protocol.errors import FlashError
from tests.attempts import VOWELS

pytestmark = pytest.mark.slow

SHORT: Json = {"batch_size": 4, "lora_rank": 4, "learning_rate": 1e-3}


@pytest.mark.skipif(
    not os.environ.get("FLASH_SLOW"), reason="a minute, for calls that the loop of dates makes too; set FLASH_SLOW=1"
)
def test_the_loop_ends_with_what_each_round_was_worth(tiny_model: Path, tmp_path: Path, flash_home: Path) -> None:
    said, folder = io.StringIO(), tmp_path / "environment"
    folder.mkdir()
    easy = (VOWELS / "environment.py").read_text().replace("share > 0.3", "share > 0.1")
    (folder / "environment.py").write_text(easy)

    async def loop() -> Json:
        async with connected(Console(file=said, width=200)) as session:
            pushed = await session.call("env_push", folder=str(folder), name="vowels")
            task = Task(
                "write vowels", pushed["environment"], {"max_tokens": 8}, {"attempts": 4}, {"epochs": 1, **SHORT},
                {"steps": 2, "group_size": 4, **SHORT},
            )  # fmt: skip
            return await play(session, task, str(tiny_model), tmp_path)

    found = anyio.run(loop)
    assert [*found["evaluations"]] == ["base", "sft", "grpo"]
    assert found["curated"]["train_rows"] > 0 and found["sampled"]["n"] == 48
    assert [(row["base"], row["other"]) for row in found["comparisons"]] == [
        ("base", "sft"), ("sft", "grpo"), ("base", "grpo"),
    ]  # fmt: skip
    table = markdown({"vowels": found})
    base = found["evaluations"]["base"]
    assert f"| base | {base['success']:.3f} | {base['low']:.3f} to {base['high']:.3f} |" in table
    assert f"{found['curated']['train_rows']} conversations" in table
    assert all(row["verdict"] in table for row in found["comparisons"])
    assert "init_from_adapter" in said.getvalue() and "dataset" in said.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("folder", [dates.FOLDER, dates.JSON_FOLDER], ids=lambda folder: folder.name)
def test_an_agent_plays_the_loop_within_its_calls_and_tokens(folder: Path, tiny_model: Path, flash_home: Path) -> None:
    plan = Plan(
        {"max_tokens": 8, "eval_after": True, "eval_examples": 20}, {"steps": 3, "eval_before": True, **SHORT},
        {"steps": 2, "group_size": 4, **SHORT}, export="merged",
    )  # fmt: skip

    async def loop(model: Path) -> Json:
        async with connected(Console(file=io.StringIO())) as session:
            return await dates.play(session, plan, str(model), folder)

    with tempfile.TemporaryDirectory() as short:  # results name the model often, and pytest's paths are long
        found = anyio.run(loop, shutil.copytree(tiny_model, Path(short) / "tiny"))
    busy = 250  # tokens: four results say that the machine is, and one more call or two wait
    assert found["calls"] <= dates.MOST_CALLS and found["tokens"] <= dates.MOST_TOKENS + busy, found["by_tool"]
    base, sft, grpo = found["table"]
    assert base["step"] == 0 and base["run_id"] == sft["run_id"] != grpo["run_id"]
    assert all(row["verdict"] for row in (sft, grpo))
    best = max((sft, grpo), key=lambda row: row["success"])
    name = f"{best['run_id']}-{best['step']}-merged"
    assert found["export"]["folder"] == f"{flash_home}/exports/{name}"
    page = dates.markdown(found)
    assert f"| all | {found['calls']} | {found['tokens']:,} |" in page and f"| grpo | {grpo['success']:.3f} |" in page


@pytest.mark.long
@pytest.mark.parametrize("day", list(rows.DAYS))
def test_an_agent_comes_from_rows_to_a_verdict_in_eight_calls(day: str, tiny_model: Path, flash_home: Path, tmp_path):
    train: Json = {**rows.TRAIN, "steps": 3, "max_tokens": 8, "eval_examples": 20}

    async def loop() -> Json:
        async with connected(Console(file=io.StringIO())) as session:
            return await rows.play(session, tmp_path, train, str(tiny_model), day)

    played = anyio.run(loop)
    assert len(played["log"]) <= rows.MOST_CALLS
    assert sum(tokens for _, tokens in played["log"]) <= rows.MOST_TOKENS, played["log"]
    assert [call.partition("(")[0] for call, _ in played["log"][:5]] == [
        "env_setup", "env_test", "env_push", "train", "status"
    ]  # fmt: skip
    assert played["run"]["verdict"] and f"| {len(played['log'])} calls |" in rows.markdown(played)


@pytest.mark.long
def test_runs_without_a_value_have_a_verdict_for_each_seed(tiny_model: Path, flash_home: Path, tmp_path: Path) -> None:
    quick: Json = {"model": str(tiny_model), "steps": 2, "max_tokens": 8, "eval_examples": 20}

    async def loop() -> Json:
        async with connected(Console(file=io.StringIO())) as session:
            return await bare.play(session, tmp_path, 2, ["sort_words", "dates"], quick)

    result = anyio.run(loop)
    places = [(row["task"], row["seed"], row["steps"]) for row in result["rows"]]
    assert places == [("sort_words", 0, 2), ("sort_words", 1, 2), ("dates", 0, 2), ("dates", 1, 2)]
    table = bare.markdown(result)
    assert table.count("| sort_words |") == 2 and "| underpowered | 2 |" in table


@pytest.mark.long
def test_a_student_and_chosen_tasks_are_measured_beside_what_they_replace(tiny_model: Path, flash_home: Path, tmp_path):
    quick: Json = {"model": str(tiny_model), "steps": 2, "max_tokens": 8, "eval_examples": 20}

    async def loop() -> Json:
        async with connected(Console(file=io.StringIO())) as session:
            distilled = await lessons.distill(session, tmp_path / "distill", 1, quick)
            return distilled, await lessons.useful(session, tmp_path / "useful", 1, {**quick, "eval_every": 1})

    distilled, chosen = anyio.run(loop)
    assert distilled["rows"][0]["rollouts"] == [64, 32] and "| 64, 32 |" in lessons.markdown_of_distill(distilled)
    assert [row["task"] for row in chosen["rows"]] == list(lessons.TASKS)
    for row in chosen["rows"]:
        plain, useful = row["passes"], row["useful"]
        assert [rollouts for rollouts, _ in plain] == [0, 32, 64]
        assert len(useful) == 3 and 64 <= useful[-1][0] <= 3 * 64
    assert lessons.markdown_of_useful(chosen).count("| calculator") == 2


def test_rollouts_to_a_target_lie_between_two_evaluations() -> None:
    plain, chosen = [(0, 0.0), (100, 0.5), (200, 1.0)], [(0, 0.0), (100, 1.0)]
    assert lessons._share(plain, chosen, 0.9) == pytest.approx(90 / 180)
    assert lessons._share(plain, [(0, 0.0), (100, 0.4)], 0.9) is None
    assert [lessons._words(number) for number in (3, 20, 48)] == ["three", "twenty", "forty-eight"]


def test_what_failed_is_shown_with_its_code() -> None:
    async def fail(console: Console, code: str) -> Json:
        async with anyio.create_task_group():
            raise FlashError(code, "no [such] run", run_id="run-1", fix="list them")

    said = io.StringIO()
    assert outcome(Console(file=said, width=200), fail, "unknown_run") is None
    assert said.getvalue().startswith("[unknown_run run_id=run-1] no [such] run")
