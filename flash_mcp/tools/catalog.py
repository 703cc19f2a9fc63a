"""catalog: models, environments, datasets, machines, deployments, a ledger, and the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from shutil import disk_usage
from typing import Annotated, Any, Literal

from pydantic import Field

from flash_mcp.protocol.base_models import MODELS, ModelCard, ToolTemplate, parameters_in_name
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import two_digits
from flash_mcp.protocol.paths import exports_dir, models_dir
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, EnvironmentVersion, Json
from flash_mcp.protocol.spec import DEFAULT_MODEL, LOCAL_TARGET
from flash_mcp.state import costs, datasets, queue, references
from flash_mcp.state.disk import in_words, size_of
from flash_mcp.state.owners import caller
from flash_mcp.state.runs import LOOKED_AT
from flash_mcp.state.store import Store, open_store
from flash_mcp.state.targets import targets
from flash_mcp.supervisor.launch import devices as machine
from flash_mcp.supervisor.launch.devices import memory_need
from flash_mcp.supervisor.server import idle_minutes
from flash_mcp.tools.shared.machine import HEALTH, Finding, findings_of
from flash_mcp.tools.shared.placing import Place, places
from flash_mcp.tools.shared.tool_base import Result, ResultModel, page_offset
from flash_mcp.tools.shared.truncation import utc

Kind = Literal[
    "models",
    "environments",
    "datasets",
    "devices",
    "targets",
    "deployments",
    "ledger",
    "whoami",
    "health",
]
RARER = ("ledger", "whoami", "health")
"""Kinds that are read only where they are named."""


class ModelView(ResultModel):
    """A base model. Hub ids (owner/name) and local folders work as well."""

    name: str
    parameters: str | None = None
    active: str | None = None
    context: int | None = None
    thinking: bool | None = None
    tools: ToolTemplate | None = None
    licence: str | None = None
    source: str
    ready: bool | None = None
    fits: str
    step: str | None = None
    notes: str | None = None
    unchecked: str | None = None


class EnvironmentView(ResultModel):
    """A published environment; its newest version."""

    name: str
    owner: str | None = None
    digest: str
    versions: int
    pushed: str
    about: dict[str, Any] | None = None
    certificate: str | None = None


class DatasetView(ResultModel):
    """A curated dataset; one version."""

    name: str
    rows: int
    holdout: int
    environment: str
    created: str


class DeviceView(ResultModel):
    """A GPU, or the machine's processor."""

    kind: str
    name: str
    memory_gib: float
    free_gib: float
    busy: float | None = None
    cores: int | None = None
    price_per_hour: float | None = None
    step: str | None = None


class TargetView(ResultModel):
    """A place beyond the server's machine where runs may train."""

    name: str
    engine: str
    cards: str | None = None
    slots: int
    running: int
    waiting: int
    price_per_hour: float | None = None
    step: str | None = None


class DeploymentView(ResultModel):
    """A model that is being served."""

    deployment: str
    owner: str | None = None
    state: str
    model: str
    run_id: str | None = None
    step: int | None = None
    target: str | None = None
    base_url: str | None = None
    idle_minutes: float


class Spent(ResultModel):
    """What the runs of a day or of a name took."""

    name: str
    runs: int
    hours: float
    cost: str | None = None


class Whoami(ResultModel):
    """The caller."""

    name: str
    access: str
    secrets: list[str] | None = None
    targets: list[str]
    quotas: dict[str, str] | None = None


Entry = (
    ModelView
    | EnvironmentView
    | DatasetView
    | DeviceView
    | TargetView
    | DeploymentView
    | Spent
    | Whoami
    | Finding
)


