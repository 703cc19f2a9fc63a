"""catalog: what there is to train, to train on, and to talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from flash_mcp.protocol.base_models import MODELS
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, EnvironmentVersion
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state import datasets
from flash_mcp.state.owners import caller
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.launch import devices as machine
from flash_mcp.tools.shared.fitting import utc
from flash_mcp.tools.shared.frame import Part, Result

Kind = Literal["models", "environments", "datasets", "devices", "deployments"]


class Model(Part):
    """A base model. Hub ids (owner/name) and local folders work as well."""

    name: str
    """Pass as train's `model`."""
    parameters: int | None = None
    context: int | None = None
    """Tokens."""
    thinking: bool | None = None
    """Whether it can think before it answers."""
    licence: str | None = None
    source: str
    """Where it comes from."""
    ready: bool | None = None
    """Whether it lies in the model cache already."""
    notes: str | None = None


class Environment(Part):
    """A published environment; its newest version."""

    name: str
    owner: str | None = None
    """Whose it is, where it is another's."""
    digest: str
    """NAME@DIGEST names this version for good."""
    versions: int
    """Versions that were pushed."""
    pushed: str
    """UTC."""
    about: dict[str, Any] | None = None
    """What env_push recorded, such as split sizes."""


class Dataset(Part):
    """A curated dataset; one version."""

    name: str
    """NAME@DIGEST: pass as train's `dataset`, with algorithm sft."""
    rows: int
    """Conversations to learn from."""
    holdout: int
    """Conversations held back, for the loss on them."""
    environment: str
    """NAME@DIGEST that the attempts were made in."""
    made: str
    """UTC."""


class Device(Part):
    """A GPU, or the machine's processor."""

    kind: str
    name: str
    memory_gib: float
    free_gib: float
    busy: float | None = None
    """Share in use."""
    cores: int | None = None


class Deployment(Part):
    """A model that is being served."""

    deployment: str
    """Pass to chat and undeploy."""
    owner: str | None = None
    """Whose it is, where it is another's."""
    state: str
    model: str
    run_id: str | None = None
    step: int | None = None
    base_url: str | None = None
    """OpenAI-compatible endpoint on the server's machine."""


class Catalog(Result):
    """What there is."""

    models: list[Model] | None = None
    default_model: str | None = None
    environments: list[Environment] | None = None
    datasets: list[Dataset] | None = None
    devices: list[Device] | None = None
    deployments: list[Deployment] | None = None
    has_more: bool
    """Whether a list was cut at `limit`."""
    cursor: str | None = None
    """Pass as `cursor` for the next page."""


def catalog(
    kind: Kind | None = None,
    contains: Annotated[str | None, Field(max_length=100)] = None,
    limit: Annotated[int, Field(ge=1, le=30)] = 12,
    cursor: str | None = None,
) -> Catalog:
    """List base models, published environments, curated datasets, this machine's devices and
    running deployments.

    Runs: status. A run's saved adapters: checkpoints.

    Args:
        kind: Only this kind; default: all five.
        contains: Only names with this text in them.
        limit: Entries of each kind, 1 to 30; default 12.
        cursor: With kind: `cursor` of the page before.
    """
    store = open_store()
    wanted = (contains or "").lower()
    start = int(cursor) if kind and cursor and cursor.isdigit() else 0
    everything: dict[Kind, Sequence[Any]] = {
        "models": _models() if kind in (None, "models") else [],
        "environments": _environments(store) if kind in (None, "environments") else [],
        "datasets": _datasets(store) if kind in (None, "datasets") else [],
        "devices": [Device(**vars(device)) for device in machine.devices()]
        if kind in (None, "devices")
        else [],
        "deployments": _deployments(store) if kind in (None, "deployments") else [],
    }
    matching = {
        name: [entry for entry in entries if wanted in _name(entry)]
        for name, entries in everything.items()
    }
    has_more = any(len(entries) > start + limit for entries in matching.values())
    shown = {
        name: entries[start : start + limit]
        for name, entries in matching.items()
        if kind in (None, name)
    }
    return Catalog(
        models=shown.get("models"),
        environments=shown.get("environments"),
        datasets=shown.get("datasets"),
        devices=shown.get("devices"),
        deployments=shown.get("deployments"),
        default_model=DEFAULT_MODEL if kind in (None, "models") else None,
        has_more=has_more,
        cursor=str(start + limit) if has_more and kind else None,
        next=_next_step(kind, shown.get("environments"), has_more),
    )


def _name(entry: Model | Environment | Dataset | Device | Deployment) -> str:
    return (entry.deployment if isinstance(entry, Deployment) else entry.name).lower()


def _models() -> list[Model]:
    return [
        Model(
            name=card.name,
            parameters=card.parameters,
            context=card.context,
            thinking=card.thinking or None,
            licence=card.licence,
            source=card.source,
            ready=(models_dir() / card.name / "config.json").is_file() or None,
            notes=card.notes or None,
        )
        for card in MODELS.values()
    ]


def _environments(store: Store) -> list[Environment]:
    versions: dict[tuple[str, str], list[EnvironmentVersion]] = {}
    for row in store.environments():
        versions.setdefault((row.owner, row.name), []).append(row)
    return [
        Environment(
            name=name,
            owner=owner if owner != caller().owner else None,
            digest=rows[0].digest,
            versions=len(rows),
            pushed=utc(rows[0].pushed),
            about={
                key: value
                for key, value in rows[0].data.items()
                if isinstance(value, (str, int, float, dict))
            }
            or None,
        )
        for (owner, name), rows in versions.items()
    ]


def _datasets(store: Store) -> list[Dataset]:
    return [
        Dataset(
            name=found.reference,
            rows=found.manifest["counts"]["train_rows"],
            holdout=found.manifest["counts"]["holdout_rows"],
            environment=f"{found.manifest['environment']['name']}@{found.manifest['environment']['digest']}",
            made=utc(found.made),
        )
        for found in datasets.newest_first(store.base)
    ]


def _deployments(store: Store) -> list[Deployment]:
    return [
        Deployment(
            deployment=row.id,
            owner=row.owner if row.owner != caller().owner else None,
            state=row.state,
            model=row.model,
            run_id=row.run_id,
            step=row.step,
            base_url=row.base_url if row.state == "ready" and caller().is_local else None,
        )
        for row in store.deployments(LIVE_DEPLOYMENT)
    ]


def _next_step(
    kind: Kind | None, environments: Sequence[Environment] | None, has_more: bool
) -> str:
    if has_more:
        return (
            "cursor brings more"
            if kind
            else "kind=... with cursor brings more of a list that was cut"
        )
    if environments:
        return f"train(environment={environments[0].name!r}, validate_only=true) shows what a run would be"
    if environments is not None:
        return "no environment yet: env_setup writes a starter, env_push publishes a folder"
    return "train starts a run; status lists runs"
