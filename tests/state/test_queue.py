"""The state machine of a run, by example, by property, and by many at once."""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Run
from flash_mcp.protocol.run_files import Beat
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import ResolvedSpec, RunSpec, resolve
from flash_mcp.state import costs, queue
from flash_mcp.state.owners import Caller, Quotas, acting_as
from flash_mcp.state.store import Store
from tests.waiting import WAIT_S

LOST = FlashError("worker_failed", "gone")
"""Fields of a run that the first version did not have."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def environment(store: Store, digest: str = "abcdef123456") -> EnvironmentVersion:
    return store.add_environment(name="calc", digest=digest, path=f"/environments/calc/{digest}", size_bytes=1)


def enqueue(store: Store, key: str | None = None, **fields: object) -> tuple[Run, bool]:
    spec = resolve(RunSpec.model_validate({"environment": "calc", **fields}))
    return queue.enqueue(store, spec, environment(store), idempotency_key=key)


def claim(store: Store) -> Run:
    run = queue.claim(store)
    assert run is not None
    return run


def enqueue_as(owner: str, store: Store, count: int = 1) -> list[str]:
    with acting_as(Caller(owner, limits=Quotas(queued_runs=1000))):
        return [enqueue(store)[0].id for _ in range(count)]


def end(store: Store, run: Run) -> None:
    assert queue.finish(store, run.id, run.attempt, "succeeded")
    # It worked all the time.
    store.execute("UPDATE runs SET used_s = max(0, ended - started) WHERE id = ?", [run.id])


def test_a_new_run_is_queued_with_its_environment_pinned_and_no_folder_made(store: Store) -> None:
    run, created = enqueue(store, steps=7)
    assert created
    assert run.id.startswith("run-") and len(run.id) == 12
    assert (run.state, run.attempt, run.max_attempts, run.steps, run.step) == ("queued", 0, 3, 7, 0)
    assert run.spec.environment == "calc@abcdef123456"
    assert run.sources["steps"] == "argument" and run.sources["group_size"] == "recipe"
    assert not Path(run.folder).exists()


def test_the_job_holds_what_a_worker_needs(store: Store) -> None:
    adapter = {"path": "/a", "run_id": "run-1", "step": 3, "digest": "d"}
    run, _ = queue.enqueue(store, resolve(RunSpec(environment="calc")), environment(store), init_adapter=adapter)
    job = queue.job(run)
    assert set(job) == {
        "run_id", "owner", "spec", "sources", "environment", "model", "init_adapter", "dataset", "lineage", "created",
        "mixture", "regression", "started", "teacher",
    }  # fmt: skip
    digest = "abcdef123456"
    named = {"name": "calc", "owner": "local", "digest": digest, "path": f"/environments/calc/{digest}"}
    assert job["environment"] == named and (job["run_id"], job["init_adapter"]) == (run.id, adapter)


def test_the_same_key_and_request_give_the_first_run(store: Store) -> None:
    first, created = enqueue(store, key="k", steps=5)
    environment(store, "ffffff000000")  # pushed in between: the request is the same all the same
    again, created_again = enqueue(store, key="k", steps=5)
    assert (created, created_again) == (True, False)
    assert again.id == first.id


def test_a_key_of_an_auto_target_matches_whichever_target_it_got() -> None:
    local = resolve(RunSpec(environment="calc", steps=5))
    asked = resolve(RunSpec(environment="calc", steps=5, target="auto"))
    got = asked.spec.model_copy(update={"target": "lab"})
    placed = ResolvedSpec(spec=got, sources={**asked.sources, "target": "auto"})
    digests = [queue.request_digest(request) for request in (local, asked, placed)]
    assert digests[1] == digests[2] != digests[0]


def test_the_same_key_with_another_request_is_a_conflict_and_makes_nothing(store: Store) -> None:
    first, _ = enqueue(store, key="k", steps=5)
    with pytest.raises(FlashError, match=first.id) as error:
        enqueue(store, key="k", steps=6)
    assert error.value.code == "idempotency_conflict"
    assert len(store.runs()) == 1


def test_a_caller_queues_no_more_runs_than_the_limit(store: Store) -> None:
    with acting_as(Caller("ann", limits=Quotas(queued_runs=1))):
        enqueue(store)
        with pytest.raises(FlashError, match="quota_exceeded"):
            enqueue(store)
    assert len(store.runs()) == 1


def test_one_key_used_by_eight_threads_at_once_makes_one_run(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: enqueue(store, key="k"), range(16)))
    assert len({run.id for run, _ in runs}) == 1 and sum(created for _, created in runs) == 1


def test_the_work_of_all_attempts_counts_and_not_the_time_between(store: Store, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=1000.0, time=lambda: clock.now)
    monkeypatch.setattr(queue, "time", clock)

    def work(run: Run, seconds: float) -> None:
        """Half until the first heartbeat, half until the second."""
        for step in (0, 1):
            clock.now += seconds / 2
            queue.mark_running(store, run.id, run.attempt)
            beat: Beat = {"epoch": run.attempt, "step": step, "phase": "train"}
            queue.record_beat(store, run.id, run.attempt, beat, progressed=True)

    run, _ = enqueue(store, max_hours=0.05)
    clock.now += 500  # in the queue
    work(claim(store), 100)
    queue.requeue(store, run.id, 1, LOST, delay_s=50)
    clock.now += 50
    work(claim(store), 100)
    assert store.run(run.id).used_s == 200
    assert costs.used_up(store.run(run.id), store.base) == "max_hours=0.05 is used up"
    queue.request_cancel(store, run.id)
    queue.finish(store, run.id, 2, "cancelled")
    ended = store.run(run.id)
    RunFolder(run.folder).create(queue.job(ended))
    resumed = queue.resume(store, ended, RunFolder(run.folder), None, "")
    assert (resumed.used_s, costs.used_up(resumed, store.base)) == (200, None)


def test_the_oldest_run_is_claimed_first_and_once(store: Store) -> None:
    ids = [enqueue(store)[0].id for _ in range(3)]
    assert [claim(store).id for _ in ids] == ids and queue.claim(store) is None


def test_a_requeued_run_waits_for_its_delay_and_then_goes_before_newer_ones(store: Store) -> None:
    first, newer = enqueue(store)[0], enqueue(store)[0]
    claim(store)
    assert queue.requeue(store, first.id, 1, LOST, delay_s=30) and store.run(first.id).error == LOST.to_dict()
    assert claim(store).id == newer.id
    third = enqueue(store)[0]
    store.execute("UPDATE runs SET not_before = 0 WHERE id = ?", [first.id])
    run = claim(store)
    assert (run.id, run.attempt) == (first.id, 2)
    assert claim(store).id == third.id


def test_how_many_steps_a_run_makes_is_what_its_worker_said_last(store: Store) -> None:
    run, _ = enqueue(store, algorithm="sft", epochs=2)
    claim(store)
    assert store.run(run.id).steps is None
    for beat, expected in (({}, None), ({"steps": None}, None), ({"steps": 12}, 12), ({}, 12), ({"steps": 13}, 13)):
        assert queue.record_beat(store, run.id, 1, {"step": 1, "phase": "train", **beat}, progressed=True)
        assert store.run(run.id).steps == expected


def test_a_queued_run_is_cancelled_at_once(store: Store) -> None:
    run, _ = enqueue(store)
    cancelled = queue.request_cancel(store, run.id, "changed my mind")
    assert (cancelled.state, cancelled.cancel_reason) == ("cancelled", "changed my mind")
    assert cancelled.ended is not None
    assert queue.claim(store) is None and queue.request_cancel(store, run.id, "again") == cancelled


def test_a_started_run_is_told_and_ends_as_cancelled_whatever_it_answers(store: Store) -> None:
    run, _ = enqueue(store)
    claim(store)
    told = queue.request_cancel(store, run.id)
    assert (told.state, told.cancel_requested is not None) == ("starting", True)
    assert RunFolder(run.folder).is_cancelled() and not queue.requeue(store, run.id, 1, LOST)
    assert queue.finish(store, run.id, 1, "failed", error=LOST.to_dict())
    ended = store.run(run.id)
    assert (ended.state, ended.error) == ("cancelled", None)


def claim_all(store: Store) -> list[Run]:
    return list(iter(lambda: queue.claim(store), None))


@pytest.mark.slow
def test_eight_processes_claim_every_run_once(store: Store) -> None:
    ids = {enqueue(store)[0].id for _ in range(120)}
    code = """