class Catalog(Result):
    """Models, environments, datasets, devices, targets and deployments."""

    models: list[ModelView] | None = None
    not_fitting: dict[str, list[str]] | None = None
    """Models that run neither here nor on a target, by what hinders them; `contains` shows each."""
    default_model: str | None = None
    environments: list[EnvironmentView] | None = None
    datasets: list[DatasetView] | None = None
    devices: list[DeviceView] | None = None
    targets: list[TargetView] | None = None
    deployments: list[DeploymentView] | None = None
    ledger: list[Spent] | None = None
    """By day, then by name."""
    whoami: list[Whoami] | None = None
    health: list[Finding] | None = None
    disk: str | None = None
    """What is taken and free."""
    spent: str | None = None
    """Hours of GPUs, or of machines without any, that your runs took, and deployments on targets,
    and their cost where there is a price."""
    has_more: bool
    """Whether a list was cut."""
    cursor: str | None = None
    """Pass as `cursor` for the next page."""


def catalog(
    kind: Kind | None = None,
    contains: Annotated[str | None, Field(max_length=100)] = None,
    limit: Annotated[int, Field(ge=1, le=30)] = 15,
    cursor: str | None = None,
) -> Catalog:
    """List base models, published environments, curated datasets, this machine's devices,
    targets elsewhere and running deployments.

    For runs call status, for a run's saved adapters checkpoints.

    Args:
        kind: Default: all but ledger (hours, cost), whoami and health.
        contains: Only names that contain this text.
        limit: Entries per kind.
        cursor: With kind: `cursor` of the previous page.
    """
    store = open_store()
    steps = cache(partial(_steps, store))  # three kinds read them
    readers: dict[Kind, Callable[[Store], Sequence[Entry]]] = {
        "models": partial(_models, contains=contains or "", steps=steps),
        "environments": _environments,
        "datasets": _datasets,
        "devices": partial(_devices, steps=steps),
        "targets": partial(_targets, steps=steps),
        "deployments": _deployments,
        "ledger": _ledger,
        "whoami": _whoami,
        "health": _health,
    }
    requested = (contains or "").lower()
    start = 0
    if kind:
        start = page_offset(cursor, "catalog")
    end = start + limit
    shown: dict[str, Any] = {}
    has_more = False
    for name, read in readers.items():
        if kind == name or (kind is None and name not in RARER):
            entries = [entry for entry in read(store) if requested in _name(entry)]
            if name == "models" and not requested:
                entries, shown["not_fitting"] = _fitting(entries)
            has_more = has_more or len(entries) > end
            shown[name] = entries[start:end]
    disk = spent = None
    if "devices" in shown:
        sizes: list[str] = []
        for table in ("checkpoints", "environments"):
            (taken,) = store.column(f"SELECT coalesce(sum(size_bytes), 0) FROM {table}")
            sizes.append(f"{table} take {in_words(taken)}")
        if caller().is_local and (taken := size_of(exports_dir(store.base))):
            sizes.append(f"exports take {in_words(taken)}")
        disk = f"{', '.join(sizes)}; {in_words(disk_usage(store.base).free)} free"
        spent = costs.spent(store.used_s_by_target(), store.base)
    return Catalog(
        **shown,
        default_model=DEFAULT_MODEL if "models" in shown else None,
        disk=disk,
        spent=spent,
        has_more=has_more,
        cursor=str(end) if has_more and kind else None,
        next=_next_step(kind, shown, has_more, requested),
    )


def _name(entry: Entry) -> str:
    if isinstance(entry, ModelView):
        return f"{entry.name} {entry.source}".lower()
    name = entry.deployment if isinstance(entry, DeploymentView) else entry.name
    return name.lower()


def _models(store: Store, contains: str, steps: ReadSteps) -> list[ModelView]:
    """The models of the catalog, and the hub model or folder that `contains` names."""
    cards = dict(MODELS)
    if "/" in contains:
        with suppress(FlashError):
            card = references.base_model(contains.strip())
            cards[card.name] = card
    machines = places(store)
    return [_model(card, machines, steps()) for card in cards.values()]


def _fitting(models: Sequence[Any]) -> tuple[list[ModelView], dict[str, list[str]] | None]:
    """Those that fit somewhere, and the names of the others by reason; all of them if none fits."""
    fitting: list[ModelView] = []
    refused: dict[str, list[str]] = {}
    for model in models:
        if model.fits.startswith("no:") and "; " not in model.fits:
            why = model.fits.removeprefix("no: ")
            if "of weights exceed" in why:
                why = "too large"
            refused.setdefault(why, []).append(model.name)
        else:
            fitting.append(model)
    return fitting or list(models), refused if fitting and refused else None


