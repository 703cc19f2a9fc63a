"""Real training through a real Ray of two nodes, which see nothing of FLASH_HOME."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flash_mcp.cli.main import main
from flash_mcp.protocol.run_folder import RunFolder
from tests import ray_cluster
from tests.crash import seen_in
from tests.places import ROOT
from tests.supervisor.test_slurm import Lab, commands_of, installed_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of state directories. It is empty on the nodes."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[ray_cluster.Cluster]:
    if reason := ray_cluster.missing():
        pytest.skip(reason)
    with ray_cluster.running([hidden]) as made:
        yield made


def test_a_run_trains_on_ray_and_goes_on_when_its_job_is_stopped_behind_our_back(
    cluster: ray_cluster.Cluster, hidden: Path, tmp_path: Path, tiny_model: Path
) -> None:
    token = str(cluster.token_file)
    engine = {"engine": "ray", "address": cluster.address, "token_file": token}
    storage = str(tmp_path / "shared")
    lab = Lab(hidden / "home", storage, tmp_path / "node", tiny_model, **engine)
    run = lab.train(max_attempts=1, steps=30, save_every=5)
    lab.until_step(run, 1)
    headers = {"Authorization": f"Bearer {cluster.token_file.read_text()}"}
    stop = f"{cluster.address}/api/jobs/{lab.now(run).handle}/stop"
    assert httpx.post(stop, headers=headers).json() == {"stopped": True}
    ended = lab.finish(run)
    assert (ended.state, ended.step, ended.preemptions) == ("succeeded", 30, 1), lab.trouble()
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 31))
    assert "step 30/30" in lab.store.log(run.id)


def test_the_commands_of_the_page_work_as_written(
    cluster: ray_cluster.Cluster,
    hidden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for the example's paths, its address, and a card that no node has."""
    monkeypatch.setenv("FLASH_HOME", str(hidden / "page"))
    (hidden / "page").mkdir()
    real = {
        "/shared/flash": str(tmp_path / "shared"),
        "/opt/flash/bin/python": str(installed_python(tmp_path)),
        "/etc/flash/token": str(cluster.token_file),
        "http://head:8265": cluster.address,
        "GPU=1": "CPU=1",
    }
    for _, *arguments in commands_of(ROOT / "docs" / "targets.md", 2):
        assert main([real.get(word, word) for word in arguments]) == 0, capsys.readouterr()
    assert "CPUs" in capsys.readouterr().out


def test_a_worker_that_outlives_its_raylet_writes_nothing_once_it_was_replaced(
    cluster: ray_cluster.Cluster, hidden: Path, tmp_path: Path, tiny_model: Path
) -> None:
    token = str(cluster.token_file)
    engine = {"engine": "ray", "address": cluster.address, "token_file": token}
    there: dict[str, Any] = {**engine, "resources": {"other": 1}}
    lab = Lab(hidden / "outlived", str(tmp_path / "shared"), tmp_path / "node", tiny_model, **there)
    run = lab.train(max_attempts=1, steps=12, save_every=2)
    worker = lab.until_step(run, 2)
    wrapper = worker.parent()
    assert wrapper
    for process in (wrapper, worker):
        process.suspend()
    kill_all_of_ray(cluster, "other", {wrapper, *wrapper.children(recursive=True)})
    cluster.mend()
    ended = lab.finish(run)
    assert (ended.state, ended.step, ended.attempt) == ("succeeded", 12, 2), lab.trouble()
    folder = RunFolder(run.folder)
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 13))

    before = seen_in(folder)
    for process in (worker, wrapper):
        process.resume()
    for process in (worker, wrapper):
        with suppress(psutil.NoSuchProcess):
            process.wait(60)
    assert seen_in(folder) == before
    lab.supervisor.tick()
    assert lab.now(run) == ended


def kill_all_of_ray(cluster: ray_cluster.Cluster, name: str, spared: set[psutil.Process]) -> None:
    """A node's raylet, and the processes that would end its jobs."""
    node = cluster.nodes[name]
    for process in psutil.Process(node.pid).children(recursive=True):
        if process not in spared:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    node.kill()
    node.wait()
