"""The state machine of a run. Each transition is one guarded UPDATE whose row count decides.

    queued -> starting -> running -> succeeded | failed | cancelled
       ^---------'-----------'   requeue: the attempt was lost and another one is allowed
       ^--------------------------------'-----------'-----------'   resume

`attempt` is the fencing token: `claim` increments it, and a transition that names an older attempt
changes nothing. Once a cancel is requested, a run can only end as cancelled."""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from environments.untrusted_text import visible
from flash_mcp import __version__
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.exams import KEY_VARIABLE
from flash_mcp.protocol.paths import runs_dir
from flash_mcp.protocol.records import ACTIVE, EnvironmentVersion, Json, Run
from flash_mcp.protocol.run_files import Beat
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import (
    AUTO,
    LOCAL_TARGET,
    MAX_GPUS,
    ResolvedEval,
    ResolvedSpec,
    default_of,
)
from flash_mcp.state.database import marks, pick
from flash_mcp.state.owners import caller
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target

EndState = Literal["succeeded", "failed", "cancelled"]
Loss = Literal["attempt", "preemption", "nothing"]
"""What a lost attempt counts as."""
MAX_PREEMPTIONS = 50
"""A run that its engine has ended more often fails."""
SERVER_START_S = 1800.0
"""A model server that makes no progress for so long is replaced: the model may have to be fetched
first."""
SERVER_ATTEMPTS = 2
"""A model server that is lost again soon after it was replaced fails."""
MAX_DELAY_S = 60.0
"""The longest that `requeue` lets a run wait."""
ROOT = Path(__file__).parents[2]
ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(frozen=True)
class Label:
    """What an owner writes on a run. None keeps what it has; an empty text removes it."""

    name: str | None = None
    """Shown on one line."""
    note: str | None = None


NO_LABEL = Label()


def enqueue(
    store: Store,
    resolved: ResolvedSpec | ResolvedEval,
    environment: EnvironmentVersion,
    init_adapter: Json | None = None,
    idempotency_key: str | None = None,
    dataset: Json | None = None,
    lineage: Json | None = None,
) -> tuple[Run, bool]:
    """Add a run of the caller and return (run, True). If the same spec used the idempotency key
    before, return (that run, False).

    The stored spec names the environment as NAME@DIGEST. `lineage` is stored together with the
    version of the code. Only the row is made; the supervisor writes the run folder.

    Raises FlashError(idempotency_conflict) if another spec used the key, FlashError(quota_exceeded)
    if too many of the caller's runs are queued, FlashError(unknown_target | targets_invalid), and
    FlashError(unknown_environment | unknown_checkpoint | unknown_dataset) if one of these was
    removed meanwhile."""
    spec = resolved.spec.model_dump()
    with store.transaction():
        if first := asked_before(store, resolved, idempotency_key):
            return first, False
        _check_quota(store)
        exam = (lineage or {}).get("exam")
        if not exam and any(name.startswith(KEY_VARIABLE) for name in spec["secrets"]):
            what = "the key of an exam goes to a run of evaluate that takes it, and to no other"
            raise FlashError("not_permitted", what, fix="leave it out of secrets")
        lineage = {"code": code_version(), "client": surroundings.client(), **(lineage or {})}
        # Files may have been removed meanwhile: loading an environment takes seconds
        made_from = [("unknown_environment", environment.reference, environment.path)]
        for part in lineage.get("mixture", ()):
            made_from.append(("unknown_environment", part["name"], part["path"]))
        for adapter in filter(None, [init_adapter, lineage.get("teacher")]):
            made_from.append(("unknown_checkpoint", str(adapter.get("run_id")), adapter["path"]))
        if dataset:
            reference = f"{dataset['name']}@{dataset['digest']}"
            made_from.append(("unknown_dataset", reference, dataset["path"]))
        for code, name, path in made_from:
            if Path(path).is_relative_to(store.base) and not Path(path).exists():
                what = f"{name} has just been removed"
                raise FlashError(code, what, fix="name another one, or make it again")
        run_id = new_id(store)
        # On other weights, what is evaluated or trained on would be another model.
        before = (spec.get("checkpoint") or "").partition("@")[0]
        before = before or (init_adapter or {}).get("run_id")
        if before and (commit := store.model_commit(before)):
            lineage["model_commit"] = commit
        if (granted := caller().secrets) is not None:
            lineage["granted"] = sorted(granted)
        if environment.owner != caller().owner:  # the local owner may run another's
            lineage["environment_owner"] = environment.owner
        spec["environment"] = f"{environment.name}@{environment.digest}"
        columns: Json = {"owner": caller().owner, "algorithm": spec["algorithm"]}
        columns |= {"steps": spec["steps"], "sources": resolved.sources, "lineage": lineage}
        columns |= {"environment": environment.name, "environment_digest": environment.digest}
        columns |= {"environment_path": environment.path, "dataset": dataset}
        columns |= {"init_adapter": init_adapter, "idempotency_key": idempotency_key}
        columns |= {"request_digest": request_digest(resolved)}
        _add(store, run_id, spec, **columns)
    return store.run(run_id), True