def _model(card: ModelCard, places: Sequence[Place], steps: Steps) -> ModelView:
    is_ready = (models_dir() / card.name / "config.json").is_file()
    facts: dict[str, Any] = {**vars(card), "ready": is_ready or None}
    facts |= {"thinking": card.thinking or None, "notes": card.notes or None}
    del facts["commit"], facts["twin"], facts["needs_gpu"]
    if card.tools == "own":
        facts["tools"] = None
    if card.parameters is None and (parameters := parameters_in_name(card.name)):
        facts |= {"parameters": parameters, "unchecked": "parameters"}
    for name in ("parameters", "active"):
        if count := facts[name]:  # such as 135M or 4.02B
            facts[name] = f"{count / 1e6:.3g}M" if count < 1e9 else f"{count / 1e9:.3g}B"
    # For GRPO on one card; this machine is the first of the places
    local, *others = places
    need_on = partial(memory_need, card, has_engine=True)
    refusal = local.refusal(need_on, 1)
    if not refusal and card.needs_gpu and local.cards and local.cards.kind != "gpu":
        refusal = "it needs a GPU"
    fits = "yes"
    if refusal:
        fits = f"no: {refusal}"
    elif local.cards and need_on(local.cards) is None:
        fits = "not known: neither the catalog nor its name says how large it is"
    for place in others:
        if not place.refusal(need_on, 1):
            fits += f"; {place.name}: yes"
    return ModelView(**facts, fits=fits, step=_steps_text(steps, model=card.name))


Steps = dict[tuple[str, str], str]
"""{(model, target): what a step took}, the newest first."""
ReadSteps = Callable[[], Steps]


def _steps(store: Store) -> Steps:
    steps: Steps = {}
    for run in store.runs(limit=LOOKED_AT):
        place = (run.model, run.target)
        if run.algorithm == "eval" or place in steps:
            continue
        if points := store.series(run.id, "time/step_s", points=1):
            step_s = points[0][1]
            size = f"{run.training.conversations_per_step} conversations"
            steps[place] = f"{two_digits(step_s)} s for {size} ({run.algorithm}, {run.id})"
            if cost := costs.cost_of({run.target: 100 * step_s * run.spec.gpus}, store.base):
                steps[place] += f", 100 steps {cost}"
    return steps


def _steps_text(steps: Steps, model: str | None = None, target: str | None = None) -> str | None:
    """Those of a model, by target; or those on a target, by model. None if none was measured."""
    measured: list[str] = []
    for (name, place), text in steps.items():
        if model == name:
            measured.append(f"{place}: {text}")
        if target == place:
            measured.append(f"{name}: {text}")
    return "; ".join(measured) or None


def _devices(store: Store, steps: ReadSteps) -> list[DeviceView]:
    price = costs.price_of_hour(store.base).price_per_hour or None
    step = _steps_text(steps(), target=LOCAL_TARGET)
    build = partial(DeviceView, price_per_hour=price, step=step)
    return [build(**vars(device)) for device in machine.devices()]


def _whoami(store: Store) -> list[Whoami]:
    who = caller()
    places = [LOCAL_TARGET, *targets(store.base)]
    answer = Whoami(name=who.owner, access=who.access, targets=places)
    if who.secrets is not None:
        answer.secrets = sorted(who.secrets)
    if not who.is_local:
        stored = in_words(store.environment_bytes())
        answer.quotas = {
            "queued_runs": f"{queue.queued_runs(store)} of {who.limits.queued_runs}",
            "environments": f"{stored} of {in_words(store.environment_limit())}",
            "deployments": f"{len(store.deployments(LIVE_DEPLOYMENT))} of {who.limits.deployments}",
            "requests_per_minute": str(who.limits.requests_per_minute),
        }
        price = costs.price_of_hour(store.base)
        if price.owner_per_day:
            answer.quotas["cost_per_day"] = f"{price.owner_per_day:g} {price.currency}".strip()
    return [answer]


