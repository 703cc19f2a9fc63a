"""Run folders as a hostile node, or whoever can write to the storage, may leave them: nothing is written elsewhere,
every refusal has a code, and the maintenance goes on."""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flash_mcp.protocol.artifacts import RUN_FOLDERS, delete_run
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import Listening
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.run_folder import RunFolder, RunWriter, read_beats
from flash_mcp.protocol.sealing import Receiver, seal
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.attempt import Reader
from flash_mcp.supervisor.targets import _checked
from tests.samples import evaluate, learn, queued_run, save_adapter

CASES = 10_000 if os.environ.get("FLASH_SLOW") else 300
TOKEN = "the-launch-token"
RUN_ID = "run-0000000f"
Files = dict[str, bytes]
NAMES = [
    "/etc/planted", "../planted", "../../../../planted", "adapter_x/../../../planted", "a//b", ".",
    "", "..", "adapter_\x00", "adapter_\n", "CON/../x", "é", "a" * 5000, "adapter_a/b/c", "٣", "-1",
    "1e9", "9" * 400, "0" * 300, "MANIFEST.json", "abc", ".hidden", "adapter_config.json/x", "1-1",
]  # fmt: skip
VALUES: list[Any] = [
    *NAMES, None, True, -1, 0, 2**63, 2**200, 1e308, 0.5, [], {}, [[[]]], {"a": {"b": "c"}}, "x" * 70_000,
    "\ud800", "artifact:../../x", "artifact:" + "0" * 64, "0" * 64, "f" * 16, [1] * 1000,
]  # fmt: skip
PLACES = [
    "keys/{}", "keys/{}.json", "sealed/{}", "epoch/{}", "events/{}.json", "metrics/{}.1.json", "log.{}",
    "metrics/{}", "rollouts/1.{}.jsonl", "evals/{}/0001-000000", "evals/1/{}", "result.{}.json",
    "checkpoints/{}/1-1/MANIFEST.json", "checkpoints/20/{}/MANIFEST.json", "checkpoints/20/{}", "{}",
]  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a folder that an honest attempt has left."""
    scratch = tmp_path_factory.mktemp("honest")
    folder = RunFolder(scratch / "run")
    folder.create(
        {
            "run_id": RUN_ID,
            "model": "artifact:" + "1" * 64,
            "environment": {"path": "artifact:" + "2" * 64},
            "storage": {"url": str(scratch / "elsewhere")},
        }
    )
    writer = RunWriter(folder, 1)
    writer.beat(20, "train")
    writer.offer(Receiver(f"{RUN_ID}-1", TOKEN).offer)
    writer.listens(Listening(["127.0.0.1"], 1234, "a certificate", "/adapter").signed(TOKEN))
    evaluate(writer, 0, 3)
    learn(writer, range(19, 21))
    writer.attempts(1, [{"index": 0}])
    writer.event("model", "loaded", commit="0" * 40)
    save_adapter(writer, 20, scratch / "adapter", optimizer=True)
    folder.put_probe({"host": "n", "version": "1", "devices": [], "missing": [], "cards": {}, "clock_s": 0.0})
    folder.put_log(1, b"hello")
    writer.commit_result("succeeded", 20)
    return {
        str(path.relative_to(scratch / "run")): path.read_bytes()
        for path in (scratch / "run").rglob("*")
        if path.is_file()
    }


def hostile(honest: Files, chance: random.Random) -> Files:
    """The files after some acts."""
    files = dict(honest)
    for _ in range(chance.randint(1, 4)):
        name = chance.choice(sorted(files))
        act = chance.randrange(5)
        if act == 0:
            files[chance.choice(PLACES).format(chance.choice(NAMES))] = files[name]
        elif act == 1:
            files[name] = chance.choice([b"", b"{", b"[" * 60_000, b"\xff\xfe", b"null", b"NaN", b"{}"])
        elif act == 2:
            manifest = json.loads(honest["checkpoints/20/1-1/MANIFEST.json"])
            manifest["files"] = {chance.choice(NAMES): chance.choice(VALUES) for _ in range(3)}
            files["checkpoints/20/1-1/MANIFEST.json"] = json.dumps(manifest).encode()
        else:
            with suppress(ValueError, RecursionError):
                files[name] = json.dumps(changed(json.loads(files[name]), chance)).encode()
    return files


def changed(body: Any, chance: random.Random) -> Any:
    """The body with one value, at some depth, replaced; of objects also a key."""
    if isinstance(body, dict) and body and chance.random() < 0.9:
        key = chance.choice(sorted(body))
        rest = {name: value for name, value in body.items() if name != key}
        if chance.random() < 0.15:
            return {**rest, chance.choice(NAMES): body[key]}
        return rest if chance.random() < 0.1 else {**rest, key: changed(body[key], chance)}
    if isinstance(body, list) and body and chance.random() < 0.5:
        return [changed(body[0], chance), *body[1:]]
    return chance.choice(VALUES)


def write(files: Files, url: str) -> None:
    """Put the files there, as far as the file system has such names."""
    filesystem, root = fsspec.core.url_to_fs(url)
    for name, body in files.items():
        with suppress(OSError, ValueError):
            place = f"{root}/{name}"
            if filesystem.protocol != "memory" and not Path(os.path.normpath(place)).is_relative_to(root):
                continue
            filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(place, body)


def acts(store: Store, folder: RunFolder, into: Path) -> Iterator[Callable[[], object]]:
    """What the server does with a run folder."""
    yield folder.result
    yield folder.beat
    yield lambda: read_beats([folder])
    yield lambda: Reader(store, RUN_ID, folder).read(now=True)
    yield lambda: [folder.attempts(step) for step in (1, 20)]
    yield lambda: folder.log_tail(1)
    yield folder.checkpoints.newest_good
    for whole in (True, False):
        yield lambda whole=whole: read_adapter_config(
            folder.checkpoints.fetch(20, into / f"{RUN_ID}-20", whole=whole), "r", "lora_alpha"
        )
    for epoch in (1, folder.newest_epoch()):
        yield lambda epoch=epoch: seal({"A": "b"}, folder.offer(epoch) or {}, f"{RUN_ID}-1", TOKEN)
        yield (lambda epoch=epoch: (said := folder.listening(epoch)) and Listening.checked(said, TOKEN))
    yield lambda: (said := folder.probe()) and _checked("lab", said, 0.0)
    yield folder.job
    yield folder.drop_superseded
    yield folder.checkpoints.drop_optimizers
    yield lambda: delete_run(folder, 0.1)


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def forget() -> None:
    """Empty the memory's file system: each listing looks through all that it ever held."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.slow