import pathlib, sys
import flash_mcp.state.store
from flash_mcp.state import queue
flash_mcp.state.database.BUSY_TIMEOUT_S = 90  # SQLite hands its lock to nobody in particular
store = flash_mcp.state.store.Store(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
for run in iter(lambda: queue.claim(store), None):
    assert run.attempt == 1
    print(run.id)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(store.base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:  # all are let go at once
        assert child.stdin
        child.stdin.close()
        child.stdin = None
    claimed = [line for child in children for line in child.communicate(timeout=WAIT_S)[0].split()]
    assert [child.returncode for child in children] == [0] * 8
    assert len(claimed) == 120 and set(claimed) == ids


class RunLife(RuleBasedStateMachine):
    """One run among transitions in any order, some about older attempts, beside a model of a few lines."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.scratch.name))
        self.run_id = enqueue(self.store, max_attempts=2)[0].id  # not the default
        self.state, self.attempt, self.cancel_wanted = "queued", 0, False
        self.last_words: Run | None = None

    def teardown(self) -> None:
        self.store.close()
        self.scratch.cleanup()

    @rule()
    def claim(self) -> None:
        run = queue.claim(self.store)
        assert (run is not None) == (self.state == "queued")
        if run:
            self.state, self.attempt = "starting", self.attempt + 1
            assert run.attempt == self.attempt

    @rule(attempt=st.integers(0, 4))
    def mark_running(self, attempt: int) -> None:
        if queue.mark_running(self.store, self.run_id, attempt):
            assert self.state == "starting" and attempt == self.attempt
            self.state = "running"
        else:
            assert self.state != "starting" or attempt != self.attempt

    @rule(attempt=st.integers(0, 4), step=st.integers(0, 50))
    def beat(self, attempt: int, step: int) -> None:
        accepted = queue.record_beat(
            self.store, self.run_id, attempt, {"step": step, "phase": "train"}, progressed=True
        )
        assert accepted == (self.state in ("starting", "running") and attempt == self.attempt)

    @rule(attempt=st.integers(0, 4))
    def requeue(self, attempt: int) -> None:
        taken = self.state in ("starting", "running") and attempt == self.attempt
        allowed = taken and self.attempt < 2 and not self.cancel_wanted
        assert queue.requeue(self.store, self.run_id, attempt, LOST) == allowed
        if allowed:
            self.state = "queued"

    @precondition(lambda self: self.attempt > 0)
    @rule(attempt=st.integers(0, 4), state=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def finish(self, attempt: int, state: queue.EndState) -> None:
        active = self.state in ("queued", "starting", "running") and attempt == self.attempt
        error = LOST.to_dict() if state == "failed" else None
        assert queue.finish(self.store, self.run_id, attempt, state, step=60, error=error) == active
        if active:
            self.state = "cancelled" if self.cancel_wanted else state
            ended = self.store.run(self.run_id)  # the error of a lost attempt before is no more said
            assert (ended.error is None, ended.step) == (self.state != "failed", 60)

    @rule()
    def cancel(self) -> None:
        if self.state in ("succeeded", "failed"):
            with pytest.raises(FlashError, match="run_finished"):
                queue.request_cancel(self.store, self.run_id)
            return
        queue.request_cancel(self.store, self.run_id)
        self.cancel_wanted = True
        if self.state == "queued":
            self.state = "cancelled"

    @invariant()
    def the_store_agrees_and_the_end_is_the_end(self) -> None:
        run = self.store.run(self.run_id)
        assert (run.state, run.attempt) == (self.state, self.attempt) and self.attempt <= run.max_attempts
        assert (run.ended is not None) == (self.state in ("succeeded", "failed", "cancelled"))
        assert self.last_words in (None, run)
        if run.ended is not None:
            self.last_words = run


TestRunLife = RunLife.TestCase
TestRunLife.settings = settings(max_examples=40, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow])


# -- owners share ----------------------------------------------------------------------------------


class Clock:
    """Stands in for the time module of the queue."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 1e-3  # two calls are never at one time
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(queue, "time", made)
    return made


def test_an_owner_with_one_run_is_next_whoever_queued_a_hundred_before(store: Store, clock: Clock) -> None:
    many = enqueue_as("alice", store, 100)
    first = claim(store)
    assert first.id == many[0]
    (one,) = enqueue_as("bob", store)
    clock.now += 60
    end(store, first)
    assert queue.queued_ahead(store, store.run(one)) == 0 and queue.queued_ahead(store, store.run(many[1])) == 1
    assert claim(store).id == one and claim(store).id == many[1]
    assert queue.queued_ahead(store, store.run(one)) is None


def test_the_owner_who_used_least_of_late_is_next(store: Store, clock: Clock) -> None:
    for owner, seconds in (("alice", 500), ("bob", 100), ("carol", 300)):
        enqueue_as(owner, store)
        run = claim(store)
        clock.now += seconds
        end(store, run)
    for owner in ("alice", "bob", "carol"):
        enqueue_as(owner, store, 2)
    assert [claim(store).owner for _ in range(6)] == ["bob", "carol", "alice"] * 2


def test_what_an_owner_uses_on_one_target_is_no_share_of_another(store: Store, clock: Clock) -> None:
    enqueue_as("alice", store, 3)
    assert claim(store).owner == "alice"
    clock.now += 500
    mine = [*enqueue_as("alice", store), *enqueue_as("bob", store)]
    for run_id in mine:
        store.execute("UPDATE runs SET target = 'lab' WHERE id = ?", [run_id])
    assert [queue.queued_ahead(store, store.run(run_id)) for run_id in mine] == [0, 1]
    found = queue.claim(store, target="lab")
    assert found and found.owner == "alice"  # hers waited longer, and neither has run there


def test_shares_count_gpus_and_not_the_time_that_runs_waited_for_a_machine(store: Store, clock: Clock) -> None:
    with acting_as(Caller("alice", limits=Quotas(queued_runs=1000))):
        for _ in range(3):
            enqueue(store, gpus=2)
    enqueue_as("bob", store, 4)
    # One run of alice's is as much as two of bob's.
    assert [claim(store).owner for _ in range(6)] == ["alice", "bob", "bob", "alice", "bob", "bob"]
    for run in store.runs():
        if run.started:
            clock.now += 100
            assert queue.finish(store, run.id, run.attempt, "succeeded")
            # Alice's waited in the engine's queue for most of it.
            store.execute("UPDATE runs SET used_s = ? WHERE id = ?", [1 if run.owner == "alice" else 50, run.id])
    enqueue_as("bob", store)
    enqueue_as("alice", store)
    assert claim(store).owner == "alice"


def test_what_was_used_long_ago_does_not_count(store: Store, clock: Clock) -> None:
    enqueue_as("alice", store)
    run = claim(store)
    clock.now += 5000
    end(store, run)
    clock.now += queue.LATELY_S
    enqueue_as("alice", store)
    enqueue_as("bob", store)
    assert [claim(store).owner for _ in range(2)] == ["alice", "bob"]


def test_runs_that_cannot_start_hold_up_nobody(store: Store, clock: Clock) -> None:
    (lacking,) = enqueue_as("alice", store)
    enqueue_as("bob", store)
    run = queue.claim(store, [lacking])
    assert run and run.owner == "bob"
    assert queue.claim(store, [lacking]) is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.long)])
