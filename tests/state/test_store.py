"""What the store keeps and how it is read back."""

import fcntl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.cli.main import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import RunSpec, resolve
from flash_mcp.state import database, queue, tokens
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.targets import (
    FILE,
    Cards,
    TargetSettings,
    find_target,
    new_target,
    note_cards,
    remove_target,
    targets,
    write_target,
)
from tests.waiting import WAIT_S


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def run_id(store: Store) -> str:
    return new_run(store)


def new_run(store: Store) -> str:
    environment = store.add_environment(name="calc", digest="abcdef123456", path="/environments/calc", size_bytes=9)
    run, _ = queue.enqueue(store, resolve(RunSpec(environment="calc")), environment)
    return run.id


def rollout(step: int, index: int, text: str = "hello", **values: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": text}]
    return {"step": step, "index": index, "reward": index / 10, "success": index > 1, "messages": messages, **values}


def put_metrics(store: Store, run_id: str, step: int, epoch: int = 1, **metrics: float | None) -> None:
    store.put_metrics(run_id, {"step": step, "epoch": epoch, "time": 1.5, "metrics": metrics})


@pytest.mark.slow
def test_many_processes_can_open_a_new_store_at_once(tmp_path: Path) -> None:
    code = "import sys, pathlib; from flash_mcp.state.store import Store; Store(pathlib.Path(sys.argv[1])).runs()"
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(6)]
    assert [child.wait(WAIT_S) for child in children] == [0] * 6
    assert Store(tmp_path).query("SELECT name FROM _sqlite_migrations") == [{"name": "0.1.0"}]


def test_the_store_is_durable_and_its_sqlite_has_no_known_corruption_bug(durable: None, store: Store) -> None:
    version = store.query("SELECT sqlite_version() AS version")[0]["version"]
    assert tuple(map(int, version.split("."))) >= (3, 51, 3)
    assert store.query("PRAGMA journal_mode")[0]["journal_mode"] == "wal"
    assert store.query("PRAGMA synchronous")[0]["synchronous"] == 2


@pytest.mark.slow
def test_importing_the_store_does_not_import_pandas() -> None:
    code = "import sys, flash_mcp.state.store; sys.exit('pandas' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_open_store_follows_flash_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "one"):
        monkeypatch.setenv("FLASH_HOME", str(tmp_path / name))
        assert open_store().path == tmp_path / name / "flash.db"
    assert open_store() is open_store()


def test_a_failing_transaction_leaves_nothing(store: Store, run_id: str) -> None:
    with pytest.raises(RuntimeError), store.transaction():
        put_metrics(store, run_id, 1, loss=1.0)
        raise RuntimeError
    assert store.metrics(run_id) == []


def test_a_transaction_that_reads_and_then_writes_survives_another_writer(store: Store, run_id: str) -> None:
    other = Store(store.base)
    with store.transaction():
        before = len(store.metrics(run_id))
        assert len(other.runs()) == 1
        put_metrics(store, run_id, before + 1, loss=1.0)
    assert len(other.metrics(run_id)) == 1


