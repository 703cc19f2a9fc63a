"""Resolve every value of a run or an evaluation, and its source."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import WithJsonSchema

from environments.sandbox.needs import Needs
from flash_mcp.judgement.attempts import DEFAULT_MAX_LENGTH
from flash_mcp.protocol.base_models import NO_SAFETENSORS, ModelCard, parameters_in_name, unpinned
from flash_mcp.protocol.errors import FlashError, expanded
from flash_mcp.protocol.records import EnvironmentVersion, Json
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.spec import (
    RECIPES,
    EvalSpec,
    ResolvedEval,
    ResolvedSpec,
    RunSpec,
    Source,
    check_adapter,
    default_of,
    read_toml,
    resolve,
    validate,
)
from flash_mcp.state import datasets
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.owners import caller
from flash_mcp.state.references import REGRESSION, RUN, Subject, base_model
from flash_mcp.state.runs import folder_of
from flash_mcp.state.serving import saved_adapter, served_model
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.rows import is_rows
from flash_mcp.tools.shared.table import FROM_ROWS, keep_conversations
from flash_mcp.tools.shared.truncation import without_empty

TAKEN_FROM_RUN = (
    "max_tokens",
    "max_length",
    "top_p",
    "stop_sequences",
    "thinking",
    "environment_args",
    "secrets",
    "env_timeout_s",
    "env_concurrency",
)
"""What an evaluation of a run's checkpoint has in common with that run unless told otherwise."""
HOLDOUT = 0.1
"""Share of a dataset's conversations that are held out where no environment judges the model."""
SHARED_FIELDS = [
    name
    for name in EvalSpec.model_fields
    if name in RunSpec.model_fields and name not in ("environment", "model", "algorithm", "steps")
]
"""The fields of an evaluation whose default is that of a run."""