def enqueue_server(
    store: Store, serves: str, deployment: Mapping[str, Any], *, gpus: int = 1, **lineage: Any
) -> str:
    """Add the run of a model server that a deployment needs; its id. `serves` is the deployment, or
    the model on this machine, where deployments share a server. The caller is in the transaction
    that writes the deployment. FlashError(unknown_target | targets_invalid)."""
    run_id = new_id(store, "srv")
    spec: Json = {"environment": "", "target": deployment["target"], "secrets": [], "gpus": gpus}
    spec |= {"model": deployment["model"], "lora_rank": deployment["lora_rank"]}
    spec |= {"stall_timeout_s": SERVER_START_S, "max_attempts": SERVER_ATTEMPTS}
    columns: Json = {"owner": deployment["owner"], "algorithm": "serve", "serves": serves}
    columns |= {"init_adapter": {"path": deployment["adapter_path"]}}
    _add(store, run_id, spec, **columns, lineage={"code": code_version(), **lineage})
    return run_id


def _add(store: Store, run_id: str, spec: Json, **columns: Any) -> None:
    now = time.time()
    row: Json = {"id": run_id, "state": "queued", "created": now, "updated": now, "spec": spec}
    row |= pick(spec, "model", "target", "max_attempts")
    row["folder"] = str(runs_dir(store.base) / run_id)
    if spec["target"] != LOCAL_TARGET:
        row["folder"] = find_target(store.base, spec["target"]).folder_of(run_id)
    store.insert("runs", row | columns)


def label(store: Store, run: Run, words: Label) -> Run:
    """Give the run these words, without characters that a terminal obeys."""
    changes: Json = {}
    if words.name is not None:
        changes["name"] = visible(" ".join(words.name.split())) or None
    if words.note is not None:
        changes["note"] = visible(words.note.strip()) or None
    if not changes:
        return run
    sql = """UPDATE main.runs SET lineage = json_patch(lineage, ?)
             WHERE id = (SELECT id FROM runs WHERE id = ?)"""
    store.execute(sql, [json.dumps(changes), run.id])
    return store.run(run.id)


def job(run: Run) -> Json:
    if run.serves:
        serve: Json = {"rank": run.training.lora_rank, "name": run.model}
        if "port" in run.lineage:
            serve["port"] = run.lineage["port"]
        if run.precision:
            serve["precision"] = run.precision
        job: Json = {"run_id": run.id, "model": run.model, "spec": {}, "serve": serve}
        return {**job, "init_adapter": run.init_adapter}
    environment = {"name": run.environment, "digest": run.environment_digest}
    environment["path"] = run.environment_path
    environment["owner"] = run.lineage.get("environment_owner", run.owner)
    job = {"run_id": run.id, "owner": run.owner, "model": run.model, "environment": environment}
    job |= {"spec": run.spec.model_dump(), "sources": run.sources, "dataset": run.dataset}
    job |= {"init_adapter": run.init_adapter, "lineage": run.lineage}
    for name in ("teacher", "regression", "mixture"):
        job[name] = run.lineage.get(name)
    return {**job, "created": run.created, "started": run.started}


ALL_QUEUED = """
    SELECT id, owner, created,
        1 - gpus + sum(gpus) OVER (PARTITION BY owner ORDER BY created, id) AS place
    FROM main.runs WHERE state = 'queued' AND target = ?3 AND serves IS NULL"""