def test_in_a_simulated_week_owners_get_equal_shares_and_nobody_starves(store: Store, clock: Clock, devices: int):
    """Alice keeps 30 short runs queued, bob 10 long ones; carol brings one now and then."""
    chance = random.Random(devices)
    seconds = {"alice": 600, "bob": 6000, "carol": 1200}
    used = dict.fromkeys(seconds, 0.0)
    under_way: list[tuple[float, Run]] = []
    started: dict[str, list[str]] = {owner: [] for owner in seconds}
    brought: dict[str, list[str]] = {owner: [] for owner in seconds}
    waits: list[float] = []
    for _ in range(250):
        queued = [run.owner for run in store.runs("queued", limit=100)]
        for owner, keeps in (("alice", 30), ("bob", 10), ("carol", chance.random() < 0.1)):
            brought[owner] += enqueue_as(owner, store, max(0, keeps - queued.count(owner)))
        while len(under_way) < devices:
            run = claim(store)
            started[run.owner].append(run.id)
            length = seconds[run.owner] * chance.uniform(0.5, 1.5)
            used[run.owner] += length
            under_way.append((clock.now + length, run))
            if run.owner == "carol":
                waits.append(clock.now - run.created)
        under_way.sort(key=lambda each: each[0])
        clock.now, ended = under_way.pop(0)
        end(store, ended)
    assert all(started[owner] == brought[owner][: len(started[owner])] for owner in seconds)
    assert 0.8 < used["alice"] / used["bob"] < 1.25
    assert waits
    assert max(waits) <= 1.5 * max(seconds.values())  # the run that was under way when she came


