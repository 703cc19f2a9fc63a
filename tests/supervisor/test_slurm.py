"""Real training through a real Slurm, on nodes that see nothing of FLASH_HOME."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from flash_mcp import __version__
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import queue, references, removal
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target, new_target, remove_target, write_target
from flash_mcp.state.versions import digest_of
from flash_mcp.supervisor import targets
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.loop import Supervisor
from flash_mcp.supervisor.maintenance import Maintenance
from flash_mcp.supervisor.targets import open_target, probe
from tests import engines, slurm
from tests.places import ROOT, VOWELS
from tests.protocol.test_node_code import without_packages
from tests.protocol.test_run_folder import BUCKET, SECRET_KEY, ObjectStore
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

TIMEOUT_S = 400.0
QUICK = {"steps": 3, "batch_size": 2, "group_size": 4, "max_tokens": 8, "max_length": 256, "lora_rank": 4,
         "lora_alpha": 8, "learning_rate": 0.01, "save_every": 1}  # fmt: skip

PLANTED = "pl4nted-value-that-nobody-must-see"
NEEDS_SECRET = """

import os
is_needed = load_environment


def load_environment(needs_secret=False, **arguments):
    assert not needs_secret or os.environ["PLANTED_KEY"].startswith("pl4nted")
    return is_needed(**arguments)
"""


class Lab:
    """A state directory, a cluster whose nodes do not see it, and a folder that both share."""

    timeout_s = TIMEOUT_S

    def __init__(self, home: Path, storage: str, node: Path | None, model: Path, **more: Any) -> None:
        self.home = home
        self.store = Store(home)
        self.storage = storage
        self.model = shutil.copytree(model, home / "my-model")
        source = home / "environments" / "vowels" / digest_of(VOWELS)
        shutil.copytree(VOWELS, source)
        with (source / "environment.py").open("a") as code:
            code.write(NEEDS_SECRET)
        self.environment = self.store.add_environment(name="vowels", digest=source.name, path=str(source), size_bytes=1)
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more.pop("env", {})}
        fields = {"engine": "slurm", "storage": storage, "python": sys.executable, **more}
        settings = new_target(home, "lab", {**fields, "env": variables, "home": node and str(node)})
        for name in ("lab", "near"):
            write_target(home, name, settings)
        # Another target on the same engine, which is looked after as long as this run waits.
        self.train(target="near", secrets=["NOBODY_HAS_IT"])
        self.supervisor = Supervisor(home, timeouts=Timeouts(remote_poll_s=0.2))

    def train(self, **fields: object) -> Run:
        spec = {"environment": "vowels", "model": str(self.model), "target": "lab"}
        resolved = resolve(RunSpec.model_validate({**QUICK, **spec, **fields}))
        return queue.enqueue(self.store, resolved, self.environment)[0]

    def now(self, run: Run) -> Run:
        return self.store.run(run.id)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.trouble()
            self.supervisor.tick()
            time.sleep(0.05)

    def until_step(self, run: Run, step: int) -> psutil.Process:
        """Until the attempt has made that step; its worker. Looks at engines and folders take some steps' time: who
        waits with them may find that the run has ended."""
        self.until(lambda: find_worker(run))
        folder = RunFolder(run.folder)
        deadline = time.monotonic() + self.timeout_s
        while not folder.metrics(step):
            assert time.monotonic() < deadline, self.trouble()
            time.sleep(0.01)
        return worker_of(run)

    def trouble(self) -> list[object]:
        runs = self.store.runs()
        for run in runs:
            print(run.id, run.state, run.attempt, run.error, self.store.log(run.id))  # noqa: T201
        return [(vars(run), self.store.log(run.id), self.store.events(run.id)) for run in runs]

    def finish(self, run: Run) -> Run:
        self.until(lambda: self.now(run).ended)
        return self.now(run)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The parent of state directories. It is empty on the nodes of a cluster that runs."""
    engines.need(slurm.missing())
    folder = tmp_path_factory.mktemp("hidden")
    with slurm.running(hidden=[folder]):
        yield folder


@pytest.fixture
def lab(hidden: Path, tmp_path: Path, tiny_model: Path) -> Lab:
    return Lab(hidden / tmp_path.name, str(tmp_path / "shared"), tmp_path / "node", tiny_model)