FIRST_QUEUED = """
    SELECT id, owner, created, 1 AS place FROM main.runs WHERE id IN (
        WITH RECURSIVE queued_owners(name) AS (
            SELECT min(owner) FROM main.runs WHERE state = 'queued' AND target = ?3
            UNION ALL
            SELECT (SELECT min(owner) FROM main.runs
                    WHERE state = 'queued' AND target = ?3 AND owner > name)
            FROM queued_owners WHERE name IS NOT NULL)
        SELECT (SELECT id FROM main.runs
                WHERE state = 'queued' AND target = ?3 AND owner = name
                AND (not_before <= ?1 OR not_before > ?4) AND serves IS NULL
                AND id NOT IN (SELECT value FROM json_each(?5))
                AND owner NOT IN (SELECT value FROM json_each(?6))
                ORDER BY created, id LIMIT 1)
        FROM queued_owners)"""
"""The oldest run of each owner that may start. Each is looked up in an index: ten thousand may be
queued. ?4 is the latest that a run can have to wait until: a delay above the maximum means that the
clock was set back."""
FAIR_PLACES = """
    WITH waiting AS ({waiting}),
    owners AS (SELECT count(DISTINCT owner) AS number FROM waiting),
    taken AS (
        SELECT owner, gpus AS running,
            gpus * min(used_s, max(0, ?1 - max(started, ?1 - ?2))) AS seconds
        FROM main.runs
        WHERE state IN ('starting', 'running') AND target = ?3 AND serves IS NULL
        AND (SELECT number FROM owners) > 1
        UNION ALL
        SELECT owner, 0, gpus * min(used_s, max(0, min(ended, ?1) - max(started, ?1 - ?2)))
        FROM main.runs
        WHERE ended > ?1 - ?2 AND started IS NOT NULL AND target = ?3 AND serves IS NULL
        AND (SELECT number FROM owners) > 1),
    share AS (
        SELECT owner, sum(running) AS running, sum(seconds) AS seconds FROM taken GROUP BY owner),
    places AS (
        SELECT coalesce(running, 0) + place AS turn, coalesce(seconds, 0) AS seconds, created, id
        FROM waiting LEFT JOIN share USING (owner))"""
FAIR_ORDER = f"{FAIR_PLACES} SELECT id FROM places ORDER BY turn, seconds, created, id"
"""Ids of queued runs in the order in which they start: each time from the owner with the fewest
GPUs under way on the target, then the fewest seconds of GPUs used there lately, without those that
runs waited for a machine; within an owner, the oldest first. ?1 is the time, ?2 how far back use
counts, ?3 the target. A single owner's share is not looked up: it decides nothing."""
LATELY_S = 86_400.0
CLAIM = """UPDATE main.runs SET state = 'starting', attempt = attempt + 1,
    started = coalesce(started, ?1), updated = ?1, handle = NULL, pending_reason = NULL,
    reported_error = NULL"""


def claim(
    store: Store,
    waiting: Collection[str] = (),
    target: str = LOCAL_TARGET,
    *,
    gpus: int = MAX_GPUS,
    over: Collection[str] = (),
) -> Run | None:
    """Take the target's next run that may start, in FAIR_ORDER: it is now `starting`, with the next
    attempt. None where there is none, and where it needs more than `gpus`.

    `waiting` are ids of runs that cannot start yet, `over` owners whose runs cannot.
    """
    now = time.time()
    sql = f"""{CLAIM} WHERE state = 'queued' AND gpus <= ?7
              AND id = ({FAIR_ORDER.format(waiting=FIRST_QUEUED)} LIMIT 1) RETURNING *"""
    values: list[Any] = [now, LATELY_S, target, now + MAX_DELAY_S]
    values += [json.dumps(list(waiting)), json.dumps(list(over)), gpus]
    with store.transaction():
        return store.record(Run, sql, values)


