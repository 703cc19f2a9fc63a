"""Attempts as managed jobs of a real SkyPilot, on nodes that see nothing of FLASH_HOME."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_mcp.cli.main import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state.targets import TargetSettings, find_target
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch
from flash_mcp.supervisor.launch.sky import NO_CARDS, SkyLauncher, resources_for
from flash_mcp.supervisor.targets import card_gib
from tests import engines, sky_cluster
from tests.places import ROOT
from tests.supervisor.test_slurm import Lab, commands_of, installed_python
from tests.waiting import wait_for

TIMEOUT_S = 900.0
RESOURCES = {"infra": "slurm", "cpus": 1, "accelerators": NO_CARDS}
TAG = "flash-mcp-0123456789abcdef"


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[sky_cluster.Cluster]:
    engines.need(sky_cluster.missing())
    with sky_cluster.running([hidden]) as made:
        yield made


@pytest.mark.slow
def test_a_job_of_skypilot_from_its_launch_to_its_end(cluster: sky_cluster.Cluster, tmp_path: Path) -> None:
    """The launcher's contract in one go: each of its steps takes SkyPilot half a minute."""
    mine, again, other = (SkyLauncher(cluster.address, 2, RESOURCES, tag=tag) for tag in (TAG, TAG, TAG[:-1]))
    program = "import os, signal, sys; print(os.environ['OWN'], flush=True); signal.pause()"
    log = tmp_path / "log"
    command = [sys.executable, "-c", program]
    launch = Launch("run-first", 1, command, {"OWN": "it's mine"}, log)
    unknown = Handle("run-first-2", "999")

    first = mine.submit(launch)
    assert again.submit(launch) == first and (mine.under_way(), other.under_way()) == ([first], [])
    assert mine.poll([first])[first.key].state == "pending"
    assert mine.poll([first, unknown])[unknown.key].state == "gone"

    def has_begun() -> bool:
        status = mine.poll([first])[first.key]
        assert status.state != "gone", status
        return status == JobStatus("alive") and log.exists()

    wait_for(has_begun, TIMEOUT_S)
    wait_for(lambda: log.read_text() == "it's mine\n", TIMEOUT_S)

    mine.cancel(first)
    wait_for(lambda: mine.poll([first])[first.key].state == "gone", TIMEOUT_S)
    assert "CANCELLED" in mine.poll([first])[first.key].detail
    mine.cancel(first)
    assert again.submit(launch) == first
    assert mine.under_way() == []


@pytest.mark.slow
def test_a_run_trains_through_skypilot_and_goes_on_when_its_node_is_taken_away(
    cluster: sky_cluster.Cluster, hidden: Path, tmp_path: Path, tiny_model: Path
) -> None:
    engine = {"engine": "sky", "address": cluster.address, "resources": RESOURCES}
    lab = Lab(hidden / "home", str(tmp_path / "shared"), tmp_path / "node", tiny_model, **engine)
    lab.timeout_s = TIMEOUT_S
    run = lab.train(max_attempts=1, steps=20, save_every=5)
    lab.until_step(run, 1)
    cluster.take_nodes_away()
    ended = lab.finish(run)
    assert (ended.state, ended.step) == ("succeeded", 20), lab.trouble()
    assert ended.preemptions >= 1  # on a busy machine SkyPilot may give a node up by itself
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 21))
    assert "step 20/20" in lab.store.log(run.id)


# -- which card ------------------------------------------------------------------------------------

