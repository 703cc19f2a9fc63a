"""Requests to serve a checkpoint, and to end that: rows that the supervisor acts on."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from environments import doors
from environments.untrusted_text import PatternRedactor
from flash_mcp.judgement.attempts import unknown_checkpoint
from flash_mcp.protocol import extensions
from flash_mcp.protocol.base_models import is_named, pinned
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.recordings import Recording, RecordingLimits
from flash_mcp.protocol.records import (
    LIVE_DEPLOYMENT,
    Checkpoint,
    Deployment,
    Json,
    Run,
    without_none,
)
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state import queue
from flash_mcp.state.costs import limit_error
from flash_mcp.state.environments import DEPLOYS
from flash_mcp.state.owners import caller, operator_settings, settings_error
from flash_mcp.state.runs import folder_of
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target


def request(
    store: Store,
    run_id: str,
    *,
    step: int | None = None,
    name: str | None = None,
    port: int | None = None,
    idle_minutes: float | None = None,
    record: bool | None = None,
    target: str | None = None,
    gpus: int = 1,
) -> Deployment:
    """Ask for a run's checkpoint (by default the newest good one) to be served, on a node of
    `target` with `gpus` cards if one is given. Asking again finds the first, and sets its
    `idle_minutes` and `record` if they are given.

    FlashError(unknown_run | unknown_checkpoint | checkpoint_corrupt | invalid_argument |
    port_taken | unknown_target | target_refused | quota_exceeded)."""
    elsewhere = _elsewhere(store, target, port=port, record=record)
    run = store.run(run_id)
    folder = folder_of(run)
    known = step
    if step is None:
        known = folder.checkpoints.newest_good()
    elif folder.checkpoints.manifest(step) is None:
        known = None
    if known is None:
        raise unknown_checkpoint(run, step, folder.checkpoints.steps())
    step = known
    if name and is_named(name):
        what = f"{name!r} is a base model's name"
        raise FlashError("invalid_argument", what, name=name, fix="choose another name")
    name = name or f"{run_id}-{step}"
    # The same for the same request, so that asking twice at once makes one row
    digest = hashlib.sha256(repr((run_id, step, name)).encode()).digest()
    deployment_id = "dep-" + "".join(queue.ID_ALPHABET[byte % 32] for byte in digest[:8])
    live = store.deployments(LIVE_DEPLOYMENT)
    for row in live:
        if row.id == deployment_id and _stays(row, target):
            return _changed(store, row, idle_minutes=idle_minutes, record=record)
        if (row.name, row.owner) == (name, run.owner) and row.id != deployment_id:
            fix = f"choose another name, or undeploy({row.id!r}) first"
            raise FlashError(
                "invalid_argument", f"the name {name!r} is taken by {row.id}", name=name, fix=fix
            )
    adapter = fetch_adapter(store, run, step)
    if elsewhere and (error := limit_error(store, run.owner)):
        raise error
    config = read_adapter_config(adapter, "r")
    if config.get("target_parameters"):
        reference = f"{run_id}@{step}"
        fix = f"checkpoints(run_id={reference!r}, export='merged') writes the whole model"
        what = "vLLM gets no adapters of experts"
        raise FlashError("model_unsupported", what, checkpoint=reference, fix=fix)
    _record(store, deployment_id, is_on=bool(record))
    values: Json = {"owner": run.owner, "name": name, "run_id": run_id, "step": step}
    values |= {"model": served_model(store, run), "thinking": bool(run.spec.thinking)}
    values |= {"adapter_path": str(adapter), "lora_rank": config["r"]}
    values |= {"target": elsewhere or LOCAL_TARGET, "port": port, "idle_minutes": idle_minutes}
    values["record"] = bool(record)
    with store.transaction():
        if not adapter.exists():
            what = f"the checkpoint of step {step} has just been removed"
            fix = f"checkpoints(run_id={run_id!r}) lists those that are there"
            raise FlashError("unknown_checkpoint", what, run_id=run_id, step=step, fix=fix)
        who = caller()
        own = [row.id for row in store.deployments(LIVE_DEPLOYMENT) if row.owner == who.owner]
        is_new = not who.is_local and deployment_id not in own
        if is_new and len(own) >= who.limits.deployments:
            what = f"{len(own)} deployments of yours are there"
            fix = f"undeploy({own[0]!r}), or another one that is not needed"
            raise FlashError("quota_exceeded", what, limit=who.limits.deployments, fix=fix)
        values["server_run"] = values["server_attempt"] = None  # the supervisor finds one here
        if elsewhere:
            values["server_run"] = queue.enqueue_server(store, deployment_id, values, gpus=gpus)
        return store.add_deployment({"id": deployment_id, **values})


def _elsewhere(
    store: Store, target: str | None, *, port: int | None, record: bool | None
) -> str | None:
    """The target, unless it is this machine. FlashError as of `request`."""
    if target in (None, LOCAL_TARGET):
        return None
    settings = find_target(store.base, target)
    if not settings.launcher.reaches_nodes:
        what = f"the machines that {target} rents cannot be reached from here"
        fix = "leave target out: the checkpoint is served on the server's machine"
        raise FlashError("target_refused", what, target=target, fix=fix)
    if port is not None or record:
        name = "record" if port is None else "port"
        what = f"{name} is for deployments on the server's machine"
        raise FlashError("invalid_argument", what, fix=f"leave out {name} or target")
    return target


def _stays(row: Deployment, target: str | None) -> bool:
    """Whether what is asked for is there already, or will be. FlashError(invalid_argument |
    not_ready) if it is there on another target, or ends on one.
    """
    place = row.target
    if row.state == "stopping":
        if place == LOCAL_TARGET:
            return False
        what = f"{row.id} is ending on {place}"
        raise FlashError("not_ready", what, fix="call deploy again in some seconds")
    if target not in (None, place):
        fix = f"undeploy({row.id!r}) first, or give the second one a name"
        what = f"{row.id} is served on {place} already"
        raise FlashError("invalid_argument", what, target=target, fix=fix)
    return True


def _changed(store: Store, row: Deployment, **requested: float | None) -> Deployment:
    changes = without_none(requested)
    if not changes:
        return row
    if "record" in changes:
        _record(store, row.id, is_on=changes["record"])
    store.update_deployment(row.id, expected_states=(row.state,), **changes)
    return store.deployment(row.id)


def _record(store: Store, deployment_id: str, *, is_on: bool) -> None:
    """Begin or end the recording of a deployment's requests; its server looks at each request."""
    recording = Recording(store.base, deployment_id)
    if not is_on:
        recording.stop()
        return
    extensions.find("flash_mcp.recorders", "chats", doors.locate)
    settings = operator_settings(store.base).serving
    redact = settings.record_redact
    try:
        PatternRedactor(redact)
    except re.error as error:
        raise settings_error(store.base, error) from error
    recording.start(RecordingLimits(int(settings.record_mib * 2**20), settings.record_days, redact))