def claim_server(store: Store, target: str) -> Run | None:
    """As `claim`, for the model servers of deployments: they take no slots, as they do not end. One
    whose predecessor still ends waits: both would take its memory."""
    now = time.time()
    sql = """SELECT id FROM main.runs WHERE state = 'queued' AND target = ?2
             AND serves IS NOT NULL AND (not_before <= ?1 OR not_before > ?3)
             AND NOT EXISTS (SELECT 1 FROM main.runs AS other WHERE other.serves = runs.serves
                             AND other.state IN ('starting', 'running'))
             ORDER BY created, id LIMIT 1"""
    # Only looked for as a rule: a transaction would keep other writers waiting at every look.
    if not (rows := store.query(sql, [now, target, now + MAX_DELAY_S])):
        return None
    with store.transaction():
        claim = f"{CLAIM} WHERE id = ?2 AND state = 'queued' RETURNING *"
        return store.record(Run, claim, [now, rows[0]["id"]])


def queued_ahead(store: Store, run: Run) -> int | None:
    """How many queued runs of its target, of all owners, start before it; None if not queued."""
    sql = f"""{FAIR_PLACES.format(waiting=ALL_QUEUED)}
        SELECT count(*) AS number FROM places, (SELECT * FROM places WHERE id = ?4) AS own
        WHERE (places.turn, places.seconds, places.created, places.id)
           <= (own.turn, own.seconds, own.created, own.id)"""
    [row] = store.query(sql, [time.time(), LATELY_S, run.target, run.id])
    if row["number"]:
        return row["number"] - 1
    return None


def mark_running(store: Store, run_id: str, attempt: int) -> bool:
    """Record the attempt's first heartbeat. The time since the claim counts as work, or since the
    attempt stopped to wait for a machine.
    """
    assignments = """state = 'running', pending_reason = NULL,
        used_s = used_s + CASE WHEN pending_reason IS NULL THEN max(0, ? - updated) ELSE 0 END"""
    return _update(store, assignments, [time.time()], run_id, attempt, ("starting",))


def record_handle(store: Store, run_id: str, attempt: int, handle: str) -> bool:
    return _update(store, "handle = ?", [handle], run_id, attempt, ("starting", "running"))


def follow(store: Store, run_id: str, attempt: int, newer: int) -> bool:
    """The engine started the attempt's job again, which claimed the number `newer`: that counts as
    a preemption.
    """
    assignments = """attempt = ?, max_attempts = max_attempts + ?, preemptions = preemptions + 1,
        pending_reason = NULL, beat = NULL"""
    values = [newer, newer - attempt]
    return _update(store, assignments, values, run_id, attempt, ("starting", "running"))


def record_wait(store: Store, run_id: str, attempt: int, reason: str | None) -> bool:
    """Store why the attempt waits for a machine or cannot be looked after; None once it can."""
    states = ("starting", "running")
    return _update(store, "pending_reason = ?", [reason], run_id, attempt, states)


def record_beat(
    store: Store,
    run_id: str,
    attempt: int,
    beat: Beat,
    *,
    progressed: bool,
    worked_s: float | None = None,
) -> bool:
    """Store the attempt's heartbeat; `progressed` says whether its step or phase changed.

    Step 0 means that the attempt has not reached its first step. The run keeps the step of the
    attempt before. `worked_s` counts as work: the seconds since the attempt's last heartbeat. Who
    did not see that leaves them out, and the heartbeat's own time counts: an old one shows no
    work."""
    now = time.time()
    until = min(now, beat.get("time", now))
    assignments = """used_s = used_s + coalesce(?, max(0, ? - coalesce(beat, ?))),
        step = coalesce(nullif(?, 0), step), steps = coalesce(?, steps),
        phase = ?, beat = ?,
        progress = CASE WHEN ? THEN ? ELSE progress END"""
    values = [worked_s, until, until, beat["step"], beat.get("steps"), beat["phase"], now]
    values += [progressed, now]
    return _update(store, assignments, values, run_id, attempt, ("starting", "running"))


def report_error(store: Store, run_id: str, attempt: int, error: FlashError) -> bool:
    """Have the attempt replaced: who uses it found that it does not work."""
    encoded = json.dumps(error.to_dict(), default=str)
    return _update(store, "reported_error = ?", [encoded], run_id, attempt, ("running",))


def is_held(run: Run) -> bool:
    """Whether the run waits for its owner, after somebody ended its job on the target."""
    return run.state == "queued" and run.error is not None and run.error["code"] == "held"


