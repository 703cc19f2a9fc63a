"""The launcher's contract, over every implementation, and what the local one does beyond it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from pathlib import Path

import psutil
import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.supervisor.launch.api import ApiLauncher
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Launch, Launcher
from flash_mcp.supervisor.launch.local import REGISTER_AND_EXEC, LocalLauncher, ProcessRecord
from flash_mcp.supervisor.launch.ray import RayLauncher
from flash_mcp.supervisor.launch.sky import SkyLauncher
from flash_mcp.supervisor.launch.slurm import LIST_EVERY_S, Queue, SlurmLauncher, with_gpus
from tests import engines, ray_cluster, slurm, sshd
from tests.memory_launcher import MemoryLauncher
from tests.places import ROOT
from tests.refuse import refusing
from tests.waiting import WAIT_S, wait_for
from tests.watch import is_running

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
PARENT = [
    sys.executable,
    "-c",
    """
import os, pathlib, signal, sys
child = os.fork()
if child:
    pathlib.Path(sys.argv[1]).write_text(str(child))
signal.pause()
""",
]
"""Writes the pid of its child to the file that is named next."""


@dataclass
class Harness:
    """`reopen` makes the launcher as another process would (on an engine with a tag), `end` lets an attempt end."""

    reopen: Callable[..., Launcher]
    end: Callable[[Handle], None]
    logs: Path
    run_id: str = "run-1"
    """Engines find attempts by their keys: each test has keys of its own."""
    submitted: list[Handle] = field(default_factory=list[Handle])

    def launch(self, attempt: int = 1, command: list[str] | None = None) -> Launch:
        log = self.logs / f"log.{attempt}"
        variables = {"PATH": os.environ["PATH"], "OWN_KEY": f"{self.run_id}-{attempt}"}
        return Launch(self.run_id, attempt, command or SLEEPER, variables, log)

    def submit(self, launcher: Launcher, attempt: int = 1) -> Handle:
        handle = launcher.submit(self.launch(attempt))
        self.submitted.append(handle)
        return handle


def memory(tmp_path: Path) -> Harness:
    statuses: dict[str, JobStatus] = {}
    return Harness(
        lambda: MemoryLauncher(statuses),
        lambda handle: statuses.update({handle.key: JobStatus("gone", "exit code 0")}),
        tmp_path,
    )


def local(tmp_path: Path) -> Harness:
    return Harness(
        lambda: LocalLauncher(tmp_path / "records", gpus=["0", "1"]),
        lambda handle: os.kill(int(handle.id), signal.SIGKILL),
        tmp_path / "run",
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A real Slurm of two nodes."""
    engines.need(slurm.missing())
    with slurm.running():
        yield


def on_slurm(tmp_path: Path) -> Harness:
    def end(handle: Handle) -> None:
        subprocess.run(["scancel", "--full", "--signal=KILL", handle.id], check=True)

    return Harness(lambda tag="flash-mcp-1": SlurmLauncher(2, tag=tag), end, tmp_path / "run")


@pytest.fixture(scope="module")
def ray() -> Iterator[ray_cluster.Cluster]:
    """A real Ray of two nodes."""
    engines.need(ray_cluster.missing())
    with ray_cluster.running() as made:
        yield made


def on_ray(logs: Path, cluster: ray_cluster.Cluster) -> Harness:
    def kill(handle: Handle) -> bool:
        processes = [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("OWN_KEY") == handle.key
        ]
        for process in processes:
            process.kill()
        return bool(processes)

    def end(handle: Handle) -> None:
        wait_for(lambda: kill(handle))  # Ray says that a job runs before it has started its program

    token = str(cluster.token_file)
    return Harness(lambda tag="": RayLauncher(cluster.address, 2, token_file=token, tag=tag), end, logs)


SLURM = pytest.param(on_slurm, marks=pytest.mark.slow)
RAY = pytest.param(on_ray, marks=pytest.mark.slow)