def _health(store: Store) -> list[Finding]:
    findings = findings_of(HEALTH)
    for finding in findings:
        finding.fix = finding.fix or None
    return findings


def _targets(store: Store, steps: ReadSteps) -> list[TargetView]:
    counts = store.counts_by_target()
    results: list[TargetView] = []
    for name, settings in targets(store.base).items():
        target = TargetView(
            name=name,
            engine=settings.engine,
            cards=settings.cards and str(settings.cards),
            slots=settings.slots,
            running=counts.get((name, "running"), 0),
            waiting=counts.get((name, "queued"), 0) + counts.get((name, "starting"), 0),
            price_per_hour=settings.price_per_hour,
            step=_steps_text(steps(), target=name),
        )
        results.append(target)
    return results


def _another(owner: str) -> str | None:
    """The owner, if it is not the caller."""
    return owner if owner != caller().owner else None


def _environments(store: Store) -> list[EnvironmentView]:
    versions: dict[tuple[str, str], list[EnvironmentVersion]] = {}
    for row in store.environments():
        versions.setdefault((row.owner, row.name), []).append(row)
    environments: list[EnvironmentView] = []
    for (owner, name), rows in versions.items():
        newest = rows[0]
        about: dict[str, Any] = {}
        for key, value in newest.data.items():
            if isinstance(value, (str, int, float, dict)):
                about[key] = value
        environments.append(
            EnvironmentView(
                name=name,
                owner=_another(owner),
                digest=newest.digest,
                versions=len(rows),
                pushed=utc(newest.pushed),
                about=about or None,
                certificate=references.certificate_of(newest),
            )
        )
    return environments


def _datasets(store: Store) -> list[DatasetView]:
    results: list[DatasetView] = []
    for dataset in datasets.newest_first(store.base):
        manifest = dataset.manifest
        result = DatasetView(
            name=dataset.reference,
            rows=manifest["counts"]["train_rows"],
            holdout=manifest["counts"]["holdout_rows"],
            environment="{name}@{digest}".format(**manifest["environment"]),
            created=utc(dataset.created),
        )
        results.append(result)
    return results


def _ledger(store: Store) -> list[Spent]:
    lines: list[Spent] = []
    for row in store.ledger("day") + store.ledger("name"):
        cost = costs.cost_of(row["used_s"], store.base)
        hours = round(sum(row["used_s"].values()) / 3600, 2)
        lines.append(Spent(name=row["what"], runs=row["runs"], hours=hours, cost=cost))
    return lines


def _deployments(store: Store) -> list[DeploymentView]:
    results: list[DeploymentView] = []
    for row in store.deployments(LIVE_DEPLOYMENT):
        deployment = DeploymentView(
            deployment=row.id,
            owner=_another(row.owner),
            state=row.state,
            model=row.model,
            run_id=row.run_id,
            step=row.step,
            target=None if row.target == LOCAL_TARGET else row.target,
            base_url=row.base_url if row.state == "ready" and caller().is_local else None,
            idle_minutes=idle_minutes(row, store.base),
        )
        results.append(deployment)
    return results


def _next_step(kind: Kind | None, shown: Json, has_more: bool, requested: str) -> str:
    environments = shown.get("environments")
    for finding in shown.get("health", ()):
        if finding.level != "ok":
            return f"do what the fix of {finding.name!r} says, or let the server's operator do it"
    if has_more and kind:
        return "cursor brings more"
    if has_more:
        return "kind=... with cursor brings more of a list that was cut"
    if environments:
        call = f"train(environment={environments[0].name!r}, validate_only=true)"
        return f"{call} shows what a run would be"
    if requested and not any(shown.values()):
        return f"no name contains {requested!r}: leave contains out for all"
    if environments is not None and not requested:
        if not caller().is_local:
            return "no environment yet: env_setup() returns a starter, env_push publishes files"
        return "no environment yet: env_setup writes a starter, env_push publishes a folder"
    return "train starts a run; status lists runs"
