"""The run folder's contract, over every kind of file system that it is meant for."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from flash_mcp.errors import FlashError
from flash_mcp.runfolder import RunFolder


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/run" if request.param == "file" else f"memory://{uuid4().hex}/run"


@pytest.fixture
def folder(url: str) -> RunFolder:
    return RunFolder(url)


def adapter(tmp_path: Path, content: bytes = b"weights") -> Path:
    source = tmp_path / uuid4().hex
    (source / "optimizer").mkdir(parents=True)
    (source / "adapter.bin").write_bytes(content)
    (source / "optimizer" / "state.bin").write_bytes(b"moments")
    return source


def files_of(folder: RunFolder) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(folder.url)
    return {path: filesystem.cat_file(path) for path in filesystem.find(root)}


def test_an_empty_folder_has_nothing_to_say(folder: RunFolder) -> None:
    assert (folder.newest_epoch(), folder.beat(), folder.result(), folder.is_cancelled()) == (0, None, None, False)
    assert (folder.metric_steps(), folder.rollout_steps(), folder.event_names(), folder.checkpoint_steps()) == (
        {},
        {},
        [],
        [],
    )
    assert folder.newest_good_checkpoint() is None
    assert folder.log_tail(1) == ""
    with pytest.raises(FlashError, match="unknown_run"):
        folder.job()


def test_the_job_can_be_written_again_and_read_by_another(folder: RunFolder, url: str) -> None:
    job = {"run_id": "run-1", "spec": {"environment_args": {"name": "Zoë"}}}
    folder.create(job)
    folder.create(job)
    assert RunFolder(url).job() == job


def test_an_epoch_is_claimed_once(folder: RunFolder, url: str) -> None:
    folder.claim(1)
    with pytest.raises(FlashError, match="fenced"):
        RunFolder(url).claim(1)


def test_an_older_epoch_cannot_be_claimed_after_a_newer_one(folder: RunFolder) -> None:
    folder.claim(12)
    with pytest.raises(FlashError, match="fenced"):
        folder.claim(9)
    assert folder.newest_epoch() == 12


def test_what_the_owner_writes_is_read_back(folder: RunFolder, url: str) -> None:
    writer = folder.claim(1)
    writer.beat(3, "train")
    writer.metrics(3, {"loss": 0.5, "kl": None})
    writer.rollouts(3, [{"index": 0, "text": "line\nbreak\u2028"}, {"index": 1, "text": "Zoë \ud800"}])
    writer.evaluation(0, {"n": 2, "success": 0.5}, [{"index": 0}])
    writer.event("warning", "slow", seconds=9)
    writer.event("warning", "slower")
    reader = RunFolder(url)
    beat, metrics, evaluation = reader.beat(), reader.metrics(3), reader.evaluation(0)
    assert beat and (beat["epoch"], beat["step"], beat["phase"]) == (1, 3, "train")
    assert metrics and metrics["metrics"] == {"loss": 0.5, "kl": None}
    assert [row["text"] for row in reader.rollouts(3)] == ["line\nbreak\u2028", "Zoë ?"]
    assert evaluation and evaluation["rollouts"] == [{"index": 0}]
    events = [reader.event(name) for name in reader.event_names()]
    assert [event and event["message"] for event in events] == ["slow", "slower"]
    assert list(reader.metric_steps()) == list(reader.rollout_steps()) == [3]
    assert list(reader.eval_steps()) == [0]


def test_a_step_written_again_replaces_itself_and_shows_a_new_version(folder: RunFolder) -> None:
    writer = folder.claim(1)
    writer.metrics(1, {"loss": 1.5})
    before = folder.metric_steps()
    writer.metrics(1, {"loss": 2.5})
    after = folder.metric_steps()
    assert list(after) == [1]
    assert after != before
    assert (folder.metrics(1) or {})["metrics"] == {"loss": 2.5}


def test_not_a_number_is_refused_rather_than_written_as_broken_json(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="JSON"):
        folder.claim(1).metrics(1, {"loss": float("nan")})
    assert folder.metric_steps() == {}


def test_a_checkpoint_is_whole_and_verified(folder: RunFolder, tmp_path: Path) -> None:
    manifest = folder.claim(1).commit_checkpoint(10, adapter(tmp_path), {"reward/mean": 0.5})
    assert folder.checkpoint_steps() == [10]
    assert folder.verify_checkpoint(10) == manifest
    assert manifest["size_bytes"] == len(b"weights") + len(b"moments")
    assert set(manifest["files"]) == {"adapter.bin", "optimizer/state.bin"}
    fetched = folder.fetch_checkpoint(10, tmp_path / "fetched")
    assert (fetched / "optimizer" / "state.bin").read_bytes() == b"moments"
    assert folder.read_json("checkpoints", "LATEST") == {"step": 10, "digest": manifest["digest"]}


def test_the_same_checkpoint_written_twice_is_the_newer(folder: RunFolder, tmp_path: Path) -> None:
    writer = folder.claim(1)
    old = writer.commit_checkpoint(10, adapter(tmp_path, b"old"), {})
    new = writer.commit_checkpoint(10, adapter(tmp_path, b"new"), {})
    assert folder.verify_checkpoint(10) == new != old
    assert folder.checkpoint_steps() == [10]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder: RunFolder, tmp_path: Path) -> None:
    writer = folder.claim(1)
    for step in (5, 10):
        writer.commit_checkpoint(step, adapter(tmp_path), {})
    filesystem, root = fsspec.core.url_to_fs(folder.url)
    filesystem.pipe_file(f"{root}/checkpoints/10/adapter.bin", b"weight?")
    with pytest.raises(FlashError, match="checkpoint_corrupt"):
        folder.verify_checkpoint(10)
    assert folder.newest_good_checkpoint() == 5
    filesystem.rm(f"{root}/checkpoints/5/adapter.bin")
    assert folder.newest_good_checkpoint() is None


def test_a_checkpoint_without_its_manifest_does_not_exist(folder: RunFolder, tmp_path: Path) -> None:
    folder.claim(1).commit_checkpoint(5, adapter(tmp_path), {})
    filesystem, root = fsspec.core.url_to_fs(folder.url)
    filesystem.rm(f"{root}/checkpoints/5/MANIFEST.json")
    assert folder.checkpoint_steps() == []
    with pytest.raises(FlashError, match="unknown_checkpoint"):
        folder.verify_checkpoint(5)


def test_a_zombie_changes_nothing(folder: RunFolder, tmp_path: Path) -> None:
    zombie = folder.claim(1)
    zombie.beat(1, "train")
    zombie.commit_checkpoint(1, adapter(tmp_path), {})
    folder.claim(2)
    before = files_of(folder)
    deeds = [
        lambda: zombie.beat(2, "train"),
        lambda: zombie.metrics(2, {"loss": 1.0}),
        lambda: zombie.rollouts(2, [{"index": 0}]),
        lambda: zombie.evaluation(2, {}, []),
        lambda: zombie.event("phase", "still here"),
        lambda: zombie.commit_checkpoint(1, adapter(tmp_path, b"stale"), {}),
        lambda: zombie.commit_checkpoint(2, adapter(tmp_path), {}),
        lambda: zombie.commit_result("succeeded", 2),
    ]
    for deed in deeds:
        with pytest.raises(FlashError, match="fenced"):
            deed()
    left = {path: body for path, body in files_of(folder).items() if "/checkpoints/." not in path}
    assert left == before


def test_a_cancel_and_a_result_reach_the_other_side(folder: RunFolder, url: str) -> None:
    writer = folder.claim(1)
    RunFolder(url).request_cancel("enough")
    assert folder.is_cancelled()
    writer.commit_result("failed", 7, FlashError("out_of_memory", "too large", fix="use less"), retryable=True)
    result = RunFolder(url).result()
    assert result and (result["state"], result["step"], result["epoch"], result["retryable"]) == ("failed", 7, 1, True)
    assert str(FlashError.from_dict(result["error"])) == "[out_of_memory] too large. Fix: use less"


def test_the_tail_of_a_log_is_its_end(folder: RunFolder) -> None:
    folder.create({})
    filesystem, root = fsspec.core.url_to_fs(folder.url)
    filesystem.pipe_file(f"{root}/log.2", b"first line\n" * 1000 + b"last line\n")
    assert folder.log_tail(2, 15).endswith("line\nlast line\n")
    assert len(folder.log_tail(2, 15)) == 15
