"""How the engine gets the policy, chosen by measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_writer import RunWriter
from flash_mcp.protocol.spec import validate
from tests.attempts import make_run
from worker import session
from worker.engine import measure
from worker.engine.measure import Choice, Figures, Load
from worker.heartbeat import Heartbeat

LOAD = Load("MODEL", "bfloat16", 256, 2, 8, "cpu", "0.31.0")
FIGURES = {"adapter": Figures(0.1, 4000.0), "merged": Figures(2.0, 5000.0)}


@pytest.mark.parametrize(("tokens", "way"), [(10_000, "adapter"), (60_000, "merged")])
def test_the_way_with_the_faster_step_is_chosen(tokens: int, way: str) -> None:
    choice = Choice(tokens, dict(FIGURES))
    assert choice.sync == way
    assert str(choice).startswith(f"{way}; a step of {tokens} tokens takes: adapter")
    assert "100 ms a sync, 4000 tokens/s" in str(choice)


def test_both_ways_are_measured_with_the_real_engine_and_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = replace(LOAD, model=str(tiny_model))
    cache = tmp_path / "sync.json"
    assert measure.choose(load, 1000, cache, may_measure=False) is None
    first = measure.choose(load, 1000, cache, may_measure=True)
    assert first and set(first.figures) == {"adapter", "merged"}
    assert all(each.sync_s > 0 and each.tokens_per_s > 1 for each in first.figures.values())
    monkeypatch.setattr(measure, "_measured", None)
    assert measure.choose(load, 1000, cache, may_measure=False) == first
    other = replace(load, rank=16)
    assert measure.choose(other, 1000, cache, may_measure=False) is None


def test_a_cancel_ends_a_measurement_and_a_failed_one_is_an_error(tmp_path: Path) -> None:
    absent = replace(LOAD, model=str(tmp_path / "absent"))
    cache = tmp_path / "sync.json"
    stopped = measure.choose(absent, 1, cache, may_measure=True, is_cancelled=lambda: True)
    assert stopped is None and not cache.exists()
    with pytest.raises(FlashError, match="sync=adapter ended with exit code 1"):
        measure.choose(absent, 1, cache, may_measure=True)


@pytest.mark.parametrize("steps", [10, 50])
def test_a_run_on_a_card_reports_the_choice_and_a_short_one_measures_nothing(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_HOME", str(tmp_path))
    monkeypatch.setattr(session, "default_sync", lambda dtype: "adapter")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(session.metadata, "version", lambda name: "0.31.0")
    asked: list[str] = []

    def measured(load: Load, way: Any, is_cancelled: Any) -> Figures:
        asked.append(way)
        assert (load.sequences, load.device) == (64, "NVIDIA H200")
        return FIGURES[way]

    monkeypatch.setattr(measure, "_measured", measured)
    run = make_run(tmp_path / "run", tmp_path)
    writer = RunWriter(run, 1)
    spec = validate({"environment": "e", "steps": steps, "max_tokens": 1000})
    chosen = session.choose_sync(
        tmp_path, spec, torch.bfloat16, 2048, 64, writer, Heartbeat(writer)
    )
    events = [run.event(name) for name in run.event_names()]
    if steps < 50:
        assert (chosen, asked, events) == (None, [], [])
        return
    assert chosen == "merged" and asked == ["adapter", "merged"]
    (event,) = events
    assert event and event["kind"] == "sync" and event["message"].startswith("merged; a step of")
    assert json.loads(json.dumps(event))["adapter"] == {"sync_s": 0.1, "tokens_per_s": 4000.0}
