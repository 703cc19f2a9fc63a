"""status with until and since: a run is followed without being told anything twice."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest

from flash_mcp.judgement import health
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.attempt import Reader
from flash_mcp.tools import news
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared import tool_base
from flash_mcp.tools.shared.truncation import to_text
from tests.calls import named_calls, tokens
from tests.samples import end, evaluate, learn, queued_run, read_in, save_adapter, started_run, supervised
from tests.waiting import WAIT_S

STEPS = 150
STEP_S = 8
"""Seconds of a step: all steps take 20 minutes."""
CALL_S = 43


@pytest.fixture
def started(tmp_path: Path, no_supervisor: None) -> tuple[Run, RunWriter]:
    return started_run(tmp_path / "environment", steps=STEPS)


def learnt(run: Run, writer: RunWriter, steps: Iterable[int], **metrics: float) -> None:
    learn(writer, steps, of=STEPS, **metrics)
    read_in(open_store(), run.id)


async def status(**arguments: Any) -> dict[str, Any]:
    """What status sends. Without wait_s it does not wait."""
    return (await TOOLS["status"].function(**{"wait_s": 0, **arguments})).model_dump(mode="json")


async def follow(body: dict[str, Any]) -> dict[str, Any]:
    """The result of the call that `next` names last."""
    tool, arguments = named_calls(body["next"])[-1]
    assert tool == "status"
    return await status(**arguments)


def made(writer: RunWriter, scratch: Path, step: int) -> None:
    """What a run reports with a step: it is in trouble from step 60 on."""
    reward = 0.1 + 0.8 * step / STEPS
    metrics = {
        "reward/mean": reward,
        "success/rate": reward,
        "groups/uniform_share": 0.7 if step > 60 else 0.1,
        "time/step_s": STEP_S,
    }
    writer.metrics(step, metrics)
    if step % 25 == 0:
        save_adapter(writer, step, scratch / str(step))
    if step in (50, 100):
        evaluate(writer, step, 20 + step // 2)


@pytest.mark.slow
async def test_a_run_of_20_minutes_is_followed_in_under_4000_tokens(tmp_path: Path, no_supervisor: None, monkeypatch):
    # Each result has the run's id. One that is drawn may take up to three tokens more.
    monkeypatch.setattr(queue, "new_id", lambda *_: "run-s1kg7stm")
    run, writer = started_run(tmp_path / "environment", steps=STEPS)
    evaluate(writer, 0, 20)
    reader = Reader(open_store(), run.id, RunFolder(run.folder))
    reader.read(now=True)
    bodies = [await status(run_id=run.id, until="news")]
    waited_s = 0
    for step in range(1, STEPS + 1):
        made(writer, tmp_path, step)
        reader.read(now=True)
        if step == STEPS:
            evaluate(writer, STEPS, 90)
            end(writer, run.id, STEPS)
        body = await follow(bodies[-1])
        waited_s += STEP_S
        # A call that finds no news returns when its time is up.
        if "news" in body or waited_s + STEP_S > CALL_S:
            bodies.append(body)
            waited_s = 0
    texts = [to_text(body) for body in bodies]
    silent = [text for body, text in zip(bodies, texts, strict=True) if "now" in body]
    assert bodies[-1]["news"]["state"] == "succeeded" and bodies[-1]["news"]["verdict"]["outcome"] == "improved"
    assert len(silent) > 20 and max(map(tokens, silent)) < 60
    assert sum(map(tokens, texts)) < 4000 and "".join(texts).count('"uniform_groups"') == 1
    assert [body["news"]["checkpoint"] for body in bodies if "checkpoint" in body.get("news", {})]


async def test_a_mere_step_is_no_news_and_the_same_call_follows(started: tuple[Run, RunWriter]):
    run, writer = started
    first = await status(run_id=run.id, until="news")
    learnt(run, writer, range(1, 6))
    body = await follow(first)
    assert body == {
        "now": f"step 5/{STEPS}, success 11 %, 5 min left",
        "next": f"status(run_id={run.id!r}, until='news')",
    }


@pytest.mark.parametrize("kind", ["checkpoint", "evaluation", "flag"])
async def test_news_ends_the_wait_for_news_and_is_told_once(kind: str, tmp_path: Path, started: tuple[Run, RunWriter]):
    run, writer = started
    learn(writer, range(1, 12), of=STEPS)
    save_adapter(writer, 10, tmp_path / "first")
    read_in(open_store(), run.id)
    first = await status(run_id=run.id, until="news")
    assert first["run"]["checkpoint"] == 10
    match kind:
        case "checkpoint":
            save_adapter(writer, 20, tmp_path / "second")
        case "evaluation":
            evaluate(writer, 11, 40)
        case _:
            learn(writer, range(12, 30), of=STEPS, **{"groups/uniform_share": 0.7})
    read_in(open_store(), run.id)
    body = await follow(first)
    told = {"checkpoint": "checkpoint", "evaluation": "held_out", "flag": "flags"}
    expected = {"state", "step", "steps", "eta_s", told[kind]} | ({"outlook"} & {*body["news"]})
    assert set(body["news"]) == expected and "now" in await follow(body)
    # Whoever waits for the end is told of it with what ends that wait.
    assert "now" in await status(run_id=run.id, until="end", since=first["since"])


async def test_a_flag_that_becomes_a_problem_is_told_again_and_ends_every_wait(started: tuple[Run, RunWriter]):
    run, writer = started
    learnt(run, writer, range(1, 12), **{"groups/uniform_share": 0.7})
    assert "now" in (await status(run_id=run.id, until="end"))
    warned = await status(run_id=run.id, until="news")
    learnt(run, writer, range(12, 30), **{"groups/uniform_share": 0.97})
    worse = await status(run_id=run.id, until="end", since=warned["since"])
    assert [flag["severity"] for flag in worse["news"]["flags"]] == ["problem"] and "rollouts(" in worse["next"]
    assert "now" in await follow(worse)


async def test_the_whole_report_is_not_told_again(started: tuple[Run, RunWriter]):
    run, writer = started
    learnt(run, writer, range(1, 12), **{"groups/uniform_share": 0.7})
    whole = await status(run_id=run.id)
    assert whole["run"]["flags"] and "now" in await follow(whole)


async def test_a_lost_attempt_is_news_with_its_error(started: tuple[Run, RunWriter]):
    run, _ = started
    first = await status(run_id=run.id, until="end")
    lost = FlashError("worker_failed", "no heartbeat for 60 s", fix="nothing: it is repeated")
    assert queue.requeue(open_store(), run.id, 1, lost)
    body = await follow(first)
    assert body["run"]["error"]["code"] == "worker_failed" and "now" in (await follow(body))


async def test_a_run_that_is_held_up_says_so_once(tmp_path: Path, flash_home: Path):
    with supervised():
        run, _ = started_run(tmp_path, steps=STEPS)
    # No supervisor runs any more.
    body = await status(run_id=run.id, until="end")
    assert "no supervisor" in body["run"]["warnings"][0]
    assert (await follow(body))["now"].endswith("still held up")


async def test_a_wait_ends_with_the_run_and_reports_its_share_of_the_steps(
    tmp_path: Path, started: tuple[Run, RunWriter], monkeypatch: pytest.MonkeyPatch
):
    run, writer = started
    learnt(run, writer, range(1, 76))
    queue.record_beat(open_store(), run.id, 1, {"step": 75, "phase": "rollout", "steps": STEPS}, progressed=True)
    looked = anyio.Event()
    told: list[tuple[str, float | None]] = []

    async def listen(message: str, share: float | None) -> None:
        told.append((message, share))
        looked.set()

    tool_base.listen(listen)
    found: list[dict[str, Any]] = []

    async def wait() -> None:
        found.append(await status(run_id=run.id, until="end", wait_s=30))

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await looked.wait()
            end(writer, run.id, 75, "cancelled")
    assert told[0] == (f"{run.id}: rollout, 75 of {STEPS} steps, usually 2 s each", 0.5)
    assert found[0]["run"]["state"] == "cancelled"


async def test_a_start_reports_how_long_it_usually_takes(tmp_path: Path, started: tuple[Run, RunWriter]):
    run, writer = started
    learn(writer, [1], of=STEPS)
    end(writer, run.id, 1)
    open_store().execute("UPDATE runs SET started = started - 62 WHERE id = ?", [run.id])
    second, _ = started_run(tmp_path / "second", steps=STEPS)
    told: list[tuple[str, float | None]] = []

    async def listen(message: str, share: float | None) -> None:
        told.append((message, share))

    tool_base.listen(listen)
    await status(run_id=second.id, until="end", wait_s=0.5)
    message, share = told[0]
    assert "of usually 60 s until the first step" in message
    assert share is None


@pytest.mark.parametrize("since", ["x", "{}e1c20", "", "{}"])
async def test_a_cursor_of_another_run_is_refused(since: str, tmp_path: Path, no_supervisor: None):
    run = queued_run(tmp_path)
    other = "zz" if run.id.endswith("20") else "20"
    with pytest.raises(FlashError, match=r"^\[invalid_argument"):
        await status(run_id=run.id, until="news", since=since.format(other))


def test_each_flag_has_a_letter_of_its_own() -> None:
    assert tuple(news.FLAG_LETTERS) == (*health.CHECKS, health.CONTAMINATED, health.WORSE_ELSEWHERE)
    assert len({*news.FLAG_LETTERS.values()}) == len(news.FLAG_LETTERS)