def test_a_database_that_stays_locked_is_a_named_error(store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flash_mcp.state.database.BUSY_TIMEOUT_S", 0)
    with store.transaction():
        other = Store(store.base)
        with pytest.raises(FlashError, match=r"state_busy.*fuser -v .*flash\.db"):
            put_metrics(other, run_id, 1, loss=1.0)


def test_opening_and_reading_wait_for_no_writer(store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that holds a write transaction would otherwise delay every process that starts."""
    monkeypatch.setattr("flash_mcp.state.database.BUSY_TIMEOUT_S", 0)
    with store.transaction(), (store.base / "flash.db.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [run.id for run in Store(store.base).runs()] == [run_id]


def test_a_migration_that_another_process_holds_up_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flash_mcp.state.database.BUSY_TIMEOUT_S", 0.2)
    with (tmp_path / "flash.db.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FlashError, match="state_busy"):
            Store(tmp_path)
    assert Store(tmp_path).runs() == []


def test_the_use_of_a_token_is_not_waited_for(store: Store) -> None:
    _, text = tokens.create(store, "alice")
    other = Store(store.base)
    with store.transaction():
        began = time.monotonic()
        found = tokens.find(other, tokens.digest_of(text))
        assert found and found["used"] is None
        assert time.monotonic() - began < database.BUSY_TIMEOUT_S / 2
    assert tokens.find(other, tokens.digest_of(text))
    (token,) = tokens.list_tokens(store)
    assert token["used"]


def test_an_unknown_run_names_the_nearest(store: Store, run_id: str) -> None:
    with pytest.raises(FlashError, match=rf"^\[unknown_run.*did you mean '{run_id}'"):
        store.run(run_id[:-1])


def test_runs_are_listed_newest_first_in_pages_and_by_state(store: Store) -> None:
    ids = [new_run(store) for _ in range(7)][::-1]
    first = store.runs(limit=3)
    second = store.runs(limit=3, cursor=first[-1].id)
    assert [run.id for run in (*first, *second, *store.runs(limit=3, cursor=second[-1].id))] == ids
    queue.claim(store)
    assert [run.id for run in store.runs(state="starting")] == [ids[-1]]
    assert store.run_counts() == {"queued": 6, "starting": 1}
    assert [run.id for run in store.active_runs()] == ids[::-1]


def test_metrics_come_in_order_and_the_last_ones_alone(store: Store, run_id: str) -> None:
    for step in (1, 3, 2, 10):
        put_metrics(store, run_id, step, loss=step / 2, kl=None)
    assert [row.step for row in store.metrics(run_id)] == [1, 2, 3, 10]
    assert [row.step for row in store.metrics(run_id, since=2)] == [3, 10]
    assert [row.step for row in store.metrics(run_id, limit=2)] == [3, 10]
    last = store.last_metrics(run_id)
    assert last and last.metrics == {"loss": 5.0, "kl": None} and store.last_metrics("run-other") is None
    put_metrics(store, run_id, 10, epoch=2, loss=2.0)  # a step reported again replaces the first report
    assert [(row.epoch, row.metrics["loss"]) for row in store.metrics(run_id, limit=1)] == [(2, 2.0)]


def test_a_series_is_averaged_over_equal_stretches_without_the_nulls(store: Store, run_id: str) -> None:
    for step in range(1, 101):
        put_metrics(store, run_id, step, **{"reward/mean": None if step > 80 else float(step)})
    assert store.series(run_id, "reward/mean", points=4) == [(1, 10.5), (21, 30.5), (41, 50.5), (61, 70.5)]
    assert len(store.series(run_id, "reward/mean", points=1000)) == 80
    assert store.series(run_id, "no such metric") == []


def test_rollouts_are_found_by_order_step_success_and_text(store: Store, run_id: str) -> None:
    store.put_rollouts(run_id, "train", 1, [rollout(1, index, text=f"Answer {index}") for index in range(4)])
    store.put_rollouts(run_id, "train", 2, [rollout(2, 0, text='he said "role" % _\nÉtude')])

    def found(**filters: Any) -> list[tuple[int, int]]:
        rows = store.rollouts(run_id, **filters)
        assert store.rollout_count(
            run_id, **{key: filters[key] for key in ("step", "contains", "success") if key in filters}
        ) >= len(rows)
        return [(row.step, row.index) for row in rows]

    assert found(order="worst", limit=2) == [(2, 0), (1, 0)]
    assert found(order="best", limit=2) == [(1, 3), (1, 2)]
    assert found(order="index", offset=1, limit=2) == [(1, 1), (1, 2)]
    assert found(step=1, success=False, order="index") == [(1, 0), (1, 1)]
    assert found(contains="aNsWeR 2") == [(1, 2)] and found(contains='"role" % _\nÉ') == [(2, 0)]
    assert found(contains="assistant") == []
    assert store.rollout_count(run_id, step=1) == 4 and store.rollout_steps(run_id) == [1, 2]


def test_attempts_and_verdicts_are_read_without_a_transcript(store: Store, run_id: str) -> None:
    error = {"code": "environment_error", "what": "w"}
    facts = {"task_id": "eval/1", "kind": "sum", "truncated": True, "completion_tokens": 7, "turns": 2}
    before = [rollout(0, 0), rollout(0, 1, expected="9", **facts), rollout(0, 2), rollout(0, 3, error=error)]
    after = [rollout(5, 0), rollout(5, 1, success=True, **facts), rollout(5, 2, error=error), rollout(5, 3)]
    for step, rows in ((0, before), (5, after)):
        found = {"step": step, "epoch": 1, "time": 2.0, "summary": {"n": 3, "success": 0.5}, "rollouts": rows}
        store.put_evaluation(run_id, found)
    store.execute("UPDATE main.rollouts SET body = 'no JSON'")
    assert store.pairs(run_id, store.evals(run_id)) == [(0.0, 0.0, " 0"), (0.0, 1.0, "sum")]
    assert store.pairs(run_id, store.evals(run_id), "eval") == [(0.0, 1.0, "sum")]
    tries = store.tries(run_id, 0)
    second = {"index": 1, "task_id": "eval/1", "kind": "sum", "truncated": True, "tokens": 7, "turns": 2}
    second |= {"success": False, "reward": 0.1, "error": None, "has_gold": True}
    assert tries[1].fields() == second and tries[3].error == "environment_error"
    assert [row.task_id for row in tries] == ["0", "eval/1", "2", "3"] and store.golds(run_id, 0) == ["9"]


def test_a_random_order_has_pages_and_a_step_rolled_out_again_or_evaluated_is_apart(store: Store, run_id: str) -> None:
    store.put_rollouts(run_id, "train", 1, [rollout(1, index) for index in range(40)])

    def page(offset: int) -> list[int]:
        return [row.index for row in store.rollouts(run_id, order="random", limit=20, offset=offset)]

    assert (
        sorted(page(0) + page(20)) == list(range(40)) and page(0) == page(0) != page(20) and page(0) != sorted(page(0))
    )
    store.put_rollouts(run_id, "train", 1, [rollout(1, index, text="second") for index in range(3)])
    row = {"step": 0, "epoch": 1, "time": 2.0, "summary": {"n": 1, "success": 0.5}, "rollouts": [rollout(0, 0)]}
    store.put_evaluation(run_id, row)
    assert [(row.step, row.summary["success"]) for row in store.evals(run_id)] == [(0, 0.5)]
    assert store.rollout_count(run_id) == store.rollout_count(run_id, contains="second") == 3
    assert store.rollout_count(run_id, split="eval") == 1


def test_what_owners_write_on_a_run_and_a_requested_cancel_change_the_mark_of_pages(store: Store, run_id: str) -> None:
    assert queue.claim(store)
    changes: list[Callable[[], object]] = [
        lambda: queue.label(store, store.run(run_id), queue.Label(name="first")),
        lambda: queue.label(store, store.run(run_id), queue.Label(note="too short")),
        lambda: queue.request_cancel(store, run_id),
    ]
    for change in changes:
        before = store.change_mark(), store.change_mark(run_id)
        assert (store.change_mark(), store.change_mark(run_id)) == before
        change()
        assert store.change_mark() != before[0] and store.change_mark(run_id) != before[1]


def test_the_last_events_come_oldest_first_and_never_change(store: Store, run_id: str) -> None:
    for number in range(5):
        event = {"time": float(number), "epoch": 1, "kind": "phase", "message": f"m{number}", "seconds": number}
        store.put_event(run_id, f"0001-{number}", event)
    store.put_event(run_id, "0001-4", {"time": 99.0, "epoch": 1, "kind": "phase", "message": "another"})
    events = store.events(run_id, limit=2)
    assert [(event.message, event.data) for event in events] == [("m3", {"seconds": 3}), ("m4", {"seconds": 4})]
    assert store.events(run_id, kinds=["error"]) == []


def test_a_checkpoint_is_found_by_step_or_is_the_newest(store: Store, run_id: str) -> None:
    with pytest.raises(FlashError, match="waits for the first"):
        store.checkpoint(run_id)
    for step in (10, 20):
        manifest = {
            "step": step, "epoch": 1, "time": 3.0, "digest": "d", "size_bytes": 5, "optimizer_bytes": 0,
            "metrics": {}, "files": {},
        }  # fmt: skip
        store.put_checkpoint(run_id, manifest, f"/runs/{step}")
    assert store.checkpoint(run_id).step == 20 and store.checkpoint(run_id, 10).path == "/runs/10"
    with pytest.raises(FlashError, match=r"use one of the steps \[10, 20\]"):
        store.checkpoint(run_id, 15)


def test_an_environment_is_found_by_name_digest_or_the_start_of_one(store: Store) -> None:
    for digest in ("aaaaaa1111", "bbbbbb2222", "bbbbbb3333", "aaaaaa1111"):
        store.add_environment(name="calc", digest=digest, path=f"/e/{digest}", size_bytes=1, data={"splits": {}})
    assert store.environment("calc").digest == "aaaaaa1111"
    assert store.environment("calc@bbbbbb2222").path == "/e/bbbbbb2222"
    assert store.environment("calc@aaaaaa").digest == "aaaaaa1111" and len(store.environments()) == 3
    for reference, hint in [("calc@bbbbbb", "one of"), ("calc@aaa", "one of"), ("calk", "did you mean 'calc'")]:
        with pytest.raises(FlashError, match=hint) as error:
            store.environment(reference)
        assert error.value.code == "unknown_environment"


def test_a_deployment_changes_only_from_an_expected_state(store: Store) -> None:
    store.add_deployment({"id": "dep-1", "name": "d", "model": "m", "step": 10})
    assert not store.update_deployment("dep-1", expected_states=["ready"], state="stopped")
    assert store.update_deployment("dep-1", expected_states=["starting"], state="ready", base_url="http://x")
    row = store.deployment("dep-1")
    assert (row.state, row.base_url, row.step, row.run_id) == ("ready", "http://x", 10, None)
    assert store.deployments(["stopped"]) == []
    with pytest.raises(FlashError, match="unknown_deployment"):
        store.deployment("dep-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "read",
    [
        lambda store, run_id: store.run(run_id),
        lambda store, run_id: store.last_metrics(run_id),
        lambda store, run_id: store.series(run_id, "reward/mean"),
        lambda store, run_id: store.runs(limit=20),
        lambda store, run_id: store.active_runs(),
        lambda store, run_id: store.rollouts(run_id, order="worst"),
    ],
)
def test_what_status_reads_stays_fast_among_many_runs(crowded: tuple[Store, str], read: Callable[[Store, str], Any]):
    store, run_id = crowded
    seconds = min(timed(lambda: read(store, run_id)) for _ in range(15))
    assert seconds < 0.05, f"{seconds * 1000:.1f} ms at best"


def timed(act: Callable[[], Any]) -> float:
    """Seconds of processor time: other processes of the machine do not count."""
    started = time.process_time()
    act()
    return time.process_time() - started


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """1,000 ended runs of 50 steps and 20 metrics each: a million metric points."""
    store = Store(tmp_path_factory.mktemp("crowded"))
    run_id = new_run(store)
    run = store.query("SELECT * FROM runs")[0]
    run.pop("gpus")  # the database computes it
    metrics = {f"group/metric{number}": number * 1.234567 for number in range(19)}
    with store.transaction():
        for number in range(1000):
            store.insert("runs", {**run, "id": f"run-{number:08d}", "state": "succeeded", "created": number})
            for step in range(1, 51):
                put_metrics(store, f"run-{number:08d}", step, **{"reward/mean": step / 50}, **metrics)
    for step in range(1, 51):
        put_metrics(store, run_id, step, **{"reward/mean": step / 50}, **metrics)
        store.put_rollouts(run_id, "train", step, [rollout(step, index) for index in range(32)])
    return store, run_id


@pytest.mark.slow
def test_many_threads_that_write_wait_for_each_other_and_none_finds_the_database_busy(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("flash_mcp.state.database.BUSY_TIMEOUT_S", 0.01)
    store = Store(tmp_path)
    store.execute("CREATE TABLE counts (number INTEGER)")

    def write(number: int) -> None:
        with store.transaction():
            (count,) = store.column("SELECT count(*) FROM counts")
            threading.Event().wait(0.02)  # longer than another program is waited for
            store.execute("INSERT INTO counts VALUES (?)", [count])
        store.close()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(write, range(48)))
    assert store.column("SELECT number FROM counts ORDER BY number") == list(range(48))
    store.close()


SLURM: dict[str, Any] = {"engine": "slurm", "storage": "/shared/flash"}


def test_without_a_file_there_are_no_targets(tmp_path: Path) -> None:
    assert targets(tmp_path) == {}
    with pytest.raises(FlashError, match=r"^\[unknown_target.*no target 'lab'"):
        find_target(tmp_path, "lab")


@pytest.mark.needs("engines")
def test_what_was_added_is_read_back_and_what_is_removed_leaves_the_rest(tmp_path: Path) -> None:
    values = {
        **SLURM,
        "options": ["--gres=gpu:1", '--comment="two words"'],
        "env": {"A": "x y", "B": "="},
        "slots": 3,
        "price_per_hour": 1.5,
    }
    first = new_target(tmp_path, "lab", values)
    assert targets(tmp_path) == {}
    write_target(tmp_path, "lab", first)
    write_target(tmp_path, "other", new_target(tmp_path, "other", {**SLURM, "storage": "s3://bucket/flash/"}))
    (tmp_path / FILE).write_text(f"# by hand\n{(tmp_path / FILE).read_text()}")
    assert find_target(tmp_path, "lab") == first == TargetSettings(**values)
    assert find_target(tmp_path, "other").folder_of("run-1") == "s3://bucket/flash/run-folders/run-1"
    remove_target(tmp_path, "lab")
    assert list(targets(tmp_path)) == ["other"]
    assert (tmp_path / FILE).read_text().startswith("# by hand\n")


@pytest.mark.needs("engines")
def test_any_name_and_text_of_a_target_is_read_back(tmp_path: Path) -> None:
    resources = {"accelerator_type:A100": 0.01, "a.b": 1.0}
    fields = {
        "engine": "ray", "storage": "/s", "address": "http://head", "resources": resources, "env": {"NOTE": "🚀 ü"},
    }  # fmt: skip
    added = new_target(tmp_path, "lab", fields)
    write_target(tmp_path, "lab", added)
    assert find_target(tmp_path, "lab") == added
    with pytest.raises(FlashError, match="a finite number"):  # which TOML writes otherwise
        new_target(tmp_path, "lab", {**fields, "resources": {"GPU": float("inf")}})


RAY = "[lab]\nengine = 'ray'\nstorage = '/s'\naddress = 'http://head'\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[lab]\nengine = 'pbs'\nstorage = '/s'", "engine: no installed package brings 'pbs'"),
        ("[lab]\nengine = 'ray'\nstorage = '/s'", "Ray needs an address"),
        ("[lab]\nengine = 'sky'\nstorage = '/s'", "SkyPilot needs an address"),
        (f"{RAY}resources = {{ GPU = 'a' }}", "Ray takes numbers, and GPU is 'a'"),
        ("[lab]\nengine = 'slurm'\nstorage = 'here'", "storage: name a URL"),
        ("[lab]\nengine = 'slurm'", "storage: Field required"),
        ("[lab]\nengine = 'slurm'\nstorage = '/s'\ncolour = 1", "colour: Extra inputs"),
        ("[local]\nengine = 'slurm'\nstorage = '/s'", "'local' cannot be a target's name"),
        ("[lab]\nengine = 'slurm'\nstorage = '/s'\nenv = {'a b' = '1'}", "'a b' is no name"),
        (
            "[lab]\nengine = 'slurm'\nstorage = '/s'\ncards = {name = 'a', memory_gib = 0}",
            "cards.memory_gib: Input should be greater than 0",
        ),
        (f"{RAY}setup = 'uv'\npython = '/opt/my python/bin/python3'", "no command: quote a path that has spaces"),
        (f'{RAY}python = "\'/opt/python"', "python: No closing quotation"),
        ("lab = 1", "lab is no table"),
        ("[lab", "cannot be read"),
    ],
)
@pytest.mark.needs("engines")
def test_a_wrong_file_is_refused_with_what_is_wrong_in_it(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FlashError) as caught:
        targets(tmp_path)
    assert caught.value.code == "targets_invalid" and says in str(caught.value)


@pytest.mark.needs("engines")
def test_what_the_nodes_have_is_noted_in_the_table_and_all_else_stays(tmp_path: Path) -> None:
    for name in ("lab", "other"):
        write_target(tmp_path, name, new_target(tmp_path, name, SLURM))
    path = tmp_path / FILE
    path.write_text(path.read_text().replace("[lab]", "[lab]  # ours"))
    cards = Cards(name='an "A100"', memory_gib=80.0, count=8)
    note_cards(tmp_path, "lab", cards)
    assert find_target(tmp_path, "lab") == TargetSettings(**SLURM, cards=cards)
    assert find_target(tmp_path, "other") == TargetSettings(**SLURM)
    assert path.read_text().startswith("[lab]  # ours\ncards = ")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.needs("engines")
def test_what_the_nodes_have_is_noted_in_no_table_below_that_of_a_target(tmp_path: Path, order: Sequence[int]) -> None:
    tables = ('[lab]\nengine = "slurm"\nstorage = "/shared/flash"\n', '[lab.env]\nNAME = "value"\n')
    (tmp_path / FILE).write_text("".join(tables[number] for number in order))
    cards = Cards(name="A100", memory_gib=80.0)
    note_cards(tmp_path, "lab", cards)
    lab = find_target(tmp_path, "lab")
    assert (lab.cards, lab.env) == (cards, {"NAME": "value"})


@pytest.mark.needs("engines")
def test_the_commands_add_list_and_remove(flash_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add = ["target", "add", "lab", "--engine", "slurm", "--storage", "/shared/flash"]
    assert main([*add, *["--option=--gres=gpu:1", "--option", "-p gpu", "--env", "A=b", "--unproved"]]) == 0
    written = tomllib.loads((flash_home / FILE).read_text())
    assert written == {"lab": {**SLURM, "options": ["--gres=gpu:1", "-p", "gpu"], "env": {"A": "b"}}}
    capsys.readouterr()
    assert main([*add, "--unproved"]) != 0
    assert "there is a target 'lab' already" in capsys.readouterr().err
    assert main(["target", "list"]) == 0
    assert capsys.readouterr().out == "lab  slurm  /shared/flash\n"
    assert main(["target", "remove", "lab"]) == 0
    assert targets(flash_home) == {}


@pytest.mark.needs("engines")
def test_a_target_that_fails_its_proof_is_not_added(flash_home: Path, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no sbatch
    assert main(["target", "add", "lab", "--engine", "slurm", "--storage", str(tmp_path / "storage")]) != 0
    assert "there is no squeue here" in capsys.readouterr().err
    assert targets(flash_home) == {}
    assert not list((tmp_path / "storage" / "run-folders").iterdir())