def find_worker(run: Run) -> psutil.Process | None:
    """The process of the attempt, which is `python -m worker.main`."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "worker.main" in command and run.folder in command:
            return process
    return None


def worker_of(run: Run) -> psutil.Process:
    worker = find_worker(run)
    assert worker, "no worker runs"
    return worker


def test_a_run_trains_on_a_node_that_sees_nothing_of_the_state_directory(lab: Lab, tmp_path: Path) -> None:
    run = lab.train(eval_before=True)
    ended = lab.finish(run)
    assert (ended.state, ended.step, ended.attempt) == ("succeeded", 3, 1), lab.trouble()
    assert [row.step for row in lab.store.metrics(run.id)] == [1, 2, 3] and lab.store.evals(run.id)[0].step == 0
    assert Path(lab.store.checkpoint(run.id).path, "adapter_model.safetensors").is_file()
    assert "step 3/3" in lab.store.log(run.id) and str(lab.home) not in Path(run.folder, "job.json").read_text()
    cached = next((tmp_path / "node").glob("machines/*/artifacts")).iterdir()
    assert len([path for path in cached if path.is_dir()]) == 2  # model and environment

    # An adapter that was trained there is a start and is evaluated there.
    checkpoint = lab.store.checkpoint(run.id)
    adapter = {"path": checkpoint.path, "run_id": run.id, "step": 3, "digest": checkpoint.digest}
    spec = {**QUICK, "environment": "vowels", "model": str(lab.model), "target": "lab"}
    resolved = resolve(RunSpec.model_validate({**spec, "steps": 1}))
    later, _ = queue.enqueue(lab.store, resolved, lab.environment, adapter)
    assert lab.finish(later).state == "succeeded", lab.trouble()


def test_attempts_bring_the_servers_code_to_a_node_that_does_not_have_it(
    hidden: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node finds the other packages elsewhere: fetching them takes an index."""
    monkeypatch.setattr(targets, "OVERRIDES", without_packages())
    node = tmp_path / "node"
    uv = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "UV_OFFLINE": "1"}
    env = {**uv, "PYTHONPATH": sysconfig.get_path("purelib")}
    lab = Lab(hidden / "uv", str(tmp_path / "shared"), node, tiny_model, setup="uv", env=env)
    run = lab.train(steps=1)
    lab.until(lambda: lab.now(run).phase)
    installed = next(node.glob("machines/*/code/*/venv"))
    assert worker_of(run).cmdline()[0].startswith(str(installed))
    assert lab.finish(run).state == "succeeded", lab.trouble()
    removal.remove(lab.store, run.id)
    assert not list(Path(lab.storage, "artifacts").glob("*.tar"))


def test_a_worker_that_is_told_to_end_saves_and_another_attempt_goes_on(lab: Lab) -> None:
    run = lab.train(steps=400, max_attempts=1, save_every=200)
    worker = lab.until_step(run, 3)
    wrapper = worker.parent()
    assert wrapper
    wrapper.send_signal(signal.SIGTERM)
    lab.until(lambda: lab.now(run).attempt == 2 and lab.now(run).state == "running")
    assert lab.now(run).preemptions == 1
    saved = RunFolder(run.folder).checkpoints.newest_good()
    assert saved and saved >= 3
    lab.until(lambda: lab.now(run).step > saved)

    # A wrapper that is killed takes its worker with it.
    worker = worker_of(run)
    wrapper = worker.parent()
    assert wrapper
    wrapper.kill()
    assert worker.wait(WAIT_S) is None
    queue.request_cancel(lab.store, run.id)
    assert lab.finish(run).state == "cancelled"


def test_a_job_that_slurm_starts_again_goes_on_as_the_next_attempt(lab: Lab) -> None:
    run = lab.train(max_attempts=1, steps=30, save_every=5)
    lab.until_step(run, 6)
    job = lab.now(run).handle
    assert os.system(f"scontrol requeue {job}") == 0
    ended = lab.finish(run)
    assert (ended.state, ended.step, ended.attempt) == ("succeeded", 30, 2), lab.trouble()
    assert (ended.handle, ended.preemptions) == (job, 1)
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 31))


def test_a_job_that_is_cancelled_behind_our_back_is_held_and_goes_on_once_its_owner_says_so(lab: Lab) -> None:
    run = lab.train(max_attempts=1, steps=30, save_every=5)
    lab.until_step(run, 1)
    lab.until(lambda: lab.now(run).state == "running")
    assert os.system(f"scancel {lab.now(run).handle}") == 0
    lab.until(lambda: queue.is_held(lab.now(run)))
    queue.release(lab.store, run.id)
    ended = lab.finish(run)
    assert (ended.state, ended.step) == ("succeeded", 30), lab.trouble()
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 31))