def release(store: Store, run_id: str) -> Run:
    """Let a held run go on."""
    _update(store, "error = NULL", [], run_id, None, ("queued",))
    return store.run(run_id)


def requeue(
    store: Store,
    run_id: str,
    attempt: int,
    error: FlashError,
    *,
    delay_s: float = 0.0,
    counts_as: Loss = "attempt",
) -> bool:
    """Queue the run again after a lost attempt; it waits for `delay_s`, at most MAX_DELAY_S.

    False if no attempt is left, a cancel was requested, or it was preempted too often. A loss that
    does not count as an attempt leaves as many as there were before it.
    """
    more = int(counts_as != "attempt")
    preempted = int(counts_as == "preemption")
    assignments = """state = 'queued', phase = NULL, beat = NULL, pending_reason = NULL, error = ?,
        not_before = ?, max_attempts = max_attempts + ?, preemptions = preemptions + ?"""
    not_before = time.time() + min(delay_s, MAX_DELAY_S)
    encoded = json.dumps(error.to_dict(), default=str)
    guard = f"""AND attempt < max_attempts + {more} AND cancel_requested IS NULL
                AND preemptions + {preempted} <= {MAX_PREEMPTIONS}"""
    values = [encoded, not_before, more, preempted]
    return _update(store, assignments, values, run_id, attempt, ("starting", "running"), guard)


def is_under_way(store: Store, run: Run) -> bool:
    """Whether the run is still at the attempt of this row, which may be some seconds old."""
    sql = "SELECT id FROM runs WHERE id = ? AND attempt = ? AND state IN ('starting', 'running')"
    return bool(store.column(sql, [run.id, run.attempt]))


def finish(
    store: Store,
    run_id: str,
    attempt: int,
    state: EndState,
    *,
    step: int = 0,
    error: Mapping[str, Any] | None = None,
) -> bool:
    """End the run. If a cancel was requested, it ends as cancelled whatever `state` is."""
    assignments = """state = CASE WHEN cancel_requested IS NULL THEN ? ELSE 'cancelled' END,
        error = CASE WHEN cancel_requested IS NULL THEN ? END,
        step = max(step, ?), phase = NULL, pending_reason = NULL, ended = ?"""
    encoded = None if error is None else json.dumps(error, default=str)
    values = [state, encoded, step, time.time()]
    return _update(store, assignments, values, run_id, attempt, ACTIVE)


def resume(store: Store, run: Run, folder: RunFolder, steps: int | None, client: str) -> Run:
    """Queue an ended run again, to go on to `steps` from its newest checkpoint, with its budget
    anew and the variables of `client`. The caller is in a transaction and has read the run in it.

    FlashError(quota_exceeded) if too many of the caller's runs are queued.
    """
    _check_quota(store)
    attempt = max(run.attempt, folder.reopen())
    spec = run.spec.model_dump()
    if steps != run.steps:
        spec |= {"steps": steps, "epochs": None}
    sql = """UPDATE main.runs SET state = 'queued', attempt = ?, max_attempts = ?, spec = ?,
             steps = ?, phase = NULL, beat = NULL, progress = NULL, error = NULL, not_before = 0,
             cancel_requested = NULL, cancel_reason = NULL, started = NULL, ended = NULL,
             preemptions = 0, used_before_s = used_s, updated = ?,
             lineage = json_set(lineage, '$.client', ?) WHERE id = ? AND ended IS NOT NULL"""
    most = attempt + run.spec.max_attempts
    values = [attempt, most, json.dumps(spec), steps, time.time(), client, run.id]
    store.execute(sql, values)
    return store.run(run.id)