def served_model(store: Store, run: Run) -> str:
    """The base model as the run used it: one from the hub with its commit."""
    return pinned(run.model, store.model_commit(run.id))


def request_stop(store: Store, deployment_id: str) -> Deployment:
    """Ask for a deployment to end. One that has ended or failed is `stopped` at once."""
    store.update_deployment(deployment_id, expected_states=("starting", "ready"), state="stopping")
    store.update_deployment(deployment_id, expected_states=("failed",), state="stopped")
    return store.deployment(deployment_id)


def ended_idle(row: Deployment) -> bool:
    """Whether the supervisor stopped it because nobody used it; its error says so."""
    return row.state == "stopped" and (row.error or {}).get("code") == "unknown_deployment"


NOTHING_TO_END = "nothing has to be ended; catalog lists what is served"


def find_deployment(store: Store, reference: str | None, *, to_end: bool = False) -> Deployment:
    """By id or name; None: the only one. `to_end`: to end it. FlashError(unknown_deployment)."""
    live = store.deployments(LIVE_DEPLOYMENT)
    if reference is None:
        if len(live) == 1:
            return live[0]
        if to_end and not live:
            raise FlashError("unknown_deployment", "nothing is deployed", fix=NOTHING_TO_END)
        if not live:
            # Why the last one ended, unless somebody ended it
            what, fix, cause = "nothing is deployed", DEPLOYS, ""
            last = max(store.deployments(), key=lambda row: row.updated, default=None)
            if last and last.error and (last.state == "failed" or ended_idle(last)):
                what += f"; {last.id} ended: {last.error['what']}"
                fix = f"deploy(run_id={last.run_id!r}, step={last.step}) starts it again"
                # others' deployments share the rest
                cause = last.error.get("wrote", "").split("\n")[0]
            raise FlashError("unknown_deployment", what, fix=fix, wrote=cause)
        fix = f"name one of: {', '.join(row.id for row in live)}"
        raise FlashError("unknown_deployment", f"{len(live)} deployments are there", fix=fix)
    results = [row for row in store.deployments() if reference in (row.id, row.name)]
    if results:
        # An id before any name, what is served before what was, the caller's own before others'

        def rank(row: Deployment) -> tuple[bool, ...]:
            is_over = row.state not in LIVE_DEPLOYMENT
            return row.id != reference, is_over, row.owner != caller().owner

        return min(results, key=rank)
    if to_end and not live:
        what = f"there is no deployment {reference!r}, and none is served"
        raise FlashError("unknown_deployment", what, fix=NOTHING_TO_END)
    return store.deployment(reference)


def fetch_adapter(store: Store, run: Run, step: int) -> Path:
    """The folder of the adapter that the run saved, and of no other that lies there now.
    FlashError(unknown_checkpoint | checkpoint_corrupt).
    """
    digest = None
    # Nobody else writes to the run folders of this machine: a checkpoint may be not read in yet.
    if run.target != LOCAL_TARGET or any(row.step == step for row in store.checkpoints(run.id)):
        digest = store.checkpoint(run.id, step).digest
    into = store.base / "adapters" / f"{run.id}-{step}"
    return folder_of(run).checkpoints.fetch(step, into, whole=False, digest=digest)


def saved_adapter(store: Store, run: Run, checkpoint: Checkpoint) -> Json:
    """A checkpoint's adapter as job.json names it. Raises as `fetch_adapter` does."""
    place = str(fetch_adapter(store, run, checkpoint.step))
    step, digest = checkpoint.step, checkpoint.digest
    return {"path": place, "run_id": run.id, "step": step, "digest": digest}