def test_two_targets_on_one_cluster_end_none_of_each_others_jobs(lab: Lab) -> None:
    runs = [lab.train(target=name, steps=400, save_every=200) for name in ("lab", "near")]
    lab.until(lambda: all(lab.now(run).state == "running" for run in runs))
    for name in ("lab", "near"):
        Maintenance(lab.store, open_target(lab.home, name)).clear()
    steps = [lab.now(run).step for run in runs]
    lab.until(lambda: all(lab.now(run).step > step for run, step in zip(runs, steps, strict=True)))
    assert [lab.now(run).attempt for run in runs] == [1, 1]
    for run in runs:
        queue.request_cancel(lab.store, run.id)
        assert lab.finish(run).state == "cancelled", lab.trouble()


def test_a_run_waits_while_its_partition_takes_no_jobs(lab: Lab) -> None:
    partition = ["scontrol", "update", "PartitionName=debug"]
    subprocess.run([*partition, "State=INACTIVE"], check=True)
    try:
        run = lab.train(steps=1)
        lab.until(lambda: lab.now(run).pending_reason)
        assert lab.now(run).attempt == 1, lab.trouble()
    finally:
        subprocess.run([*partition, "State=UP"], check=True)
    ended = lab.finish(run)
    assert (ended.state, ended.attempt) == ("succeeded", 1), lab.trouble()


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    made = ObjectStore()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
    yield made
    made.end()


