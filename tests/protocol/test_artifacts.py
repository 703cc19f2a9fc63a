"""Artifacts: folders that travel to nodes through a storage."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from flash_mcp.protocol.artifacts import _IN_USE, Artifacts, packed, placed, trim
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.sealing import Receiver, seal
from tests.waiting import WAIT_S


@pytest.fixture(params=["file", "memory"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    where = str(tmp_path / "storage") if request.param == "file" else f"memory://{uuid4().hex}"
    return Artifacts(where, retry_s=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "inner").mkdir(parents=True)
    (made / "a.txt").write_text("a")
    (made / "inner" / "run.sh").write_text("#!/bin/sh\n")
    (made / "inner" / "run.sh").chmod(0o755)
    (made / "link").symlink_to(made / "a.txt")
    return made


def test_a_folder_arrives_as_it_was_with_links_followed(artifacts: Artifacts, folder: Path, tmp_path: Path) -> None:
    digest = artifacts.put(folder, "run-1")
    found = artifacts.fetch(digest, tmp_path / "cache")
    assert found == tmp_path / "cache" / digest
    assert (found / "a.txt").read_text() == (found / "link").read_text() == "a"
    assert not (found / "link").is_symlink() and os.access(found / "inner" / "run.sh", os.X_OK)
    assert not os.access(found / "a.txt", os.X_OK)


def test_the_digest_depends_on_content_alone(artifacts: Artifacts, folder: Path, tmp_path: Path) -> None:
    digest = artifacts.put(folder, "run-1")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    os.utime(copy / "a.txt", (1, 1))
    assert artifacts.put(copy, "run-1") == digest
    (copy / "a.txt").write_text("b")
    assert artifacts.put(copy, "run-1") != digest
    (copy / "a.txt").write_text("a")
    artifacts._fs.rm(artifacts._path(digest))  # what the storage lost is stored again
    assert artifacts.put(copy, "run-1") == digest and artifacts._fs.exists(artifacts._path(digest))


def test_runs_of_several_targets_wait_for_one_upload(artifacts: Artifacts, folder: Path, monkeypatch):
    targets = [artifacts, Artifacts(artifacts.url.removesuffix("/artifacts"), retry_s=1)]
    upload, uploads = Artifacts._upload, list[str]()

    def upload_late(target: Artifacts, archive: Path, path: str) -> None:
        uploads.append(path)
        time.sleep(0.5)
        upload(target, archive, path)

    monkeypatch.setattr(Artifacts, "_upload", upload_late)
    with ThreadPoolExecutor(4) as threads:
        stored = threads.map(lambda number: targets[number % 2].put(folder, f"run-{number}"), range(4))
        assert len(set(stored)) == 1
    assert len(uploads) == 1


def test_a_missing_or_changed_artifact_is_refused_and_leaves_nothing(artifacts: Artifacts, folder: Path, tmp_path):
    cache = tmp_path / "cache"
    digest = artifacts.put(folder, "run-1")
    artifacts._fs.pipe_file(artifacts._path(digest), b"not what it was")
    for wanted, says in ((digest, "does not match its checksum"), ("0" * 64, "has no artifact")):
        with pytest.raises(FlashError, match=says) as caught:
            artifacts.fetch(wanted, cache)
        assert caught.value.code == "artifact_damaged"
    assert [path.suffix for path in cache.iterdir()] == [".lock", ".lock"]
    assert not [target for target in _IN_USE if target.parent == cache]


def test_an_artifact_stays_until_the_last_run_that_needs_it_is_removed(artifacts: Artifacts, folder: Path) -> None:
    digest = artifacts.put(folder, "run-1")
    assert artifacts.put(folder, "run-2") == digest
    artifacts.release(digest, "run-1")
    artifacts.release(digest, "run-1")
    assert artifacts._fs.exists(artifacts._path(digest))
    artifacts.release(digest, "run-2")
    assert artifacts._fs.find(artifacts._root) == []
    artifacts.release(digest, "run-2")
    assert artifacts.put(folder, "run-3") == digest and artifacts._fs.exists(artifacts._path(digest))


@pytest.mark.slow
def test_an_attempt_takes_what_others_on_its_node_use(folder: Path, tmp_path: Path) -> None:
    digest = Artifacts(str(tmp_path / "storage"), retry_s=1).put(folder, "run-1")
    code = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from flash_mcp.protocol.artifacts import Artifacts
Artifacts(sys.argv[1], retry_s=1).fetch(sys.argv[2], Path(sys.argv[3]))
print("fetched", flush=True)
sys.stdin.read()
"""
    place = [str(tmp_path / "storage"), digest, str(tmp_path / "cache")]
    command = [sys.executable, "-c", code, *place]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout and first.stdout.readline() == b"fetched\n"
        second = subprocess.run(command, input=b"", capture_output=True, timeout=WAIT_S, check=True)
        assert second.stdout == b"fetched\n"
        assert first.poll() is None


