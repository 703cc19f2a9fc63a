"""The bench itself, on the tiny model: what it compares must have done the same work."""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import control, fairness, judgement
from tests.forked import Forked
from tests.places import ROOT

pytestmark = pytest.mark.slow

PEERS = Path(sys.prefix) / "peers"
# Tests share their machine: a second, spinning engine thread would wait for a core most of the
# time.
QUIETLY = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def bench(part: str, model: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """What a quick run of `part` measured, and what it printed."""
    arguments = ["-m", "bench", "--quick", "--only", part, "--model", str(model), "--json", str(folder / "bench.json")]
    log = folder / "log"
    log.touch()
    assert Forked(arguments, log, {**os.environ, **QUIETLY}, ROOT).wait(850) == 0, log.read_text()
    report = json.loads((folder / "bench.json").read_text())
    assert report["quick"] and report["machine"]["threads"]["OMP_NUM_THREADS"] == "1"
    return report[part], log.read_text()


@pytest.mark.skipif(not (PEERS / "flash").exists(), reason="scripts/peers installs the peer, and did not run yet")
def test_every_rollout_system_generates_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    result, table = bench("rollouts", tiny_model, tmp_path)
    mixed, even = sum(random.Random(0).choices((1, 2, 4), k=8)), 3 * 8
    assert [cell["latency_s"] for cell in result["cells"]] == [0.0, 0.02, 0.02]
    for cell, turns in zip(result["cells"], (mixed, mixed, even), strict=True):
        assert {name: system["tokens"] for name, system in cell["systems"].items()} == {
            name: [24 * turns] for name in ("ours", "flash", "barrier")
        }
        # A conversation is as long as it is: no system has fewer iterations than the longest has
        # tokens.
        assert all(system["iterations_over_longest"] >= 1 for system in cell["systems"].values())
        # The barrier calls the environment once a turn and one after the other; the bound knows of
        # 32 places.
        slept = cell["latency_s"] * turns
        assert cell["systems"]["barrier"]["seconds"][0] > slept
        assert cell["bound"]["environment_s"] == pytest.approx(slept / 32)
    assert "over flash" in table and "3 each" in table


def test_both_training_steps_give_the_same_gradient(tiny_model: Path, tmp_path: Path) -> None:
    result, table = bench("step", tiny_model, tmp_path)
    assert len(result["cases"]) == 2
    for case in result["cases"]:
        gradient = case["gradient"]
        assert gradient["ours to trl"]["cosine"] > 0.999 and gradient["ours to trl"]["norm_difference"] < 0.05
        assert gradient["ours to trl in fp32"]["norm_difference"] < 1e-5
        assert case["tokens"]["trained"] < case["tokens"]["packed"] < case["tokens"]["padded"]
        assert all(len(times) == 1 for times in case["seconds"].values())
        assert set(case["over"]) == set(case["over_by_cpu"]) == set(case["seconds"])
    assert "gradient: cosine" in table and "118 + 42" in table


@pytest.mark.long
def test_a_whole_run_is_measured_on_our_step_and_on_trls(tiny_model: Path, tmp_path: Path) -> None:
    result, table = bench("whole", tiny_model, tmp_path)
    (ours,), (theirs,) = result["attempts"]["ours"], result["attempts"]["plain trl"]
    # The tiny model never earns a reward: our step skips groups without advantage, TRL's trains
    # them all the same.
    assert ours["reward"] == theirs["reward"] == [0.0, 0.0] and theirs["train_s"] > 3 * ours["train_s"]
    for attempt in (ours, theirs):
        parts = attempt["rollout_s"] + attempt["sync_s"] + attempt["train_s"]
        assert parts == pytest.approx(attempt["step_s"]) and attempt["start_s"] > attempt["step_s"]
    assert result["over_trl"] == theirs["step_s"] / ours["step_s"] and "plain trl over ours" in table


@pytest.mark.long
def test_runs_with_and_without_staleness_are_measured(tiny_model: Path, tmp_path: Path) -> None:
    result, table = bench("stale", tiny_model, tmp_path)
    exact, ahead = result["cases"]
    assert (exact["seconds"], exact["staleness"], exact["over_exact"]) == (0.0, 0, 1.0)
    assert exact["staleness/mean"] == 0 < ahead["staleness/mean"] <= 2
    assert ahead["over_exact"] == ahead["step_s"] / exact["step_s"]
    assert [len(runs[0]["reward"]) for runs in result["learning"]["attempts"].values()] == [2, 2]
    assert "over the first row" in table and "within the noise" in table


@pytest.mark.long
def test_the_first_token_of_a_chat_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    result, table = bench("chat", tiny_model, tmp_path)
    assert set(result["models"]) == {"base", "adapter"}
    for chats in result["models"].values():
        (first,), (token,), (cpu,) = chats["first_s"], chats["token_s"], chats["cpu_s"]
        assert first > 0 and token > 0 and cpu > 0
    assert "first token" in table


@pytest.mark.long
@pytest.mark.usefixtures("unforked")  # it measures the server's process
def test_the_control_plane_is_measured_without_an_error(tmp_path: Path) -> None:
    result = control.run(tmp_path, repeat=1, quick=True)
    agents = result["agents"]
    assert result["metric_points"] == 200 * 50 * 20
    assert (agents["errors"], len(agents["seconds"])) == (0, agents["polls"])
    assert [len(times) for times in result["status_s"].values()] == [100, 100, 20, 20, 5, 5, 5]
    assert all(cpu > 0 for times in result["status_cpu_s"].values() for cpu in times)
    assert len(result["environment_starts"]["cpu_s"]) == 3 and min(result["environment_starts"]["cpu_s"]) > 0
    assert result["pages"]["server_cpu_s"] > 0
    assert all(rate > 0 for round_ in result["claims"] for rate in round_.values())
    header, *lines = control.rows(result)
    assert all(len(line) == len(header) for line in lines)


@pytest.mark.long
def test_an_agent_generates_what_the_native_environment_does(tiny_model: Path, tmp_path: Path) -> None:
    result, table = bench("endpoint", tiny_model, tmp_path)
    throughput, learning = result["throughput"], result["learning"]
    assert throughput["tokens"] == {"native": [8 * 3 * 24], "endpoint": [8 * 3 * 24]}
    native, endpoint = (throughput["seconds"][name][0] for name in ("native", "endpoint"))
    assert throughput["throughput_share"] == native / endpoint
    assert [len(made[0]["reward"]) for made in learning["attempts"].values()] == [2, 2]
    assert learning["noise"] == 0, "one seed has none"
    assert "of the throughput" in table and "reward by step, seed 0" in table


@pytest.mark.slow
def test_owners_get_equal_shares_of_three_targets_and_one_who_brings_little_waits_little(tmp_path: Path) -> None:
    """`python -m bench.fairness`; without FLASH_SLOW its small form."""
    runs = 10_000 if os.environ.get("FLASH_SLOW") else 400
    found = fairness.simulate(tmp_path, runs, runs // 10)
    assert found.ended == runs + len(found.waits_s) and max(found.looks_cpu_s) < 1
    used = [found.used[owner] for owner in fairness.OWNERS]
    assert min(used) > 0.7 * max(used), found.used
    assert found.waits_s and max(found.waits_s) <= 1.5 * fairness.RUN_S[1]


@pytest.mark.long
def test_the_judgement_is_wrong_no_more_often_than_its_table_says() -> None:
    rows = list(judgement.table())
    for claim, where, measured, least, most in rows:
        assert least <= measured <= most, (claim, where)
    assert judgement.markdown(rows) in (ROOT / "docs" / "judgement.md").read_text()