NO_ENGINE: Json = {"algorithm": "sft", "eval_every": 0, "eval_after": False}
CASES: dict[str, tuple[str, Json, Json, Json]] = {
    "small": ("o/m-0.6B", {}, {}, ["Vast", "1x_T4", False, 0.15]),
    "3B": ("o/m-3B", {}, {}, ["Vast", "1x_T4", False, 0.15]),
    "7B": ("o/m-7B", {}, {}, ["Vast", "1x_A100", False, 1.29]),
    "7B without an engine": ("o/m-7B", NO_ENGINE, {}, ["Vast", "1x_T4", False, 0.15]),
    "14B": ("o/m-14B", {}, {}, ["RunPod", "1x_A100-80GB", False, 1.64]),
    "14B of spot": ("o/m-14B", {}, {"use_spot": True}, ["RunPod", "1x_A100-80GB", True, 0.8]),
    "14B at one cloud": ("o/m-14B", {}, {"infra": "vast"}, ["Vast", "1x_H100", False, 2.49]),
    "7B on a named card": ("o/m-7B", {}, {"accelerators": "H100"}, ["Vast", "1x_H100", False, 2.49]),
    "32B": ("o/m-32B", {}, {}, ["RunPod", "1x_H200", False, 3.59]),
    "32B on two": ("o/m-32B", {"gpus": 2}, {}, ["RunPod", "2x_A100-80GB", False, 3.28]),
    "two of a named card": ("o/m-7B", {"gpus": 2}, {"accelerators": "H100:1"}, ["Vast", "2x_H100", False, 4.98]),
    "70B": ("o/m-70B", {}, {}, "ResourcesUnavailableError"),
    "32B, too dear": ("o/m-32B", {}, {"max_hourly_cost": 3}, "ResourcesUnavailableError"),
}  # fmt: skip


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """What SkyPilot's optimizer chooses in each case."""
    python = sky_cluster.SKY / "bin/python"
    engines.need("" if python.exists() else f"there is no {python}")
    asked = {name: resources_of(*case[:3]) for name, case in CASES.items()}
    done = subprocess.run(
        [python, ROOT / "tests/sky_optimizer.py"],
        env={"HOME": str(tmp_path_factory.mktemp("sky")), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def resources_of(model: str, fields: Json, resources: Json) -> Json:
    """The resources of the task that trains this model on a target with these resources."""
    settings = TargetSettings.model_validate(
        {"engine": "sky", "address": "http://sky", "storage": "s3://b/f", "resources": resources}
    )
    spec = resolve(RunSpec(environment="vowels", model=model, **fields)).spec
    need_gib = card_gib("clouds", settings, spec)
    launch = Launch("run-1", 1, ["true"], {}, None, gpus=spec.gpus, card_gib=need_gib)
    return resources_for(settings.resources, launch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_skypilot_chooses_the_cheapest_card_that_fits(chosen: Json, case: str) -> None:
    assert chosen[case] == CASES[case][3]


def test_a_job_asks_for_the_memory_that_the_weights_of_its_model_need() -> None:
    """Two copies of 7 billion parameters of 2 bytes, which take 85% of the card."""
    assert resources_of("o/m-7B", {}, {"use_spot": True}) == {"use_spot": True, "accelerators": "31GB+:1"}
    assert resources_of("o/m-7B", {}, {"accelerators": NO_CARDS, "cpus": "8+"}) == {"cpus": "8+"}
    with pytest.raises(FlashError, match=r"^\[target_refused.*accelerators"):
        resources_of("o/who-knows", {}, {})
    assert resources_of("o/who-knows", {}, {"accelerators": "L4"}) == {"accelerators": "L4:1"}


@pytest.mark.slow
def test_the_command_of_the_page_works_as_written(
    cluster: sky_cluster.Cluster,
    hidden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for the example's paths, its address, and what only a rented machine has."""
    home = hidden / "page"
    home.mkdir()
    monkeypatch.setenv("FLASH_HOME", str(home))
    real = {
        "http://127.0.0.1:46580": cluster.address,
        "s3://bucket/flash": str(tmp_path / "shared"),
        "/opt/flash/bin/python": str(installed_python(tmp_path)),
        "image_id=docker:me/flash": "infra=slurm",
        "use_spot=true": "cpus=1",
    }
    for _, *arguments in commands_of(ROOT / "docs" / "targets.md", 5):
        assert main([real.get(word, word) for word in arguments]) == 0, capsys.readouterr()
    assert "CPUs" in capsys.readouterr().out
    assert find_target(home, "clouds").resources == {"infra": "slurm", "cpus": 1}
    assert find_target(home, "clouds").cards is None


@pytest.mark.slow
def test_what_skypilot_refuses_is_an_error_with_its_words(cluster: sky_cluster.Cluster) -> None:
    launch = Launch("run-refused", 1, ["true"], {}, None)
    with pytest.raises(FlashError, match="infra") as caught:
        SkyLauncher(cluster.address, 1, {"infra": "no-such-cloud"}).submit(launch)
    assert caught.value.code == "target_refused"
    with pytest.raises(FlashError, match="404") as caught:
        SkyLauncher(f"{cluster.address}/elsewhere").submit(launch)
    assert caught.value.code == "target_refused"


@pytest.mark.slow
def test_a_skypilot_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_mcp.supervisor.launch.sky.TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        launcher = SkyLauncher(f"http://127.0.0.1:{silent.getsockname()[1]}")
        handle = Handle("run-x-1", "7")
        assert launcher.poll([handle])[handle.key].state == "unknown"
        with pytest.raises(FlashError) as caught:
            launcher.submit(Launch("run-x", 1, ["true"], {}, None))
    assert caught.value.code == "target_unreachable"