def test_what_is_used_least_lately_goes_first_and_what_is_in_use_stays(folder: Path, tmp_path: Path) -> None:
    artifacts = Artifacts(str(tmp_path / "storage"), retry_s=1)
    cache = tmp_path / "cache"
    digests: list[str] = []
    for number in range(3):
        (folder / "a.txt").write_text(str(number) * 1000)
        digests.append(artifacts.put(folder, "run-1"))
    code = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from flash_mcp.protocol.artifacts import Artifacts, trim
storage, cache, limit, *digests = sys.argv[1:]
for digest in digests:
    Artifacts(storage, retry_s=1).fetch(digest, Path(cache))
trim(Path(cache), float(limit))
"""
    storage = [str(tmp_path / "storage"), str(cache)]
    # Another process has fetched all three and ended; this one uses the first.
    subprocess.run([sys.executable, "-c", code, *storage, "inf", *digests], check=True)
    artifacts.fetch(digests[0], cache)
    os.utime(cache / digests[0], (1, 1))
    os.utime(cache / digests[1], (2, 2))
    trim(cache, 4500)
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {digests[0], digests[2]}


def test_what_a_killed_download_left_is_removed_and_what_a_removal_left_fetched_anew(artifacts, folder, tmp_path: Path):
    cache, digest = tmp_path / "cache", artifacts.put(folder, "run-1")
    os.close(_IN_USE.pop(artifacts.fetch(digest, cache)))  # no process uses it
    (cache / f".{digest}.part-killed" / "inner").mkdir(parents=True)
    trim(cache, 1e9)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [digest]
    code = """
import os
import signal
import sys
from pathlib import Path
from flash_mcp.protocol.artifacts import trim
unlink = os.unlink
def unlink_and_die(*args, **kwargs):
    unlink(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
os.unlink = unlink_and_die
trim(Path(sys.argv[1]), 0)
"""
    assert subprocess.run([sys.executable, "-c", code, str(cache)]).returncode == -signal.SIGKILL
    fetched = artifacts.fetch(digest, cache)
    assert sorted(path.name for path in fetched.rglob("*")) == sorted(path.name for path in folder.rglob("*"))
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [digest]


def test_a_job_names_no_path_of_this_machine_and_finds_its_folders_on_a_node(folder: Path, tmp_path: Path) -> None:
    artifacts = Artifacts(str(tmp_path / "storage"), retry_s=1)
    path = str(folder)
    job = {"run_id": "run-1", "environment": {"name": "e", "path": path}, "init_adapter": None, "model": path}
    job |= {"dataset": {"name": "d", "path": path}, "spec": {"model": path, "steps": 3}}
    sent = packed(job, artifacts)
    assert str(tmp_path) not in str(sent)
    found = placed(sent, artifacts, tmp_path / "cache")
    for path in (found["environment"]["path"], found["dataset"]["path"], found["spec"]["model"]):
        assert Path(path).is_relative_to(tmp_path / "cache") and Path(path, "a.txt").is_file()
    assert (found["model"], found["spec"]["steps"]) == (found["spec"]["model"], 3)
    named = {**job, "model": "smollm2-135m-instruct", "spec": {"model": "smollm2-135m-instruct"}}
    assert packed(named, artifacts)["model"] == "smollm2-135m-instruct"


TOKEN = "0123456789abcdef"
VALUES = {"API_KEY": "pl4nted-sécret"}


def test_sealed_values_are_read_by_the_attempt_that_asked_for_them_alone() -> None:
    receiver = Receiver("run-1-1", TOKEN)
    sealed = seal(VALUES, json.loads(json.dumps(receiver.offer)), "run-1-1", TOKEN)
    assert b"pl4nted" not in sealed and receiver.open(sealed) == VALUES
    for other in (Receiver("run-1-1", TOKEN), Receiver("run-1-2", TOKEN)):
        with pytest.raises(FlashError, match=r"^\[secret_missing.*cannot be opened"):
            other.open(sealed)
    for damaged in (sealed[:-1], b"", bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(FlashError, match="cannot be opened"):
            receiver.open(damaged)


@pytest.mark.parametrize("name", ["run-1-1", "run-1-2"])
def test_nothing_is_sealed_for_a_key_that_the_attempt_did_not_make(name: str) -> None:
    forged = Receiver(name, "another token" if name == "run-1-1" else TOKEN).offer
    mixed = {**Receiver("run-1-1", TOKEN).offer, "public": forged["public"]}
    for offer in (forged, mixed, {}):
        with pytest.raises(FlashError, match="that its attempt did not make"):
            seal(VALUES, offer, "run-1-1", TOKEN)