def request_cancel(store: Store, run_id: str, reason: str = "") -> Run:
    """End a queued run as cancelled at once. Ask the worker of a started run to save and end.

    A second request changes nothing. Raises FlashError(unknown_run | run_finished).
    """
    now = time.time()
    with store.transaction():
        run = store.server_run(run_id)
        if run.state in ("succeeded", "failed"):
            what = f"the run ended before as {run.state}"
            fix = "nothing is left to cancel; its checkpoints and rollouts stay"
            raise FlashError("run_finished", what, run_id=run_id, fix=fix)
        sql = """cancel_requested = coalesce(cancel_requested, ?),
                 cancel_reason = coalesce(cancel_reason, ?)"""
        ends = f"{sql}, state = 'cancelled', error = NULL, ended = ?"
        if not _update(store, ends, [now, reason, now], run_id, None, ("queued",)):
            _update(store, sql, [now, reason], run_id, None, ("starting", "running"))
    # A folder elsewhere may not answer: there only the supervisor asks.
    if run.state != "cancelled" and run.attempt and run.target == LOCAL_TARGET:
        with suppress(OSError, FlashError):  # the supervisor asks as well, until it succeeds
            RunFolder(run.folder).request_cancel(reason)
    return store.server_run(run_id)


def _update(
    store: Store,
    assignments: str,
    values: list[Any],
    run_id: str,
    attempt: int | None,
    states: tuple[str, ...],
    guard: str = "",
) -> bool:
    sql = f"""UPDATE main.runs SET {assignments}, updated = ?
              WHERE id = (SELECT id FROM runs WHERE id = ?)
              AND attempt = coalesce(?, attempt) AND state IN ({marks(states)}) {guard}"""
    return store.execute(sql, [*values, time.time(), run_id, attempt, *states]) == 1


def asked_before(
    store: Store, resolved: ResolvedSpec | ResolvedEval, idempotency_key: str | None
) -> Run | None:
    """The caller's run with that idempotency key, if any. FlashError(idempotency_conflict) if it
    was requested with other arguments.
    """
    if idempotency_key is None:
        return None
    sql = "SELECT * FROM runs WHERE idempotency_key = ? AND owner = ?"
    rows = store.query(sql, [idempotency_key, caller().owner])
    if not rows:
        return None
    if rows[0]["request_digest"] != request_digest(resolved):
        what = f"the key was used for run {rows[0]['id']}, which asked for something else"
        fix = "use a new key for a new run, or repeat the first call's arguments to get that run"
        raise FlashError("idempotency_conflict", what, idempotency_key=idempotency_key, fix=fix)
    return Run.from_row(rows[0])


def request_digest(resolved: ResolvedSpec | ResolvedEval) -> str:
    """What a repeated idempotency key has to agree with."""
    request = resolved.spec.model_dump()
    if resolved.sources.get("target") == AUTO:
        request["target"] = AUTO
    if resolved.sources.get("loss_type") == "recipe":  # what it is depends on the environment
        request["loss_type"] = default_of("loss_type")
    if resolved.sources.get("precision") == "run":  # a run that has not begun has none
        request["precision"] = None
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def queued_runs(store: Store) -> int:
    # From an index alone: a caller's view reads each of the runs that all owners have queued.
    sql = """SELECT count(*) AS number FROM main.runs INDEXED BY runs_queued
             WHERE state = 'queued' AND owner = ?"""
    [row] = store.query(sql, [caller().owner])
    return row["number"]


def _check_quota(store: Store) -> None:
    if caller().is_local:
        return
    queued = queued_runs(store)
    limit = caller().limits.queued_runs
    if queued < limit:
        return
    oldest = "SELECT id FROM runs WHERE state = 'queued' ORDER BY created LIMIT 1"
    first = next(iter(store.column(oldest)), None)
    fix = (
        f"try again once {first} has started, which status(run_id={first!r}, wait_s=40) waits"
        " for, or cancel one"
    )
    what = f"{queued} runs of yours are queued"
    raise FlashError("quota_exceeded", what, limit=limit, fix=fix)


def new_id(store: Store, prefix: str = "run") -> str:
    while True:
        run_id = f"{prefix}-" + "".join(secrets.choice(ID_ALPHABET) for _ in range(8))
        if not store.query("SELECT 1 FROM main.runs WHERE id = ?", [run_id]):
            return run_id


@cache
def code_version() -> str:
    """The package's version; in a git checkout VERSION+gCOMMIT, with .dirty where files differ from
    the commit.

    It is read once for each process: later commits do not change the code that it runs.
    """
    if not (ROOT / ".git").exists():  # an installed package may lie in somebody else's checkout
        return __version__
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=.dirty"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+g{done.stdout.strip()}"