@pytest.fixture(params=[memory, local, SLURM, RAY], ids=["memory", "local", "slurm", "ray"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    if request.param is on_slurm:
        request.getfixturevalue("cluster")
    more = [request.getfixturevalue("ray")] if request.param is on_ray else []
    made: Harness = request.param(tmp_path, *more)
    made.run_id = f"run-{tmp_path.name}"
    yield made
    launcher = made.reopen()
    for handle in made.submitted:
        launcher.cancel(handle)


def state(launcher: Launcher, handle: Handle) -> str:
    return launcher.poll([handle])[handle.key].state


def is_gone(launcher: Launcher, handle: Handle) -> bool:
    return state(launcher, handle) == "gone"


def test_a_submitted_attempt_comes_alive_and_whoever_submits_its_key_again_finds_it(harness: Harness) -> None:
    launcher, later = harness.reopen(), harness.reopen()
    assert launcher.poll([]) == {}
    handle = harness.submit(launcher)
    assert handle.key == f"{harness.run_id}-1" and state(launcher, handle) in ("pending", "alive")
    assert harness.submit(launcher) == harness.submit(later) == handle
    for each in (launcher, later):
        wait_for(lambda each=each: state(each, handle) == "alive")
    addresses = launcher.addresses_of(handle)
    if isinstance(launcher, (SlurmLauncher, RayLauncher)):
        assert addresses and all(map(IPv4Address, addresses))
    else:
        assert addresses is None
    assert harness.submit(launcher, 2) != handle


def test_an_attempt_that_ended_stays_ended_when_its_key_is_submitted_again(harness: Harness) -> None:
    launcher = harness.reopen()
    handle = harness.submit(launcher)
    wait_for(lambda: state(launcher, handle) == "alive")
    harness.end(handle)
    wait_for(lambda: is_gone(launcher, handle))
    assert launcher.poll([handle])[handle.key].detail
    for again in (launcher, harness.reopen()):
        assert harness.submit(again).key == handle.key and is_gone(again, handle)


def test_a_cancelled_attempt_is_gone_and_cancelling_it_again_is_harmless(harness: Harness) -> None:
    handle = harness.submit(harness.reopen())
    later = harness.reopen()
    later.cancel(handle)
    wait_for(lambda: is_gone(later, handle))
    later.cancel(handle)
    assert is_gone(later, handle)


def test_an_attempt_that_nobody_submitted_is_gone(harness: Harness) -> None:
    launcher = harness.reopen()
    handle = Handle(f"{harness.run_id}-3", "999999")
    assert is_gone(launcher, handle)
    launcher.cancel(handle)


# -- Slurm and Ray ---------------------------------------------------------------------------------

on_slurm_alone = pytest.mark.parametrize("harness", [SLURM], ids=["slurm"], indirect=True)
remote = pytest.mark.parametrize("harness", [SLURM, RAY], ids=["slurm", "ray"], indirect=True)


@remote
def test_what_waits_for_a_node_is_pending_with_the_engines_reason(harness: Harness) -> None:
    launcher = harness.reopen()
    reason = "Slurm: Resources" if isinstance(launcher, SlurmLauncher) else "waiting for resources"
    first, second, third = (harness.submit(launcher, attempt) for attempt in (1, 2, 3))
    wait_for(lambda: reason in launcher.poll([third])[third.key].detail)
    assert state(launcher, third) == "pending"
    launcher.cancel(first)
    for waiting in (third, second):
        wait_for(lambda waiting=waiting: state(launcher, waiting) == "alive")


@remote
def test_a_job_gets_its_own_variables_and_nothing_of_this_process(harness: Harness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED_KEY", "nobody must see this")
    launcher = harness.reopen()
    launch = harness.launch(command=["/usr/bin/env"])
    handle = launcher.submit(replace(launch, environment={"GIVEN": 'it\'s "quoted" ${HOME}'}))
    wait_for(lambda: is_gone(launcher, handle))
    wait_for(lambda: launch.log and launch.log.exists())
    printed = (harness.logs / "log.1").read_text()
    assert 'GIVEN=it\'s "quoted" ${HOME}\n' in printed and "PLANTED_KEY" not in printed
    assert "OMP_NUM_THREADS" not in printed or isinstance(launcher, SlurmLauncher)


@remote
def test_a_job_that_somebody_ends_was_preempted_and_one_that_fails_was_not(harness: Harness) -> None:
    launcher = harness.reopen()
    failed = launcher.submit(harness.launch(2, ["/bin/false"]))
    wait_for(lambda: is_gone(launcher, failed))
    status = launcher.poll([failed])[failed.key]
    on_slurm = isinstance(launcher, SlurmLauncher)
    said = f"Slurm job {failed.id}: FAILED" if on_slurm else "exit code 1"
    assert (status.is_preempted, said in status.detail) == (False, True)
    stopped = harness.submit(launcher)
    wait_for(lambda: state(launcher, stopped) == "alive")
    if on_slurm:
        subprocess.run(["scancel", stopped.id], check=True)
    else:
        launcher.cancel(stopped)
    wait_for(lambda: is_gone(launcher, stopped))
    status = launcher.poll([stopped])[stopped.key]
    assert status.is_preempted and status.is_by_hand


@remote
def test_the_jobs_of_a_state_directory_are_listed_and_no_others(harness: Harness) -> None:
    mine, other = harness.reopen(tag="flash-mcp-3"), harness.reopen(tag="flash-mcp-4")
    first, second = harness.submit(mine), harness.submit(other, 2)
    nobodys = harness.reopen(tag="")  # a new one looks anew at Slurm's list, which serves all for ten seconds
    third = harness.submit(nobodys, 3)
    assert (mine.under_way(), other.under_way(), nobodys.under_way()) == ([first], [second], [])
    for launcher, handle in ((mine, first), (other, second), (nobodys, third)):
        launcher.cancel(handle)
    wait_for(lambda: mine.under_way() == [])


# -- Ray -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_ray_that_refuses_or_does_not_answer_is_named(ray: ray_cluster.Cluster, monkeypatch: pytest.MonkeyPatch):
    launch = Launch("run-refused", 1, SLEEPER, {}, None)
    with pytest.raises(FlashError, match="token_file") as caught:
        RayLauncher(ray.address).submit(launch)
    assert caught.value.code == "target_refused"
    token = str(ray.token_file)
    monkeypatch.setattr("flash_mcp.supervisor.launch.ray.TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        launcher = RayLauncher(f"http://127.0.0.1:{silent.getsockname()[1]}", token_file=token)
        handle = Handle("run-x-1", "run-x-1")
        assert launcher.poll([handle])[handle.key].state == "unknown"
        with pytest.raises(FlashError) as caught:
            launcher.submit(launch)
    assert caught.value.code == "target_unreachable"


def test_a_ray_whose_agents_are_not_up_yet_is_asked_again() -> None:
    """Ray calls that an error of its own; a refusal would use up an attempt."""
    body = b"No available agent to submit job, please try again later."
    with answering(("500 Internal Server Error", body)) as address, pytest.raises(FlashError) as caught:
        RayLauncher(address).submit(Launch("run-early", 1, SLEEPER, {}, None))
    assert "--dashboard-agent-listen-port" in caught.value.fix and caught.value.code == "target_unreachable"


@pytest.mark.parametrize(("tag", "is_ours"), [("flash-mcp-1", True), ("flash-mcp-2", False)])
def test_a_job_of_ray_with_an_attempts_key_is_ours_only_with_our_tag(tag: str, is_ours: bool) -> None:
    refused = b"Job with submission_id run-1-1 already exists."
    job = {"submission_id": "run-1-1", "metadata": {"flash-mcp": tag}}
    answers = ("500 Internal Server Error", refused), ("200 OK", json.dumps([job]).encode())
    expected = nullcontext() if is_ours else pytest.raises(FlashError, match="another state directory")
    with answering(*answers) as address, expected:
        handle = RayLauncher(address, tag="flash-mcp-1").submit(Launch("run-1", 1, SLEEPER, {}, None))
        assert handle == Handle("run-1-1", "run-1-1")


@contextmanager
def answering(*answers: tuple[str, bytes]) -> Generator[str]:
    """The address of a server that answers one request after another, each with a status and a body."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(WAIT_S)

        def answer() -> None:
            for status, body in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                    while connection.recv(1 << 16):  # until the client closes it
                        pass

        answered = pool.submit(answer)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        answered.result()


@pytest.mark.parametrize("engine", [RayLauncher, SkyLauncher])
@pytest.mark.parametrize("status", ["200 OK", "302 Found", "504 Gateway Timeout"])
def test_a_page_of_a_proxy_is_no_answer_of_the_engine(engine: type[ApiLauncher], status: str, monkeypatch):
    handle, page = Handle("run-x-1", "7"), (status, b"<html>Log in</html>")
    monkeypatch.setattr(SkyLauncher, "_list", lambda *_, **__: [])  # what comes before a launch
    with (
        answering((status, b"<html>Log in</html>")) as address,
        pytest.raises(FlashError, match=r"^\[target_unreachable"),
    ):
        engine(address).submit(Launch("run-x", 1, SLEEPER, {}, None))
    if engine is RayLauncher:
        with answering(page) as address:
            assert engine(address).poll([handle])[handle.key].state == "unknown"


# -- Slurm -----------------------------------------------------------------------------------------


def stand_in(folder: Path, commands: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that run these lines of a shell, first in PATH."""
    for name, lines in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@on_slurm_alone
def test_all_targets_of_a_cluster_share_one_list_of_jobs_in_ten_seconds(harness: Harness, tmp_path: Path, monkeypatch):
    stand_in(tmp_path, {"squeue": f'echo >>{tmp_path}/calls\nexec {slurm.find("squeue")} "$@"'}, monkeypatch)
    targets = [SlurmLauncher(2), SlurmLauncher(2, ["--partition=debug"])]
    handles = [harness.submit(launcher, attempt) for attempt, launcher in enumerate(targets, 1)]
    calls = tmp_path / "calls"
    calls.write_text("")
    began = time.monotonic()
    while time.monotonic() - began < LIST_EVERY_S:
        for launcher, handle in zip(targets, handles, strict=True):
            assert state(launcher, handle) != "gone"
        time.sleep(0.1)
    assert len(calls.read_text().splitlines()) <= 2  # its beginning may need one, and its end


@pytest.mark.slow
def test_options_that_slurm_refuses_are_an_error_with_its_words(cluster: None) -> None:
    launcher = SlurmLauncher(options=["--partition=nowhere"])
    with pytest.raises(FlashError, match=r"^\[target_refused.*invalid partition specified: nowhere"):
        launcher.submit(Launch("run-refused", 1, SLEEPER, {}, None))


@pytest.mark.slow
def test_a_controller_that_does_not_answer_is_an_unknown_state_within_a_bound(cluster: None, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_port = f"SlurmctldPort={silent.getsockname()[1]}"
        config = Path(os.environ["SLURM_CONF"]).read_text()
        other = tmp_path / "slurm.conf"
        other.write_text(re.sub(r"SlurmctldPort=\d+", silent_port, config))
        monkeypatch.setenv("SLURM_CONF", str(other))
        monkeypatch.setattr("flash_mcp.supervisor.launch.slurm.TIMEOUT_S", 0.5)
        handle = Handle("run-x-1", "1")
        assert SlurmLauncher().poll([handle])[handle.key].state == "unknown"
        with pytest.raises(FlashError, match=r"^\[target_unreachable"):
            SlurmLauncher().submit(Launch("run-x", 1, SLEEPER, {}, None))


# -- the local launcher ----------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Harness]:
    made = local(tmp_path)
    yield made
    for attempt in (1, 2, 3):
        made.reopen().cancel(Handle(f"run-1-{attempt}", ""))


def test_output_goes_to_the_log_and_the_exit_code_is_told(here: Harness) -> None:
    launcher = here.reopen()
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    handle = launcher.submit(here.launch(command=[sys.executable, "-c", code]))
    wait_for(lambda: state(launcher, handle) == "gone")
    assert launcher.poll([handle])[handle.key].detail == "exit code 3"
    assert sorted((here.logs / "log.1").read_text().split()) == ["err", "out"]
    nowhere = launcher.submit(here.launch(2, command=["/no/such/program"]))
    wait_for(lambda: state(launcher, nowhere) == "gone")
    assert "/no/such/program" in (here.logs / "log.2").read_text()


def test_a_stopped_attempt_is_alive_and_can_be_cancelled(here: Harness) -> None:
    launcher = here.reopen()
    handle = launcher.submit(here.launch())
    os.kill(int(handle.id), signal.SIGSTOP)
    assert state(launcher, handle) == "alive"
    launcher.cancel(handle)
    assert state(launcher, handle) == "gone"


def test_cancelling_ends_children_too_even_those_whose_leader_is_gone(here: Harness, tmp_path: Path) -> None:
    note = tmp_path / "child"
    launcher = here.reopen()
    handle = launcher.submit(here.launch(command=[*PARENT, str(note)]))
    wait_for(lambda: note.exists() and note.read_text())
    child = int(note.read_text())
    os.kill(int(handle.id), signal.SIGKILL)
    wait_for(lambda: state(launcher, handle) == "gone")
    assert is_running(child)
    launcher.cancel(handle)
    wait_for(lambda: not is_running(child))


def leave_record(here: Harness, stat: list[str]) -> Launcher:
    """The launcher once an attempt had this process's pid, and had started a hundredth of a second before."""
    launcher, boot = here.reopen(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    stat[21] = str(int(stat[21]) - 1)
    (here.logs.parent / "records" / "run-1-1").write_text(f"0 {boot} {' '.join(stat)}")
    return launcher


def test_another_process_with_the_attempts_old_pid_is_left_alone(here: Harness) -> None:
    bystander = subprocess.Popen(SLEEPER, start_new_session=True)
    try:
        launcher = leave_record(here, Path(f"/proc/{bystander.pid}/stat").read_text().split(" "))
        handle = launcher.submit(here.launch())
        assert state(launcher, handle) == "gone"
        launcher.cancel(handle)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_foreign_group_whose_leader_had_the_attempts_pid_is_left_alone(here: Harness, tmp_path: Path) -> None:
    """The leader of that group has ended as well: nothing but its members shows whose it is."""
    note = tmp_path / "member"
    leader = subprocess.Popen([*PARENT, str(note)], start_new_session=True)
    wait_for(lambda: note.exists() and note.read_text())
    member = int(note.read_text())
    try:
        stat = Path(f"/proc/{leader.pid}/stat").read_text().split(" ")
        leader.kill()
        leader.wait()
        launcher = leave_record(here, stat)
        launcher.cancel(launcher.submit(here.launch()))
        assert is_running(member)
    finally:
        os.kill(member, signal.SIGKILL)


def test_an_attempt_of_before_the_last_boot_is_gone(here: Harness) -> None:
    launcher = here.reopen()
    handle = launcher.submit(here.launch())
    record = here.logs.parent / "records" / "run-1-1"
    slot, boot, stat = record.read_text().split(" ", 2)
    record.write_text(f"{slot} {boot[::-1]} {stat}")
    assert launcher.poll([handle])[handle.key] == JobStatus("gone", "the machine was started anew", is_preempted=True)
    record.write_text(f"{slot} {boot} {stat}")  # so that it is found again and ended
    assert state(launcher, handle) == "alive"


def test_each_attempt_gets_a_device_of_its_own_until_none_is_left(here: Harness) -> None:
    launcher = here.reopen()
    code = "import os, signal; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); signal.pause()"
    handles = [launcher.submit(here.launch(attempt, [sys.executable, "-c", code])) for attempt in (1, 2)]
    logs = [here.logs / f"log.{attempt}" for attempt in (1, 2)]
    wait_for(lambda: all(log.read_text() for log in logs))
    assert [log.read_text() for log in logs] == ["0\n", "1\n"]
    with pytest.raises(FlashError, match="not_ready"):
        here.reopen().submit(here.launch(3))
    launcher.cancel(handles[0])
    here.reopen().submit(here.launch(3, [sys.executable, "-c", code]))
    wait_for(lambda: (here.logs / "log.3").read_text())
    assert (here.logs / "log.3").read_text() == "0\n"


STARTER = f"""
import os, signal, sys
from pathlib import Path
from flash_mcp.supervisor.launch.base import Launch
from flash_mcp.supervisor.launch.local import LocalLauncher
folder = Path(sys.argv[1])
launcher = LocalLauncher(folder / "records", gpus=[])
def submit():
    return launcher.submit(Launch("run-1", 1, {SLEEPER!r}, dict(os.environ), folder / "log"))
"""


@pytest.mark.slow
def test_many_starters_of_one_key_start_one_attempt(here: Harness) -> None:
    code = f"{STARTER}print('ready', flush=True)\nsys.stdin.read()\nprint(submit().id)"
    command = [sys.executable, "-c", code, str(here.logs.parent)]
    pipe = subprocess.PIPE
    starters = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(6)]
    let_go_at_once(starters)
    pids = {starter.communicate(timeout=WAIT_S)[0].strip() for starter in starters}
    record = ProcessRecord.read(here.logs.parent / "records" / "run-1-1")
    assert record and pids == {str(record.pid)} and record.is_alive()
    wait_for(lambda: len(list((here.logs.parent / "records").iterdir())) == 1)


def let_go_at_once(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.close()
        child.stdin = None


@pytest.mark.parametrize("without", ["", "link,linkat"])
def test_a_key_that_was_registered_in_between_is_not_started_again(tmp_path: Path, without: str) -> None:
    words = [str(tmp_path / "record"), "0", "touch", str(tmp_path / "started")]
    command = [*(refusing(without) if without else []), "/bin/sh", "-c", REGISTER_AND_EXEC, *words]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == 0
    (tmp_path / "started").unlink()
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False, cwd=ROOT).returncode == 126
    assert not (tmp_path / "started").exists() and [path.name for path in tmp_path.iterdir()] == ["record"]


def test_of_many_starters_without_hard_links_one_registers(tmp_path: Path) -> None:
    script = """
for starter in 1 2 3 4 5 6 7 8; do
    /bin/sh -c "$0" "$1" 0 sh -c 'echo $$' & pids="$pids $!"
done
wait
"""
    command = [*refusing("link,linkat"), "/bin/sh", "-c", script, REGISTER_AND_EXEC]
    done = subprocess.run([*command, str(tmp_path / "record")], cwd=ROOT, capture_output=True, text=True, check=True)
    (pid,) = done.stdout.split()
    record = ProcessRecord.read(tmp_path / "record")
    assert record and record.pid == int(pid)
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_an_attempt_outlives_whoever_started_it(here: Harness) -> None:
    command = [sys.executable, "-c", f"{STARTER}submit()\nos.killpg(0, signal.SIGKILL)", str(here.logs.parent)]
    starter = subprocess.run(command, start_new_session=True, timeout=WAIT_S, check=False)
    assert starter.returncode == -signal.SIGKILL
    launcher = here.reopen()
    handle = launcher.submit(here.launch())
    assert state(launcher, handle) == "alive"
    launcher.cancel(handle)
    assert state(launcher, handle) == "gone"


def test_a_run_of_several_gpus_asks_slurm_for_them_in_the_targets_own_option() -> None:
    options = ["--partition=gpu", "--gres=gpu:a100:1", "--gpus=1", "--nodes=1"]
    assert with_gpus(options, 1) == options
    assert with_gpus(options, 4) == ["--partition=gpu", "--gres=gpu:a100:4", "--gpus=4", "--nodes=1"]


@pytest.mark.slow
def test_commands_over_ssh_share_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.need(sshd.missing())
    with sshd.running(tmp_path) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        before = (tmp_path / "sshd.log").read_text().count("Accepted")
        launcher = SlurmLauncher(ssh="lab")
        assert [launcher._run(["echo", word]) for word in ("a", "b", "c")] == ["a\n", "b\n", "c\n"]
        assert (tmp_path / "sshd.log").read_text().count("Accepted") == before + 1


def test_ssh_has_a_folder_for_its_sockets_though_the_one_before_was_removed(tmp_path: Path, monkeypatch):
    ssh = 'for word; do case "$word" in -oControlPath=*) dirname "${word#*=}";; esac; done'
    stand_in(tmp_path, {"ssh": ssh}, monkeypatch)
    launcher = SlurmLauncher(ssh="lab")
    first, again = (Path(launcher._run(["true"]).strip()) for _ in range(2))
    assert first == again and first.is_dir()
    shutil.rmtree(first)  # it may hold the sockets of other tests
    second = Path(launcher._run(["true"]).strip())
    assert second != first and second.is_dir() and second.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("said", "number"), [("Welcome to node 7\n4711;lab", "4711"), ("4711", "4711"), ("hello", "")])
def test_a_greeting_of_the_host_is_no_number_of_a_job(said: str, number: str, tmp_path: Path, monkeypatch):
    stand_in(tmp_path, {"squeue": "true", "sbatch": f"cat >/dev/null\necho '{said}'"}, monkeypatch)
    launch = Launch("run-1", 1, SLEEPER, {}, None)
    if number:
        assert SlurmLauncher().submit(launch).id == number
    else:
        with pytest.raises(FlashError, match="no number of a job: 'hello'"):
            SlurmLauncher().submit(launch)


OURS = {"%i": "7", "%j": "run-1-1", "%k": "flash-mcp-1", "%T": "RUNNING", "%r": "None", "%N": "n1"}
LINE = "7|run-1-1|RUNNING|flash-mcp-1|root|None"


def squeue_of(tmp_path: Path, listed: list[dict[str, str]], asked: list[dict[str, str]]) -> str:
    """It prints these jobs in the form that it is asked for, and others when it is asked for one job."""
    (tmp_path / "jobs.json").write_text(json.dumps([listed, asked]))
    code = f"""
import json, re, sys
words = " ".join(sys.argv)
assert "--me " in words
form = re.search("--format=(.*)", words)[1]
for job in json.load(open({str(tmp_path / "jobs.json")!r}))["--jobs=7 " in words]:
    print(re.sub("%.", lambda field: job[field[0]], form))
"""
    return f'{sys.executable} - "$@" <<"END"{code}END'


@pytest.mark.parametrize(
    ("listed", "asked", "is_ours"),
    [
        ([OURS], [OURS], True),
        *(
            pytest.param(listed, asked, False, marks=pytest.mark.hostile("jobs"))
            for listed, asked in [
                ([{**OURS, "%k": "flash-mcp-2"}], []),
                ([{**OURS, "%k": "(null)"}], []),
                ([{**OURS, "%j": f"x\n{LINE}"}, {**OURS, "%j": "run-1-1|RUNNING|flash-mcp-1|root|x"}], []),
                ([{**OURS, "%j": "x", "%k": f"x\n{LINE}\n"}, {**OURS, "%j": "run-1-1\n"}], []),
                ([OURS], []),
                ([OURS], [{**OURS, "%j": "another's, with the number of one that ended"}]),
                ([OURS], [{**OURS, "%k": "flash-mcp-2"}]),
            ]
        ),
    ],
)
def test_a_job_is_taken_over_and_ended_only_if_slurm_says_twice_that_it_is_ours(
    listed: list[dict[str, str]], asked: list[dict[str, str]], is_ours: bool, tmp_path: Path, monkeypatch
) -> None:
    ended = tmp_path / "ended"
    commands = {"sbatch": "cat >/dev/null\necho 4711", "scancel": f"echo $* >>{ended}"}
    stand_in(tmp_path, {**commands, "squeue": squeue_of(tmp_path, listed, asked)}, monkeypatch)
    launcher = SlurmLauncher(tag="flash-mcp-1")
    monkeypatch.setattr(launcher, "_queue", Queue())
    assert launcher.submit(Launch("run-1", 1, SLEEPER, {}, None)).id == ("7" if is_ours else "4711")
    launcher.cancel(Handle("run-1-1", "7"))
    assert ended.exists() == is_ours


@on_slurm_alone
def test_names_and_comments_of_other_jobs_do_not_pass_for_an_attempt(harness: Harness) -> None:
    launcher = harness.reopen()
    line = LINE.replace("run-1", harness.run_id)
    sbatch = ["sbatch", "--parsable", f"--job-name=x\n{line}", f"--comment=x\n{line}", "--wrap=sleep 100"]
    other = subprocess.run(sbatch, capture_output=True, text=True, check=True).stdout.strip()
    handle = harness.submit(launcher)
    assert handle.id != other
    wait_for(lambda: launcher.under_way() == [handle])
    launcher.cancel(Handle(handle.key, other))
    listed = subprocess.run(["squeue", f"--jobs={other}", "--noheader", "--format=%T"], capture_output=True, text=True)
    assert listed.stdout.strip() in ("RUNNING", "PENDING")
    subprocess.run(["scancel", other], check=True)
    launcher.cancel(handle)


@pytest.mark.parametrize(
    ("said", "is_over"),
    [
        ("scancel: error: Kill job error on job id 7: Access/permission denied", False),
        ("flash@lab: Permission denied (publickey).", False),
        ("scancel: error: Kill job error on job id 7: Invalid job id specified", True),
        ("scancel: error: Kill job error on job id 7: Job/step already completing or completed", True),
        ("", True),
    ],
)
def test_a_job_counts_as_cancelled_only_if_slurm_says_that_it_is_over(said: str, is_over: bool, tmp_path, monkeypatch):
    squeue = squeue_of(tmp_path, [], [OURS])
    stand_in(tmp_path, {"squeue": squeue, "scancel": f"echo '{said}' >&2\nexit 1"}, monkeypatch)
    launcher, handle = SlurmLauncher(tag="flash-mcp-1"), Handle("run-1-1", "7")
    if is_over:
        launcher.cancel(handle)
        return
    with pytest.raises(FlashError, match=r"^\[target_refused.*refused"):
        launcher.cancel(handle)
