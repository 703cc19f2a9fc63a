"""Two state directories on one machine do not share a GPU."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from flash_mcp.cli import doctor
from flash_mcp.protocol import device_locks
from flash_mcp.protocol.errors import FlashError
from flash_mcp.supervisor.launch import devices
from flash_mcp.supervisor.launch.base import Handle
from flash_mcp.supervisor.launch.local import LocalLauncher, ProcessRecord, devices_in_use
from flash_mcp.tools.shared.waiting import obstacles
from tests.places import ROOT
from tests.supervisor.test_launcher import local, state
from tests.supervisor.test_loop import TIMEOUT_S, Bench
from tests.waiting import WAIT_S, wait_for

UUID = "GPU-11111111-2222-3333-4444-555555555555"
SUPERVISE = """
import sys
from pathlib import Path
from flash_mcp.supervisor.launch.base import Handle
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.supervisor.loop import Supervisor, supervise
from tests.supervisor.test_loop import HASTE, WORKER

def make(base):
    launcher = LocalLauncher(base / "attempts", gpus=["0"])
    return Supervisor(base, launcher=launcher, worker=WORKER, timeouts=HASTE)

supervise(Path(sys.argv[1]), make)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks are, and an nvidia-smi that knows one GPU."""
    programs, locks = tmp_path / "bin", tmp_path / "locks"
    programs.mkdir()
    locks.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '0, {UUID}'\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FLASH_DEVICE_LOCKS", str(locks))
    return locks


@pytest.fixture
def benches(folder: Path, tmp_path: Path) -> Iterator[list[Bench]]:
    made = [Bench(tmp_path / name) for name in ("one", "two")]
    yield made
    for bench in made:
        bench.clean_up()


def start_supervisor(bench: Bench) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SUPERVISE, str(bench.base)], cwd=ROOT)


@pytest.mark.slow
def test_a_run_waits_for_a_card_that_another_state_directory_uses(benches: list[Bench]) -> None:
    one, two = benches
    first = one.train({"1": {"at": 2, "do": "hold"}}, max_attempts=1)
    with start_supervisor(one) as supervisor:
        wait_for(lambda: one.step(first) == 2)
        supervisor.kill()  # the attempt goes on, and keeps the card
    second = two.train({"steps": 2})
    with start_supervisor(two) as supervisor:
        wait_for(lambda: devices_in_use(two.base))
        (warning,) = obstacles(two.store, two.store.run(second.id))
        assert f"every GPU is used by the state directory {one.base}" in warning
        assert two.store.run(second.id).state == "queued"
        assert devices_in_use(one.base) == []
        one.kill(first)
        wait_for(lambda: two.store.run(second.id).state == "succeeded")
        assert two.told(second) == [(1, "launched")]
        assert supervisor.wait(TIMEOUT_S) == 0


def test_a_slot_is_free_when_the_other_state_directorys_attempt_ends(folder: Path, tmp_path: Path) -> None:
    here, other = local(tmp_path / "here"), tmp_path / "other"
    held = device_locks.take(UUID, other)
    assert held is not None
    launcher = LocalLauncher(tmp_path / "here" / "records", gpus=["0"])
    assert launcher.capacity == 0
    with pytest.raises(FlashError, match=f"not_ready.*{UUID} is used by the state directory {other}"):
        launcher.submit(here.launch())
    os.close(held)
    assert launcher.capacity == 1
    handle = launcher.submit(here.launch())
    try:
        assert device_locks.users(UUID, other) == [f"the state directory {tmp_path / 'here'}"]
        assert launcher.capacity == 1  # its own attempt is counted elsewhere
        assert ProcessRecord.read(tmp_path / "here" / "records" / "run-1-1")
    finally:
        launcher.cancel(handle)
    assert state(launcher, handle) == "gone"
    assert device_locks.users(UUID, other) == []


def test_a_card_is_free_once_an_attempt_is_ended_though_a_child_of_its_shell_takes_long_to_die(folder: Path, tmp_path):
    is_large = tmp_path / "is large"
    large = f"memory = b'x' * 2**29; pathlib.Path({str(is_large)!r}).touch(); signal.pause()"
    program = folder.parent / "bin" / "rm"  # what the shell calls before it becomes the worker
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' - <<'END'\nimport pathlib, signal\n{large}\nEND\n")
    program.chmod(0o755)
    launcher = LocalLauncher(tmp_path / "here" / "records", gpus=["0"])
    handle = launcher.submit(local(tmp_path / "here").launch())
    wait_for(is_large.exists)
    launcher.cancel(handle)
    assert device_locks.users(UUID, tmp_path / "other") == []


@pytest.fixture
def four(folder: Path) -> list[str]:
    """The UUIDs of four GPUs that nvidia-smi knows, of which the third is the emptiest."""
    uuids = [f"GPU-{letter * 8}" for letter in "abcd"]
    free = [8_000, 0, 80_000, 40_000]
    rows = {
        "index,uuid": [f"{index}, {uuid}" for index, uuid in enumerate(uuids)],
        "uuid,memory.free": [f"{uuid}, {mib}" for uuid, mib in zip(uuids, free, strict=True)],
    }
    cases = "".join(f"--query-gpu={q}) printf '%s\\n' {shlex.join(r)};;" for q, r in rows.items())
    program = folder.parent / "bin" / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in {cases} esac\n')
    return uuids


def cards_of(record: Path) -> str:
    process = ProcessRecord.read(record)
    assert process
    environ = Path(f"/proc/{process.pid}/environ")
    prefix = b"CUDA_VISIBLE_DEVICES="

    def values() -> list[bytes]:
        """Empty until the kernel has put the program in place of its starter."""
        return [line for line in environ.read_bytes().split(b"\0") if line.startswith(prefix)]

    wait_for(values)
    return values()[0].removeprefix(prefix).decode()


def test_a_run_gets_the_emptiest_cards_and_as_many_as_it_asks_for(four: list[str], tmp_path: Path) -> None:
    here, other = local(tmp_path / "here"), tmp_path / "other"
    launcher = LocalLauncher(tmp_path / "here" / "records", gpus=["0", "1", "2", "3"])
    records = launcher.records
    handles: list[Handle] = []
    try:
        handles.append(launcher.submit(replace(here.launch(1), gpus=2)))
        assert cards_of(records / "run-1-1") == "2,3"
        assert [bool(device_locks.users(uuid, other)) for uuid in four] == [False, False, True, True]
        held = device_locks.take(four[0], other)  # another state directory's
        assert launcher.capacity == 3
        with pytest.raises(FlashError, match="not_ready"):
            launcher.submit(replace(here.launch(2), gpus=2))
        # What it had taken before it gave up is free again.
        handles.append(launcher.submit(here.launch(3)))
        assert cards_of(records / "run-1-3") == "1"
        assert held is not None
        os.close(held)
    finally:
        for handle in handles:
            launcher.cancel(handle)
    with pytest.raises(FlashError, match=r"device_unsupported.* needs 5 GPUs.* has 4.*gpus=4"):
        launcher.submit(replace(here.launch(4), gpus=5))


def test_processes_of_one_state_directory_may_share_a_card(folder: Path, tmp_path: Path) -> None:
    held = [device_locks.take(UUID, tmp_path) for _ in range(2)]
    assert None not in held
    for descriptor in held:
        assert device_locks.users(UUID, tmp_path / "other")
        os.close(descriptor or -1)
    assert device_locks.users(UUID, tmp_path / "other") == []


def test_of_many_that_take_a_card_at_once_one_gets_it(folder: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from flash_mcp.protocol.device_locks import take
from flash_mcp.protocol.errors import FlashError
print("ready", flush=True)
sys.stdin.readline()
try:
    take({UUID!r}, Path(sys.argv[1]))
    print("taken", flush=True)
except FlashError as error:
    print(error.code, flush=True)
sys.stdin.read()
"""
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / str(number))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for number in range(5)
    ]
    for taker in takers:
        assert taker.stdout and taker.stdout.readline() == "ready\n"
    for taker in takers:
        assert taker.stdin
        taker.stdin.write("\n")
    outcomes = [taker.stdout.readline().strip() for taker in takers if taker.stdout]
    for taker in takers:
        taker.communicate(timeout=WAIT_S)
    assert sorted(outcomes) == ["not_ready"] * 4 + ["taken"]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_others_put_in_place_of_a_lock_is_not_followed(folder: Path, tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    names = [device_locks._name(UUID, tmp_path), f"flash-mcp-{UUID}.0-other"]
    for name in names:
        path = folder / name
        if kind == "link":
            path.symlink_to(precious)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
    with pytest.raises(FlashError, match=r"not_ready.*cannot be taken"):
        device_locks.take(UUID, tmp_path)
    assert precious.read_text() == "kept"
    (folder / names[0]).rmdir() if kind == "folder" else (folder / names[0]).unlink()
    held = device_locks.take(UUID, tmp_path)
    assert held is not None
    os.close(held)


@contextmanager
def acting_as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(mask)
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_users_share_the_folder_and_see_whose_a_card_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setenv("FLASH_DEVICE_LOCKS", name)
        with acting_as_nobody():
            held = device_locks.take(UUID, Path("/home/secret"))
        assert held is not None
        assert device_locks.users(UUID, folder) == ["a state directory of user nobody"]
        with pytest.raises(FlashError, match="is used by a state directory of user nobody"):
            device_locks.take(UUID, folder)
        os.close(held)
        mine = device_locks.take(UUID, folder)
        assert mine is not None
        with acting_as_nobody():
            assert device_locks.users(UUID, Path("/home/secret")) == ["a state directory of user root"]
        os.close(mine)


def test_the_doctor_says_who_uses_a_gpu(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.CHECKS["shared gpus"]
    monkeypatch.setattr(doctor, "find_gpus", list[str])
    assert check() == ("ok", "no GPU to share", "")
    monkeypatch.setattr(doctor, "find_gpus", lambda: ["0"])
    assert check()[0] == "ok"
    held = device_locks.take(UUID, tmp_path / "other")
    assert held is not None
    level, detail, _ = check()
    os.close(held)
    assert (level, detail) == ("warning", f"{UUID} is used by the state directory {tmp_path / 'other'}")
    monkeypatch.delenv("FLASH_DEVICE_LOCKS")
    monkeypatch.setattr(device_locks, "SHARED_FOLDERS", (str(tmp_path),))
    level, _, fix = check()
    assert level == "warning"
    assert "FLASH_DEVICE_LOCKS" in fix


LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 3g.40gb     Device  1: (UUID: MIG-2222)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-cccc)
"""


def test_a_card_that_is_split_is_named_by_its_instances(folder: Path) -> None:
    (folder.parent / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    assert devices.ids() == ["0", "MIG-1111", "MIG-2222", "2"]
    assert devices.names_of(["MIG-2222"]) == ["MIG-2222"]