def resolve_eval(
    subject: Subject,
    environment: EnvironmentVersion,
    *,
    split: str,
    tasks: Sequence[int],
    attempts: int,
    arguments: Json,
) -> ResolvedEval:
    """Every value of the evaluation: from `arguments`, else from the checkpoint's run, else from
    the recipe. Without a temperature one attempt per task is greedy; several are sampled at 1.
    """
    run = subject.run.spec.model_dump() if subject.run else {}
    if subject.run and (part := subject.run.part(environment.name)):
        run |= {"environment_args": part["args"], "secrets": part["secrets"]}
    elif subject.run and subject.run.environment != environment.name:
        del run["environment_args"], run["secrets"]  # of another environment
    values: Json = {}
    sources: dict[str, Source] = {}
    for name in SHARED_FIELDS:
        if arguments.get(name) is not None:
            values[name] = arguments[name]
            sources[name] = "argument"
        elif name in TAKEN_FROM_RUN and name in run:
            values[name] = run[name]
            sources[name] = "run"
        else:
            values[name] = default_of(name)
            sources[name] = "recipe"
    values["system_prompt"] = arguments.get("system_prompt")
    values["precision"] = arguments.get("precision") or subject.precision
    sources["precision"] = "argument" if arguments.get("precision") else "run"
    if arguments.get("temperature") is None:
        values["temperature"] = 0.0 if attempts == 1 else 1.0
    room: int | None = values["max_length"] or (
        subject.context and min(subject.context, DEFAULT_MAX_LENGTH)
    )
    values["max_length"] = room
    if room and values["max_tokens"] > room:
        what = f"max_tokens={values['max_tokens']} does not fit in max_length={room}"
        raise FlashError("invalid_argument", what, fix="lower max_tokens, or raise max_length")
    if room and subject.context and room > subject.context:
        what = f"max_length={room} is more than the model's context of {subject.context}"
        raise FlashError("invalid_argument", what, fix=f"use max_length={subject.context} or less")
    if subject.adapter:
        config = read_adapter_config(Path(subject.adapter["path"]), "r", "lora_alpha")
        values |= {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"]}
    spec = EvalSpec(
        environment=environment.name,
        model=subject.model,
        checkpoint=subject.checkpoint,
        step=subject.step,
        split=split,
        tasks=list(tasks),
        attempts=attempts,
        steps=len(tasks) * attempts,
        **values,
    )
    return ResolvedEval(spec=spec, sources=sources)


def resolved_spec(
    store: Store, arguments: dict[str, Any], config: Configs
) -> tuple[ResolvedSpec, ModelCard, Dataset | None]:
    fields = joined(config.fields, arguments)
    fields.pop("seeds", None)  # `train` starts a run for each
    files = dict(config.files)
    for name in arguments:
        files.pop(name, None)
    is_own = "environment" in fields
    if not is_own:
        fields = {"environment": _default_environment(fields)} | fields
    # The rank and the alpha of the adapter to start from, as far as `fields` leave them out
    shape: Json = {}
    absent = {"lora_rank", "lora_alpha", "experts"} - set(fields)
    reference = fields.get("init_from_adapter")
    if isinstance(reference, str) and absent:
        stated = _shape_in(_start(store, reference).folder)
        shape = {field: stated[field] for field in absent if stated[field]}
    fields = shape | fields
    spec = validate(fields, files)
    card = base_model(spec.model)
    dataset = None
    if spec.dataset and is_rows(spec.dataset):
        holdout = 0.0 if is_own else HOLDOUT
        dataset = keep_conversations(spec.dataset, holdout, spec.question, spec.answer)
        for name in ("question", "answer"):
            fields.pop(name, None)  # the dataset is messages now
    elif spec.dataset:
        dataset = datasets.find(spec.dataset)
        if spec.question or spec.answer:
            what = f"question and answer name columns of rows, and {spec.dataset} has messages"
            raise FlashError("invalid_argument", what, fix="leave them out")
    pinned = {"model": card.name, "dataset": dataset.reference if dataset else None}
    # A relative folder or another spelling has to mean the same everywhere.
    if other := {name: value for name, value in pinned.items() if getattr(spec, name) != value}:
        spec = validate({**fields, **other})
    resolved = resolve(
        spec,
        file_fields=frozenset(files),
        adapter_fields=frozenset(shape),
        parameters=card.parameters or parameters_in_name(card.name),
    )
    if not is_own:
        resolved.sources["environment"] = "default"
    return _bounded(resolved, card), card, dataset


def _default_environment(fields: Mapping[str, Any]) -> str:
    """That of the dataset to learn. Rows have none: `regression` shows what their run forgets."""
    source = fields.get("dataset")
    if fields.get("algorithm") != "sft" or not isinstance(source, str):
        fix = "pass environment=NAME, as returned by env_push; catalog lists what was pushed"
        what = "environment: missing, here and in the config file"
        raise FlashError("invalid_argument", what, fix=fix)
    if is_rows(source):
        return REGRESSION
    environment = datasets.find(source).manifest["environment"]
    return REGRESSION if environment["digest"] == FROM_ROWS else environment["name"]


def for_environment(resolved: ResolvedSpec, environment: EnvironmentVersion) -> ResolvedSpec:
    """With the recipe for an agent's environment, whose rollouts differ most in length: each counts
    the same."""
    spec = resolved.spec
    if spec.algorithm == "sft" or resolved.sources["loss_type"] != "recipe":
        return resolved
    try:
        needs = Needs.from_folder(Path(environment.path))
    except ValueError:  # loading the environment says so
        return resolved
    if not needs.endpoint and not needs.gateway:
        return resolved
    return resolved.model_copy(
        update={"spec": spec.model_copy(update={"loss_type": "rollout_mean"})}
    )


def _bounded(resolved: ResolvedSpec, card: ModelCard) -> ResolvedSpec:
    """With max_length from the model's context. FlashError if a given max_tokens does not fit."""
    spec = resolved.spec
    if spec.max_length is not None or not card.context:
        return resolved
    room = min(card.context, DEFAULT_MAX_LENGTH)
    if spec.max_tokens > room and resolved.sources["max_tokens"] != "recipe":
        what = f"max_tokens={spec.max_tokens} does not fit in the default max_length={room}"
        fix = f"lower max_tokens, or give max_length, at most the model's context of {card.context}"
        raise FlashError("invalid_argument", what, fix=fix)
    bounds = {"max_length": room, "max_tokens": min(spec.max_tokens, room)}
    return resolved.model_copy(update={"spec": spec.model_copy(update=bounds)})


def init_adapter(store: Store, spec: RunSpec, card: ModelCard) -> Json | None:
    if spec.init_from_adapter is None:
        return None
    start = _start(store, spec.init_from_adapter)
    _check_adapter(start.folder, spec, card, start.base)
    return start.pinned()


def teacher_of(store: Store, spec: RunSpec, card: ModelCard) -> Json | None:
    """The teacher of a distillation, as job.json has it: an adapter, or a model."""
    reference = spec.teacher
    if reference is None:
        return None
    adapter = expanded(reference) / "adapter_config.json"
    is_folder = caller().is_local and adapter.is_file()
    if not is_folder and not RUN.fullmatch(reference):
        other = base_model(reference)
        if other.name == card.name:
            fix = "name a larger model, or an adapter of this one: RUN_ID or RUN_ID@STEP"
            raise FlashError("invalid_argument", "the teacher is the model itself", fix=fix)
        return {"model": other.name, "path": other.name}
    start = _start(store, reference, "teacher")
    shape = _shape_in(start.folder) | {"experts": spec.experts}  # PEFT wants both to agree in it
    own = spec.model_copy(update=shape)
    _check_adapter(start.folder, own, card, start.base)
    return start.pinned()


@dataclass(frozen=True)
class _Start:
    """An adapter that a run names. Only that of a run is `saved` and has a base."""

    folder: Path
    saved: Json | None = None
    base: str | None = None

    def pinned(self) -> Json:
        if self.saved:
            return self.saved
        weights = (self.folder / "adapter_model.safetensors").read_bytes()
        digest = hashlib.sha256(weights).hexdigest()[:16]
        return {"path": str(self.folder), "run_id": None, "step": None, "digest": digest}


def _shape_in(adapter: Path) -> Json:
    config = read_adapter_config(adapter, "r", "lora_alpha")
    experts = bool(config.get("target_parameters"))
    return {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"], "experts": experts}


def _start(store: Store, reference: str, field: str = "init_from_adapter") -> _Start:
    if caller().is_local and expanded(reference).is_dir():
        return _Start(expanded(reference).absolute())
    run_id, _, at = reference.partition("@")
    if at and not re.fullmatch("[0-9]{1,18}", at):
        fix = "use RUN_ID, RUN_ID@STEP (a number), or an adapter folder"
        what = f"{at!r} is no step"
        raise FlashError("invalid_argument", what, fix=fix, **{field: reference})
    checkpoint = store.checkpoint(run_id, int(at) if at else None)
    run = store.run(run_id)
    files = folder_of(run)
    if not at and (whole := files.checkpoints.newest_good()) is not None:
        checkpoint = store.checkpoint(run_id, whole)
    saved = saved_adapter(store, run, checkpoint)
    return _Start(Path(saved["path"]), saved, served_model(store, run))


def _check_adapter(folder: Path, spec: RunSpec, card: ModelCard, base_of_run: str | None) -> None:
    config = read_adapter_config(folder)
    if not (folder / "adapter_model.safetensors").is_file():
        what = "the adapter has no adapter_model.safetensors"
        raise FlashError("unknown_checkpoint", what, folder=folder)
    base = base_of_run or str(config.get("base_model_name_or_path") or "")
    wrong: list[str] = []
    name, _ = unpinned(card.name)
    base_name, base_commit = unpinned(base)
    same_name = Path(base_name).name.lower() == Path(name).name.lower()
    other_commit = base_commit and card.commit and base_commit != card.commit
    if base and (other_commit or (base_name not in (name, card.address) and not same_name)):
        wrong.append(f"base model {base} (the run: {card.name})")
    rank, alpha = spec.lora_rank, spec.lora_alpha
    check_adapter(config, rank=rank, alpha=alpha, experts=spec.experts, wrong=wrong)
    if base_of_run is None:
        check_weights(folder / "adapter_model.safetensors")


def changed_values(spec: RunSpec, sources: Mapping[str, str]) -> Json:
    recipe = RECIPES[spec.algorithm]
    changed: Json = {}
    for name, value in without_empty(spec.model_dump()).items():
        usual = recipe.get(name, default_of(name))
        if value != usual or sources.get(name) not in ("recipe", "default", None):
            changed[name] = value
    return changed


def differing_values(specs: Sequence[Json]) -> dict[str, list[Any]]:
    """{field: its value in each of `specs`} of the fields that differ."""
    differing: dict[str, list[Any]] = {}
    for name in dict.fromkeys(itertools.chain(*specs)):
        values = [spec.get(name) for spec in specs]
        if any(value != values[0] for value in values):
            differing[name] = values
    return differing


def adapter_name(adapter: Json | None) -> str | None:
    if adapter is None:
        return None
    if run_id := adapter.get("run_id"):
        return f"{run_id}@{adapter['step']}"
    return str(adapter["path"])


# -- the weights of an adapter's folder that another program may have written ----------------------

LORA = re.compile(r"\.lora_[AB](\.\w+)?(\.weight)?$")
NO_NUMBERS = {
    "F32": (4, re.compile(rb"[\x7f\xff]"), 0x80),
    "BF16": (2, re.compile(rb"[\x7f\xff]"), 0x80),
    "F16": (2, re.compile(rb"[\x7c-\x7f\xfc-\xff]"), 0),
}
"""Of each type of numbers: its bytes, the last byte of infinity and NaN, and a bit that
the byte before has then."""


def check_weights(path: Path) -> None:
    """FlashError(adapter_mismatch) unless the file holds the matrices of a LoRA adapter and nothing
    else, and all of their numbers are finite."""
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        numbers: dict[str, tuple[str, bytes]] = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            numbers[name] = (entry["dtype"], content[8 + length + start : 8 + length + end])
            if len(numbers[name][1]) != end - start:
                raise ValueError("it is cut short")
    except NO_SAFETENSORS as error:
        what = f"{path.name} cannot be read as safetensors: {error}"
        raise _mismatch(path, what, "give the file as its writer saved it") from error
    others = [name for name in numbers if not LORA.search(name)]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        what = f"the adapter holds more than lora_A and lora_B: {', '.join(others[:3])}{more}"
        fix = (
            "merge it into its base model and train that, or save it again without them "
            "(PEFT: save_pretrained(save_embedding_layers=False), no modules_to_save)"
        )
        raise _mismatch(path, what, fix)
    for name, (dtype, data) in numbers.items():
        if dtype not in NO_NUMBERS:
            continue
        size, last, bit = NO_NUMBERS[dtype]
        suspects = last.finditer(data[size - 1 :: size])
        if any(data[match.start() * size + size - 2] & bit == bit for match in suspects):
            what = f"the adapter holds NaN or infinity in {name}"
            raise _mismatch(path, what, "start from a checkpoint before its training diverged")


def _mismatch(path: Path, what: str, fix: str) -> FlashError:
    return FlashError("adapter_mismatch", what, folder=path.parent, fix=fix)


# -- config files of a run: TOML files, of which a later one wins, and the `.env` beside each ------

ConfigFiles = Annotated[
    str | list[str] | None, WithJsonSchema({"type": "array", "items": {"type": "string"}})
]
"""One file may stand alone; the schema names the one form that it needs."""


@dataclass(frozen=True)
class Configs:
    fields: Json
    files: dict[str, str]
    """{field: the last file that has it}"""
    env_files: list[str]
    """The files named .env, whose variables `secrets` may name; the last comes first."""


def read_configs(config: ConfigFiles) -> Configs:
    """The files' fields, `joined`. FlashError(invalid_argument) names the file."""
    paths = [config] if isinstance(config, str) else config or []
    fields: Json = {}
    files: dict[str, str] = {}
    variables: list[str] = []
    for name in paths:
        path = expanded(name)
        later = read_toml(path)
        if "seed" in later:
            fields.pop("seeds", None)
        fields = joined(fields, later)
        files |= dict.fromkeys(later, name)
        variables = [*env_files(path.parent), *variables]
    return Configs(fields, files, variables)


def joined(fields: Json, later: Json) -> Json:
    """Both; the later value where both have one. Tables, such as environment_args, are joined key
    by key.
    """
    result = dict(fields)
    for name, value in later.items():
        earlier = fields.get(name)
        if isinstance(earlier, dict) and isinstance(value, dict):
            value = joined(cast("Json", earlier), cast("Json", value))
        result[name] = value
    return result


def env_files(*folders: Path) -> list[str]:
    files = [folder.absolute() / ".env" for folder in folders]
    return [str(file) for file in files if file.is_file()]
