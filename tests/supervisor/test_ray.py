"""Real training through a real Ray of two nodes, which see nothing of FLASH_HOME."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flash_mcp.cli.main import main
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.state import queue, serving
from flash_mcp.supervisor.server import server_of
from tests import engines, ray_cluster
from tests.crash import seen_in
from tests.places import ROOT
from tests.supervisor.test_model_servers import make_run
from tests.supervisor.test_slurm import Lab, commands_of, installed_python
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[ray_cluster.Cluster]:
    engines.need(ray_cluster.missing())
    with ray_cluster.running([hidden]) as made:
        yield made


def test_a_run_trains_on_ray_and_goes_on_once_its_owner_says_so_when_its_job_is_stopped(
    cluster: ray_cluster.Cluster, hidden: Path, tmp_path: Path, tiny_model: Path
) -> None:
    engine = {"engine": "ray", "address": cluster.address, "token_file": str(cluster.token_file)}
    lab = Lab(hidden / "home", str(tmp_path / "shared"), tmp_path / "node", tiny_model, **engine)
    run = lab.train(max_attempts=1, steps=30, save_every=5)
    lab.until_step(run, 1)
    headers = {"Authorization": f"Bearer {cluster.token_file.read_text()}"}
    stop = f"{cluster.address}/api/jobs/{lab.now(run).handle}/stop"
    assert httpx.post(stop, headers=headers).json() == {"stopped": True}
    lab.until(lambda: queue.is_held(lab.now(run)))
    queue.release(lab.store, run.id)
    ended = lab.finish(run)
    assert (ended.state, ended.step, ended.preemptions) == ("succeeded", 30, 0), lab.trouble()
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 31))
    assert "step 30/30" in lab.store.log(run.id)


def test_a_checkpoint_is_served_on_a_node_and_its_job_ends_with_the_deployment(
    cluster: ray_cluster.Cluster, hidden: Path, tmp_path: Path, tiny_model: Path, tiny_adapter: Path
) -> None:
    engine = {"engine": "ray", "address": cluster.address, "token_file": str(cluster.token_file)}
    storage = tmp_path / "shared"
    lab = Lab(hidden / "served", str(storage), tmp_path / "node", tiny_model, **engine)
    asked = serving.request(lab.store, make_run(lab.store, str(lab.model), {5: tiny_adapter}), target="lab")

    def state() -> str:
        return lab.store.deployment(asked.id).state

    lab.until(lambda: state() != "starting")
    row = lab.store.deployment(asked.id)
    assert row.state == "ready", row.error
    server = server_of(lab.home, row)
    assert server
    asking = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    body = {"model": asked.id, "max_tokens": 32, **asking}
    said = server.call("/chat/completions", body, timeout_s=60.0).json()
    assert said["choices"][0]["message"]["content"].count("Z") > 20
    serving.request_stop(lab.store, asked.id)
    lab.until(lambda: state() == "stopped")
    headers = {"Authorization": f"Bearer {cluster.token_file.read_text()}"}
    job = f"{cluster.address}/api/jobs/{row.server_run}-1"
    ended = ("STOPPED", "SUCCEEDED")
    lab.until(lambda: httpx.get(job, headers=headers).json()["status"] in ended)
    lab.until(lambda: not (storage / "run-folders" / str(row.server_run)).exists())


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
    for _, *arguments in commands_of(ROOT / "docs" / "targets.md", 4):
        assert main([real.get(word, word) for word in arguments]) == 0, capsys.readouterr()
    assert "CPUs" in capsys.readouterr().out


def test_a_worker_that_outlives_its_raylet_writes_nothing_once_it_was_replaced(
    cluster: ray_cluster.Cluster, hidden: Path, tmp_path: Path, tiny_model: Path
) -> None:
    engine = {"engine": "ray", "address": cluster.address, "token_file": str(cluster.token_file)}
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
            process.wait(WAIT_S)
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
