"""A real cluster of two nodes on this machine, moto's S3, and a state directory that no node sees.

Each node has a network namespace of its own; the server's side is this machine's end of a bridge."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import httpx
import psutil

from flash_mcp.protocol.records import Run
from flash_mcp.state.store import Store
from tests import network, ray_cluster, slurm
from tests.places import ROOT, TESTS, VOWELS
from tests.protocol.test_run_folder import BUCKET, ObjectStore

Json = dict[str, Any]
ENGINES = ("slurm", "ray")
TIMEOUT_S = 900.0
PLANTED = "pl4nted-value-that-nobody-must-see"
ENVIRONMENT = """

import os
import time
vowels = load_environment


class Slow(Vowels):
    def score_episode(self, example, episode):
        time.sleep(self.pause_s)
        return super().score_episode(example, episode)


def load_environment(pause_s=0.0, needs_secret=False):
    assert not needs_secret or os.environ["PLANTED_KEY"].startswith("pl4nted")
    made = Slow(12, 5, "Write")
    made.pause_s = pause_s
    return made
"""


def missing(engine: str) -> str:
    """Why there can be no rehearsal here; empty if there can."""
    of_engine = slurm.missing() if engine == "slurm" else ray_cluster.missing()
    return of_engine or network.missing()


class Rehearsal:
    """The commands of a user of `home`, and what an operator does to the cluster."""

    def __init__(
        self,
        engine: str,
        folder: Path,
        cluster: slurm.Cluster | ray_cluster.Cluster,
        net: network.Network,
        objects: ObjectStore,
    ) -> None:
        self.engine = engine
        self.folder = folder
        self.home = folder / "hidden" / "home"
        self.cluster = cluster
        self.network = net
        self.objects = objects
        self.storage = f"s3://{BUCKET}/{folder.name}"
        self.files = fsspec.filesystem("s3", use_listings_cache=False)
        self.files.mkdir(BUCKET)
        self.store = Store(self.home)
        self.model = folder / "hidden" / "tiny"
        self.node_disk = folder / "node-disk"
        self.keys = objects.write_keys(folder / "keys.sh")

    def make_model(self) -> None:
        if not self.model.exists():
            made = [sys.executable, "-m", "tests.tiny", str(self.model)]
            subprocess.run(made, cwd=ROOT, check=True, capture_output=True)

    def push_environment(self) -> None:
        source = shutil.copytree(VOWELS, self.folder / "hidden" / "vowels")
        with (source / "environment.py").open("a") as code:
            code.write(ENVIRONMENT)
        self.flash("env-push", str(source), "--name", "vowels")

    def flash(self, *words: str, timeout_s: float = 300.0) -> Json:
        """The first of what `flash-mcp WORDS --json` prints. RuntimeError if it fails."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "flash_mcp.cli", *words, "--json"],
            cwd=self.folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"flash-mcp {' '.join(words)}: {done.stdout}{done.stderr}"[-2000:])
        return json.JSONDecoder().raw_decode(done.stdout)[0]

    def add_target(self, name: str, *, quick: bool = False) -> Json:
        """`flash-mcp target add`, with a stand-in for training if `quick`."""
        path = f"{TESTS / 'stand_ins'}{os.pathsep}{ROOT}" if quick else str(ROOT)
        words = ["--engine", self.engine, "--storage", self.storage, "--python", sys.executable]
        words += ["--home", str(self.folder / "node"), "--env-file", str(self.keys)]
        words += ["--env", f"PYTHONPATH={path}", "--env", "OMP_NUM_THREADS=1", "--slots", "2"]
        if quick:
            words += ["--env", f"TMPDIR={self.node_disk}"]
        if isinstance(self.cluster, ray_cluster.Cluster):
            words += ["--address", self.cluster.address]
            words += ["--token-file", str(self.cluster.token_file)]
        added: list[Json] = []

        def is_added() -> bool:
            """A Ray that has just started may not answer the first request in time."""
            try:
                added.append(self.flash("target", "add", name, *words))
            except RuntimeError as error:
                if "target_unreachable" not in str(error):
                    raise
            return bool(added)

        self.until(is_added, f"the target {name}")
        return added[0]

    def train(self, target: str, **more: object) -> str:
        """Start a run of the tiny model; its id."""
        values = {"steps": 2, "batch_size": 2, "group_size": 4, "max_tokens": 8, "max_length": 256,
                  "lora_rank": 4, "lora_alpha": 8, "learning_rate": 0.01, "save_every": 1,
                  "model": self.model, "environment": "vowels", "target": target, **more}  # fmt: skip
        words = [f"--set={name}={value}" for name, value in values.items()]
        return str(self.flash("train", *words)["run_id"])

    def ended(self, run_id: str) -> Run:
        """The run once it has ended. AssertionError unless it succeeded."""
        self.until(lambda: self.store.run(run_id).ended, f"the end of {run_id}")
        run = self.store.run(run_id)
        assert run.state == "succeeded", (run.state, run.error, self.store.log(run_id)[-2000:])
        return run

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come in {TIMEOUT_S:.0f} s")
            time.sleep(0.2)

    def processes(self, module: str, run: Run | None = None) -> list[psutil.Process]:
        """Processes of `worker.main` or `worker.node`, of one run or of any here."""
        where = run.folder if run else self.storage
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            of_run = any(word == where if run else word.startswith(where) for word in words)
            if module in words and of_run and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """No space is left where quick attempts have their temporary files."""
        filler = self.node_disk / "filler"
        try:
            with suppress(OSError), filler.open("wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(1 << 20))
            yield
        finally:
            filler.unlink(missing_ok=True)

    def end_behind_our_back(self, run: Run) -> None:
        """As a user of the engine may: flash-mcp does not know."""
        if isinstance(self.cluster, slurm.Cluster):
            subprocess.run(["scancel", str(run.handle)], check=True, timeout=30)
        else:
            self.ask_ray(f"jobs/{run.handle}/stop", "POST")

    def ask_ray(self, path: str, method: str = "GET") -> httpx.Response:
        assert isinstance(self.cluster, ray_cluster.Cluster)
        headers = {"Authorization": f"Bearer {self.cluster.token_file.read_text()}"}
        return httpx.request(method, f"{self.cluster.address}/api/{path}", headers=headers, timeout=10)


@contextmanager
def running(engine: str) -> Generator[Rehearsal]:
    """The rehearsal, ready. FLASH_HOME and the store's keys are set within, after the cluster was started: its
    daemons, whose variables a job may inherit, have neither."""
    before = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix=f"scale-{engine}-"))
    folder.chmod(0o755)
    hidden = folder / "hidden"
    hidden.mkdir()
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        cleanup.callback(_restore, before)
        nodes = slurm.NODES if engine == "slurm" else ("other",)
        net = cleanup.enter_context(network.running(nodes))
        disk = folder / "node-disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", disk], check=True)
        cleanup.callback(subprocess.run, ["umount", "--lazy", disk], check=False)
        cluster = cleanup.enter_context(_cluster(engine, hidden, net))
        objects = ObjectStore(net.address)
        cleanup.callback(objects.end)
        os.environ |= objects.environment
        os.environ |= {"FLASH_HOME": str(hidden / "home"), "PYTHONPATH": str(ROOT)}
        os.environ |= {"OMP_NUM_THREADS": "1", "PLANTED_KEY": PLANTED}
        rehearsal = Rehearsal(engine, folder, cluster, net, objects)
        cleanup.callback(_end_processes, folder)
        cleanup.callback(rehearsal.store.close)
        rehearsal.push_environment()
        yield rehearsal


@contextmanager
def _cluster(engine: str, hidden: Path, net: network.Network) -> Iterator[slurm.Cluster | ray_cluster.Cluster]:
    if engine == "slurm":
        with slurm.running(hidden=[hidden], network=net) as cluster:
            yield cluster
    else:
        with ray_cluster.running([hidden], net) as cluster:
            yield cluster


def _restore(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _end_processes(folder: Path) -> None:
    """The supervisor, servers and attempts, which name the folder in their command or variables."""
    mark = str(folder).encode()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            if mark in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