def test_run_folders_in_an_object_store_are_read_served_and_removed_and_no_secret_is_seen(
    object_store: ObjectStore, hidden: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = object_store.write_keys(tmp_path / "keys.sh")
    storage = f"s3://{BUCKET}/flash"
    lab = Lab(hidden / "s3", storage, tmp_path / "node", tiny_model, env_file=str(keys))
    monkeypatch.setenv("PLANTED_KEY", PLANTED)
    arguments = {"needs_secret": True}
    # The store is looked at every ten seconds: fewer steps could lie between two looks.
    run = lab.train(steps=200, save_every=100, secrets=["PLANTED_KEY"], environment_args=arguments)
    everything = fsspec.filesystem("s3", skip_instance_cache=True)
    places = [Path(os.environ["SLURM_CONF"]).parent, lab.home / "attempts", tmp_path / "node"]

    def leaks() -> list[str]:
        """Where a value that nobody must see is stored or shown."""
        found = everything.cat(everything.find(f"{BUCKET}/flash", refresh=True), on_error="omit")
        for path in (path for place in places for path in place.rglob("*")):
            with suppress(OSError):  # folders, and files that are gone
                found[str(path)] = path.read_bytes()
        for process in psutil.process_iter(["cmdline"]):
            found[str(process)] = " ".join(process.info["cmdline"] or []).encode()
        found["log"] = lab.store.log(run.id).encode()
        assert len(found) > 20
        values = (PLANTED.encode(), SECRET_KEY.encode())
        return [name for name, body in found.items() if any(value in body for value in values)]

    # While it waits for the secrets, and while it uses them.
    early = ("start", "secrets", "artifacts", "model")
    for phases in (early, ("engine", "rollout", "train", "sync")):
        lab.until(lambda phases=phases: str(lab.now(run).phase).startswith(phases))
        assert leaks() == []
    ended = lab.finish(run)
    assert (ended.state, ended.step) == ("succeeded", 200), lab.trouble()
    assert leaks() == []
    assert "step 200/200" in lab.store.log(run.id)
    assert lab.store.checkpoint(run.id).path.startswith(f"{storage}/run-folders/{run.id}/checkpoints/200/")

    adapter = fetched_adapter(lab, run)
    weights = Path(adapter, "adapter_model.safetensors")
    first = weights.stat().st_ino
    assert not Path(adapter, "optimizer.pt").exists()  # nobody needs it here
    assert fetched_adapter(lab, run) == adapter
    assert weights.stat().st_ino == first  # it was not fetched again

    monkeypatch.setenv("FLASH_HOME", str(lab.home))
    assert [each["step"] for each in flash("checkpoints", run.id)["checkpoints"]] == [200, 100]
    flash("export", run.id, "--format", "adapter", "--to", str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "adapter_model.safetensors").is_file()
    wait_for(lambda: flash("deploy", run.id)["state"] != "starting", TIMEOUT_S)
    served = flash("deploy", run.id)
    assert served["state"] == "ready", served
    assert flash("undeploy", served["deployment"])["state"] in ("stopping", "stopped")

    assert removal.remove(lab.store, run.id).elsewhere is None
    assert not weights.exists()
    everything.invalidate_cache()
    assert everything.find(f"{BUCKET}/flash") == []


def fetched_adapter(lab: Lab, run: Run) -> str:
    adapter = references.find_subject(lab.store, run.id).adapter
    assert adapter
    return adapter["path"]


def is_queued(job: str) -> bool:
    """Whether Slurm has an attempt of it that has not ended."""
    command = ["squeue", "--noheader", "--format=%j"]
    return job in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commands_of(page: Path, block: int = 1) -> list[list[str]]:
    """The commands in a block of shell code, counted from 1."""
    text = page.read_text().split("```sh\n")[block].split("```")[0]
    return [shlex.split(line) for line in text.splitlines()]


def flash(*words: str) -> Any:
    """What a command prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "flash_mcp.cli", *words, "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return json.loads(done.stdout)


def installed_python(folder: Path) -> Path:
    """It finds flash-mcp wherever it starts, as one does that has it installed."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("block", [1, 2], ids=["folder", "s3"])
def test_the_commands_from_nothing_work_as_they_are_typed(block: int, hidden: Path, tmp_path, tiny_model, request):
    """But for the example's paths, and the size of the run."""
    keys = tmp_path / "keys.sh"
    if block == 2:
        store: ObjectStore = request.getfixturevalue("object_store")
        store.write_keys(keys)
    home = hidden / f"nothing-{block}"
    typed = (ROOT / "docs" / "targets.md").read_text().split("```sh\n")[block].split("```")[0]
    assert len(typed.splitlines()) <= 6
    small = f"--model {tiny_model} --steps 1 --batch-size 2 --group-size 2 --max-tokens 8 --max-length 512"
    real = {"/shared/flash": str(tmp_path / "shared"), "/shared/keys.sh": str(keys), "s3://bucket/": f"s3://{BUCKET}/",
            "--target lab": f"--target lab {small}"}  # fmt: skip
    for example, actual in real.items():
        typed = typed.replace(example, actual)
    shell = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    shell |= {"FLASH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-e"], input=typed, cwd=ROOT, env=shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    store_of_home = Store(home)
    (run,) = store_of_home.runs()
    deadline = time.monotonic() + TIMEOUT_S
    while not store_of_home.run(run.id).ended:
        assert time.monotonic() < deadline, [vars(store_of_home.run(run.id)), store_of_home.log(run.id)]
        time.sleep(0.2)
    assert (store_of_home.run(run.id).state, store_of_home.run(run.id).step) == ("succeeded", 1)
    store_of_home.close()


CONTAINERS = {
    "apptainer": ("exec --nv '/images/my flash.sif'", "shift 3", ""),
    "srun": ("--container-image=me/flash", "shift", "srun"),
}
"""How a container is entered: the arguments, what the program that stands in takes of them, and the program that is
started then: a step of Slurm's for pyxis, which extends srun."""


@pytest.mark.parametrize("name", CONTAINERS)
def test_python_may_be_a_command_that_enters_a_container(name: str, hidden: Path, tmp_path: Path, tiny_model: Path):
    """With a program in place of apptainer, or of srun with pyxis, that notes how it is called and enters nothing."""
    arguments, shift, inner = CONTAINERS[name]
    program = tmp_path / name
    step = slurm.find(inner) if inner else ""
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n{shift}\nexport IN_CONTAINER=yes\nexec {step} "$@"\n')
    program.chmod(0o755)
    python = f"{program} {arguments} {sys.executable}"
    lab = Lab(hidden / name, str(tmp_path / "shared"), tmp_path / "node", tiny_model, python=python)
    assert probe("lab", find_target(lab.home, "lab"))["missing"] == []
    run = lab.train(steps=1, slurm={"partition": "debug", "time": "30"})
    lab.until(lambda: find_worker(run))
    assert worker_of(run).environ()["IN_CONTAINER"] == "yes"
    limits = ["squeue", "--noheader", "--format=%P %l", f"--jobs={lab.now(run).handle}"]
    assert subprocess.run(limits, capture_output=True, text=True, check=True).stdout.split() == ["debug", "30:00"]
    assert lab.finish(run).state == "succeeded", lab.trouble()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and all(call.startswith(arguments.replace("'", "")) for call in calls)
    later = lab.train(steps=400, save_every=200)
    worker = lab.until_step(later, 1)
    queue.request_cancel(lab.store, later.id)
    assert lab.finish(later).state == "cancelled" and worker.wait(WAIT_S) is None


def test_a_run_goes_on_on_a_node_whose_caches_are_its_own(hidden: Path, tmp_path: Path, tiny_model: Path) -> None:
    """The state directory is on this machine, and each node's caches on a disk that only that node has."""
    caches = hidden / "caches"  # an empty file system of its own on each node
    lab = Lab(hidden / "apart", str(tmp_path / "shared"), caches, tiny_model)
    run = lab.train(max_attempts=1, steps=30, save_every=5)
    seen: list[tuple[str, list[str]]] = []
    for step, attempt in ((6, 1), (11, 2)):
        lab.until(lambda attempt=attempt: lab.now(run).attempt == attempt and lab.now(run).state == "running")
        worker = lab.until_step(run, step)
        cached = Path(f"/proc/{worker.pid}/root{caches}").glob("machines/*/artifacts/*")
        where = ["squeue", "--noheader", "--format=%N", f"--jobs={lab.now(run).handle}"]
        node = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
        seen.append((node, sorted(path.name for path in cached if path.is_dir())))
        if attempt == 1:
            subprocess.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test"], check=True)
            subprocess.run(["scontrol", "requeue", str(lab.now(run).handle)], check=True)
    subprocess.run(["scontrol", "update", f"NodeName={seen[0][0]}", "State=RESUME"], check=True)
    ended = lab.finish(run)
    assert (ended.state, ended.step, ended.attempt) == ("succeeded", 30, 2), lab.trouble()
    assert [row.step for row in lab.store.metrics(run.id)] == list(range(1, 31))
    (first, of_first), (second, of_second) = seen
    assert {first, second} == {*slurm.NODES}
    assert of_first == of_second and len(of_first) == 2  # model and environment, on each
    assert not caches.exists()


def test_the_commands_of_the_page_work_as_written(hidden: Path, tmp_path: Path, tiny_model: Path, monkeypatch):
    """But for the example's paths, its model and its environment."""
    home = hidden / "page"
    lab = Lab(home, str(tmp_path / "unused"), tmp_path / "node", tiny_model)
    remove_target(home, "lab")
    (home / "settings.toml").write_text("[cost]\nprice_per_hour = 5.0\n")  # dearer than the lab
    python = installed_python(tmp_path)
    monkeypatch.setenv("FLASH_HOME", str(home))
    real = {"/shared/flash": str(tmp_path / "shared"), "/opt/flash/bin/python": str(python), "calculator": "vowels"}
    printed: dict[str, Any] = {}
    page = ROOT / "docs" / "targets.md"
    added = ["flash-mcp target add lab --engine slurm --storage /shared/flash --python /opt/flash/bin/python",
             "flash-mcp train --environment calculator --target lab"]  # fmt: skip
    for program, *arguments in [*map(shlex.split, added), *commands_of(page, 3), *commands_of(page, 6)]:
        assert program == "flash-mcp"
        command = [real.get(word, word) for word in arguments]
        if "bare" in command:  # its job would install all packages from an index
            command.append("--unproved")
        if command[0] in ("train", "evaluate"):
            command += ["--model", str(lab.model), "--max-tokens", "8", "--max-length", "256"]
        if command[0] == "train":
            command += ["--steps", "1", "--batch-size", "2", "--group-size", "2"]
        printed[" ".join(command[:2])] = flash(*command)
    checked = printed["target check"]
    assert (checked["version"], checked["missing"]) == (__version__, []) and abs(checked["clock_s"]) < 120
    assert "CPUs" in checked["devices"][-1]
    cards = find_target(home, "lab").cards
    assert cards and cards.memory_gib == checked["cards"]["memory_gib"] > 0
    assert find_target(home, "lab").storage == real["/shared/flash"]
    assert find_target(home, "lab").models == ("node" if checked["reaches_hub"] else "server")
    assert 0 <= checked["list_lag_s"] < 60
    runs = [run for run in lab.store.runs() if run.target == "lab"]
    assert len(runs) == 2
    deadline = time.monotonic() + TIMEOUT_S
    while {lab.now(run).state for run in runs} != {"succeeded"}:
        assert time.monotonic() < deadline, lab.trouble()
        time.sleep(0.2)

    ((_, *arguments),) = commands_of(page, 7)
    (trained,) = [run for run in runs if lab.store.checkpoints(run.id)]
    command = [trained.id if word == "run-2f9k1c8d" else word for word in arguments]
    while (served := flash(*command))["state"] == "starting":
        assert time.monotonic() < deadline, served
    assert served["base_url"].startswith("https://")
    assert flash("chat", "hello", "--max-tokens=4")["adapter"]["completion_tokens"] > 0
    (row,) = lab.store.deployments()
    assert is_queued(str(row.server_run))
    while flash("undeploy")["state"] != "stopped":
        assert time.monotonic() < deadline
    assert not is_queued(str(row.server_run))
    while (tmp_path / "shared" / "run-folders" / str(row.server_run)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