@pytest.mark.hostile("run folders")
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_no_hostile_run_folder_writes_elsewhere_or_fails_without_a_code(kind: str, honest: Files, tmp_path, flash_home):
    run = queued_run(tmp_path / "environment")
    store = open_store()
    store.execute("UPDATE main.runs SET id = ?", [RUN_ID])
    assert store.run(RUN_ID).created == run.created
    own = tmp_path / "own"
    adapters = own / "adapters"
    adapters.mkdir(parents=True)
    (own / "kept").write_text("kept")
    for case in range(CASES // 2):
        chance = random.Random(case)
        storage = f"memory://{uuid4().hex}" if kind == "memory" else str(tmp_path / "storage")
        url = f"{storage}/{RUN_FOLDERS}/{RUN_ID}"
        write(hostile(honest, chance), url)
        folder = RunFolder(url, retry_s=0.1)
        for act in acts(store, folder, adapters):
            try:
                act()
            except FlashError as error:
                assert error.code != "internal", case
            except Exception as error:
                raise AssertionError(f"case {case}: {error!r}") from error
        assert below(own) - below(adapters) <= {"kept", "adapters"} | {f"adapters/{name}" for name in below(adapters)}
        names = {path.name.lstrip(".") for path in adapters.iterdir()}
        assert all(name.startswith(f"{RUN_ID}-20-") for name in names), case
        assert not Path("/etc/planted").exists()
        assert not folder.names(), "it was deleted whole"
        if kind == "memory":
            forget()


@pytest.mark.hostile("run folders")
@pytest.mark.parametrize("name", ["/abs/planted", "../../planted", "adapter_x/../../../planted"])
def test_a_manifest_s_names_lead_nowhere_else(name: str, honest: Files, tmp_path: Path) -> None:
    """The attack that wrote settings.toml: the file exists there, and its digest is right."""
    url = f"memory://{uuid4().hex}/{RUN_FOLDERS}/{RUN_ID}"
    name = name.replace("/abs", str(tmp_path))
    manifest = json.loads(honest["checkpoints/20/1-1/MANIFEST.json"])
    write({**honest, "checkpoints/20/1-1/MANIFEST.json": json.dumps(
        {**manifest, "files": {**manifest["files"], name: "0" * 64}}
    ).encode()}, url)  # fmt: skip
    with pytest.raises(FlashError, match="unknown_checkpoint"):
        RunFolder(url).checkpoints.fetch(20, tmp_path / "adapters" / "run-20")
    assert not (tmp_path / "planted").exists()


@pytest.mark.hostile("run folders")
def test_a_checkpoint_that_was_replaced_later_is_not_the_one_that_the_run_saved(honest: Files, tmp_path: Path) -> None:
    url = f"memory://{uuid4().hex}/{RUN_FOLDERS}/{RUN_ID}"
    write(honest, url)
    folder = RunFolder(url)
    first = folder.checkpoints.manifest(20)
    assert first
    save_adapter(RunWriter(RunFolder(url), 2), 20, tmp_path / "other", rank=8)
    replaced = folder.checkpoints.manifest(20)
    assert replaced and replaced["digest"] != first["digest"]
    into = tmp_path / "adapters" / "run-20"
    assert read_adapter_config(folder.checkpoints.fetch(20, into, digest=first["digest"]), "r")["r"] == 32
    folder.remove("checkpoints", "20", "1-1")
    with pytest.raises(FlashError, match="checkpoint_corrupt"):
        folder.checkpoints.fetch(20, into, digest=first["digest"])


@pytest.mark.hostile("run folders")
@pytest.mark.parametrize(("steps", "taken"), [(20, 1000), (2500, 2501)])
def test_any_number_of_metrics_is_read_as_far_as_a_run_of_its_steps_has_them(
    steps: int, taken: int, honest: Files, tmp_path: Path, flash_home: Path
) -> None:
    run = queued_run(tmp_path / "environment")
    store = open_store()
    store.execute("UPDATE main.runs SET steps = ?", [steps])
    url, step = f"memory://{uuid4().hex}/{RUN_FOLDERS}/{run.id}", json.loads(honest["metrics/20.1.json"])
    metrics = {f"metrics/{n}.1.json": json.dumps({**step, "step": n}).encode() for n in range(taken + 500)}
    write({**honest, **metrics}, url)
    folder = RunFolder(url)
    Reader(store, run.id, folder).read()
    assert store.column("SELECT count(*) FROM metrics") == [taken]
    assert "500 files more" in folder.damaged["metrics"]
    assert store.checkpoints(run.id), "what comes after them is read"
    forget()


@pytest.mark.hostile("run folders")
def test_links_in_a_shared_folder_lead_nowhere(honest: Files, tmp_path: Path) -> None:
    root = tmp_path / "storage" / RUN_FOLDERS / RUN_ID
    write(honest, str(root))
    outside = tmp_path / "outside"
    (outside / "5-1").mkdir(parents=True)
    (outside / "secret").write_text("the-server-s-own")
    (outside / "5-1" / "optimizer.pt").write_text("kept")
    folder = RunFolder(root)
    for name in ("log.1", "beat.json", "events/0001-000000.json"):
        (root / name).unlink()
        (root / name).symlink_to(outside / "secret")
    (root / "checkpoints" / "5").symlink_to(outside)
    (root / "sealed").symlink_to(outside)
    assert folder.log_tail(1) == "" and folder.beat() is None and folder.event("0001-000000.json") is None
    assert "link" in folder.damaged["beat.json"]
    with pytest.raises(FlashError, match="artifact_damaged"):
        folder.put_sealed(1, b"sealed")
    with pytest.raises(FlashError, match="artifact_damaged"):
        folder.remove("checkpoints", "5", "5-1")
    folder.checkpoints.drop_optimizers()
    delete_run(folder, 0.1)
    assert not root.exists()
    assert below(outside) == {"secret", "5-1", "5-1/optimizer.pt"}


@pytest.mark.hostile("run folders")
def test_deleting_a_run_touches_its_own_storage_alone(honest: Files, tmp_path: Path) -> None:
    digest, storage = "2" * 64, tmp_path / "storage"
    for place in (storage, tmp_path / "elsewhere"):
        users = place / "artifacts" / "users" / digest
        users.mkdir(parents=True)
        (users / RUN_ID).touch()
        (place / "artifacts" / f"{digest}.tar").touch()
    job = {
        **json.loads(honest["job.json"]),
        "run_id": "../../../run-anothers",
        "storage": {"url": str(tmp_path / "elsewhere")},
    }
    url = storage / RUN_FOLDERS / RUN_ID
    write({**honest, "job.json": json.dumps(job).encode()}, str(url))
    delete_run(RunFolder(url), 0.1)
    assert not (storage / "artifacts" / f"{digest}.tar").exists()
    assert (tmp_path / "elsewhere" / "artifacts" / f"{digest}.tar").exists()


@pytest.mark.hostile("run folders")
def test_a_file_in_a_store_is_read_up_to_the_limit_of_local_ones(honest: Files) -> None:
    url = f"memory://{uuid4().hex}/{RUN_FOLDERS}/{RUN_ID}"
    write({**honest, "result.1.json": b" " * (1 << 20) + honest["result.1.json"]}, url)
    folder = RunFolder(url)
    assert folder.read("result.1.json", 1 << 20) is None and "more than" in folder.damaged["result.1.json"]
    write({"beat.json": b" " * (2 << 20) + honest["beat.json"]}, url)
    assert read_beats([folder]) == [None]


@pytest.mark.hostile("run folders")
@pytest.mark.parametrize(
    "body",
    [b"{}\n" * 60, b"\n" * 101, b'{"a": [' + b"[]," * 100 + b"0]}", b'"\n' + b"[0]\n" * 60, b'"\\\\", ' + b"[" * 101],
)
def test_a_file_of_many_empty_objects_is_damaged(body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_mcp.protocol.storage.MAX_OBJECTS", 100)
    write({"rollouts/1.1.jsonl": body, "evals/1.1.json": body}, str(tmp_path))
    folder = RunFolder(tmp_path)
    assert list(folder.rollouts(1)) == [] and folder.evaluation(1) is None
    assert all("more than 100 objects" in damage for damage in folder.damaged.values()) and len(folder.damaged) == 2


def test_brackets_in_texts_are_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_mcp.protocol.storage.MAX_OBJECTS", 100)
    rows = [{"index": 0, "text": '[{"' * 200 + "\\"}, {"index": 1, "text": "[\n" * 200}]
    writer = RunWriter(RunFolder(tmp_path), 1)
    writer.rollouts(1, rows)
    writer.evaluation(1, {}, rows)
    folder = RunFolder(tmp_path)
    assert list(folder.rollouts(1)) == rows and (folder.evaluation(1) or {})["rollouts"] == rows