def steps_of(store: Store, act: Callable[[], object]) -> int:
    """Instructions of SQLite that `act` takes."""
    found = 0

    def count() -> int:
        nonlocal found
        found += 1
        return 0

    connection = store._db.conn
    connection.set_progress_handler(count, 1)
    act()
    connection.set_progress_handler(None, 1)
    return found


def test_a_look_at_the_queue_takes_no_longer_with_many_runs_in_it(store: Store) -> None:
    for owner in ("a", "b"):
        enqueue_as(owner, store, 20)
    looks = {
        "claim": lambda: queue.claim(store),
        "runs that may have to wait": lambda: store.may_have_to_wait("local"),
        "runs with secrets": store.active_with_secrets,
        "runs that advice depends on": lambda: store.near(store.runs(limit=1)[0]),
    }
    few = {name: steps_of(store, look) for name, look in looks.items()}
    for owner in ("a", "b"):
        enqueue_as(owner, store, 180)
    many = {name: steps_of(store, look) for name, look in looks.items()}
    assert all(many[name] <= 1.5 * few[name] for name in looks), (few, many)


def test_a_claim_reads_nothing_of_runs_that_ended_on_another_target(store: Store) -> None:
    for owner in ("a", "b"):
        enqueue_as(owner, store, 55)

    def steps_of_claim() -> int:
        return steps_of(store, lambda: claim(store))

    few = steps_of_claim()
    sql = """UPDATE runs SET state = 'succeeded', target = 'lab', started = ?1, ended = ?1
             WHERE id IN (SELECT id FROM runs WHERE state = 'queued' ORDER BY id LIMIT 100)"""
    assert store.execute(sql, [time.time()]) == 100
    assert steps_of_claim() <= 1.5 * few


def test_a_look_at_runs_under_way_reads_those_that_have_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(10):
        enqueue(store)
    claimed = claim_all(store)
    read: list[str] = []
    of = Run.from_row

    def note(fields: Mapping[str, Any]) -> Run:
        read.append(fields["id"])
        return of(fields)

    monkeypatch.setattr(Run, "from_row", note)
    assert store.taken_runs("local") == claimed
    read.clear()
    changed, ended = claimed[3], claimed[5]
    queue.record_handle(store, changed.id, 1, "job 7")
    end(store, ended)
    taken = {run.id: run for run in store.taken_runs("local")}
    assert read == [changed.id] and taken[changed.id].handle == "job 7"
    assert list(taken) == [run.id for run in claimed if run is not ended]
    assert store.taken_runs("elsewhere") == []
