"""Load the model of an attempt: fetch it, check that it fits, attach the adapter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from peft import PeftModel
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer

from environments.sandbox.needs import Needs
from flash_mcp.protocol.base_models import commit_of
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import EvalSpec, Precision, RunSpec
from worker.engine.fetch import ensure, log_progress
from worker.engine.vllm import WAYS, Sync, can_share, default_sync
from worker.heartbeat import Heartbeat
from worker.model_files import check_shape, config_of, end_ids
from worker.precision import check_precision, name_of, precision_of
from worker.process import CARDS, close_listening, listening
from worker.ranks import ALONE, LONGEST, Ranks
from worker.rollouts.transcript import ChatTemplate
from worker.training import memory
from worker.training.policy import load_policy

MAX_LENGTH = 4096
EARLY_EVENTS = 10
"""An attempt reports the model and its precision among so many of its first events."""


@dataclass(frozen=True)
class Model:
    path: Path
    template: ChatTemplate
    dtype: torch.dtype
    max_length: int
    policy: PeftModel | Path | None
    """The policy; the folder of an adapter that only the engine reads; None for the base model."""
    sync: Sync | None = None
    """How the engine gets the policy; None for the engine's default."""
    one_way: bool = False
    """Whether there is no other way than `sync`."""
    cards: Sequence[str] = ("",)
    """Those that share the base weights, as CUDA_VISIBLE_DEVICES names them. One holds them all."""

    @property
    def ways(self) -> list[Sync]:
        """Ways in which the engine can get the policy, the preferred first."""
        preferred: Sync = self.sync or default_sync(self.dtype)
        if self.one_way or (self.dtype == torch.float32 and torch.cuda.is_available()):
            return [preferred]
        return sorted(WAYS, key=lambda way: way != preferred)

    @property
    def is_shared(self) -> bool:
        return len(self.cards) > 1


def load_model(
    job: Json,
    spec: RunSpec | EvalSpec,
    writer: RunWriter,
    heartbeat: Heartbeat,
    *,
    trains: bool,
    ranks: Ranks = ALONE,
    cards: Sequence[str] = ("",),
) -> Model:
    """Without `trains`, the policy is loaded only if the engine cannot read the job's adapter; that
    of several `cards` can."""
    path = _fetched(job, spec, writer, heartbeat, ranks)
    config = config_of(path)
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(path)
    template = ChatTemplate(tokenizer, thinking=spec.thinking, end_ids=end_ids(path))
    # It depends on the machine's memory and speed, which each rank may see differently.
    precision = ranks.from_first(lambda: _precision(spec, config, path, writer))
    dtype: torch.dtype = getattr(torch, precision)
    check_precision(dtype, config, path)
    adapter = Path(job["init_adapter"]["path"]) if job.get("init_adapter") else None
    # Tokens of a whole conversation, within the model's context
    context: int = config.get_text_config().max_position_embeddings
    if spec.max_length and spec.max_length > context:
        raise FlashError(
            "invalid_argument",
            "max_length is longer than the model's context",
            max_length=spec.max_length,
            context=context,
            fix=f"set max_length to at most {context}",
        )
    max_length = spec.max_length or min(context, MAX_LENGTH)
    if adapter is not None:
        experts = bool(read_adapter_config(adapter).get("target_parameters"))
    else:
        experts = isinstance(spec, RunSpec) and spec.experts
    _check_experts(experts, len(cards))
    if len(cards) > 1:
        check_sharing(config, dtype, len(cards))
        return Model(path, template, dtype, max_length, adapter, adapter and "adapter", cards=cards)
    policy = adapter
    only: Sync | None = None
    if experts:  # their adapters are merged
        only = "merged"
    elif is_four_bit(spec):  # nothing can be merged into base weights of 4 bits
        only = "adapter"
    sync = only or default_sync(dtype, _turn_tokens(job, spec) if trains else 0)
    if trains or (adapter and sync == "merged"):
        has_engine = isinstance(spec, EvalSpec) or spec.generates
        smallest = memory.Workload(
            max_length=max_length,
            sequences=int(has_engine),
            lora_rank=spec.lora_rank,
            experts=experts,
            four_bit=is_four_bit(spec),
        )
        sharing = ranks.count if can_share(dtype) else 1
        most = max(ranks.gather(memory.check_model(path, smallest, dtype, sharing)))
        arguments: Json = {
            "rank": spec.lora_rank,
            "alpha": spec.lora_alpha,
            "seed": spec.seed,
            "dtype": dtype,
            "adapter_path": adapter,
            "experts": experts,
        }
        if most > 1:  # the ranks share the layers, in the trainer and in one engine of rank 0
            _check_experts(experts, ranks.count)
            check_shape(config, ranks.count)
            what = f"one card cannot hold the model: {ranks.count} share each of its layers"
            writer.event("shared", what, gpus=ranks.count)
            cards = ranks.gather(os.environ.get(CARDS, ""))
            policy = load_shared_policy(path, ranks, **arguments)
            return Model(path, template, dtype, max_length, policy, "adapter", cards=cards)
        policy = load_policy(path, **arguments, four_bit=is_four_bit(spec))
    if policy is None:  # the base model: the engine decides
        sync = None
    return Model(path, template, dtype, max_length, policy, sync, one_way=only is not None)


def _fetched(
    job: Json, spec: RunSpec | EvalSpec, writer: RunWriter, heartbeat: Heartbeat, ranks: Ranks
) -> Path:
    """The folder of the model's files, at the commit that the job or an earlier attempt named."""
    heartbeat.enter("model")
    tell = log_progress()

    def on_fetched(stage: str, share: float) -> None:
        heartbeat.advance()
        tell(stage, share)

    pinned = _early(writer.folder, "model", "commit") or job.get("lineage", {}).get("model_commit")
    source: Json = {"revision": pinned, "has_gpu": torch.cuda.is_available()}

    def fetch() -> str:
        return str(ensure(spec.model, on_progress=on_fetched, **source))

    path = Path(ranks.from_first(fetch))
    if commit := commit_of(path) or pinned:  # the server may have sent its files
        writer.event("model", f"{spec.model} at commit {commit}", commit=commit)
    return path


def _precision(spec: RunSpec | EvalSpec, config: Any, path: Path, writer: RunWriter) -> str:
    """The name of the one that is asked for, or that an earlier attempt chose, or that the machine
    computes faster."""
    name = getattr(spec, "precision", None) or _early(writer.folder, "precision")
    why = "as it was asked for, or chosen before"
    if name not in get_args(Precision):
        dtype, why = precision_of(config, path)
        name = name_of(dtype)
    writer.event("precision", f"the model is computed in {name}: {why}", precision=name)
    return name


def _turn_tokens(job: Json, spec: RunSpec | EvalSpec) -> int:
    """Those that a turn may have; 0 where agents may ask the base model, which a merge replaces."""
    environments: list[Json] = job.get("mixture") or [job["environment"]]
    folders = [Path(environment["path"]) for environment in environments]
    has_agents = any(Needs.from_folder(folder).endpoint for folder in folders)
    return 0 if has_agents else spec.max_tokens


def _check_experts(experts: bool, count: int) -> None:
    if experts and count > 1:
        what = "adapters of experts are merged, and cards that share a model take adapters only"
        fix = "leave experts out, or use a card that holds the whole model"
        raise FlashError("invalid_argument", what, gpus=count, fix=fix)


def check_sharing(config: Any, dtype: torch.dtype, count: int) -> None:
    """FlashError unless an engine on `count` cards can share the model."""
    check_shape(config, count)
    if not can_share(dtype):
        what = "processors cannot share a model in bf16"
        raise FlashError("device_unsupported", what, gpus=count, fix="use gpus=1")


def is_four_bit(spec: RunSpec | EvalSpec) -> bool:
    """Whether the trainer's base weights have 4 bits."""
    return isinstance(spec, RunSpec) and spec.base_precision == "nf4"


def _early(folder: RunFolder, kind: str, field: str | None = None) -> Any:
    """What an earlier attempt of this run reported: the field of its first event of that kind."""
    for name in folder.event_names():
        is_early = int(name.removesuffix(".json").rpartition("-")[2]) < EARLY_EVENTS
        event = folder.event(name) if is_early else None
        if event and event["kind"] == kind:
            return cast("Json", event).get(field or kind)
    return None


# -- base weights that the ranks of a run share, for a model that one card cannot hold -------------
# Each rank keeps a part of every decoder layer, and has the whole of a layer only while it computes
# it: FSDP2 collects the parts before and forgets them after. Embeddings, head and adapter are whole
# on each rank. Frozen weights have no gradient, so nothing of them is summed.
#
# Collecting needs every rank at the same time, so all make equally many passes: one that has fewer
# packs in a step adds passes that count nothing (worker.training.limits.Passes).

WORLD = "world"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def load_shared_policy(model_path: Path, ranks: Ranks, **arguments: Any) -> PeftModel:
    """`load_policy` with these arguments, of which each rank keeps its part. One rank after the
    other loads the whole of it into the machine's memory."""
    mesh = meet(ranks)
    for _ in range(ranks.rank):
        ranks.gather(None)
    policy = load_policy(model_path, device="cpu", **arguments)
    share_layers(policy, mesh)
    for _ in range(ranks.rank, ranks.count):
        ranks.gather(None)
    return policy.to(mesh.device_type)


def meet(ranks: Ranks) -> DeviceMesh:
    """The ranks as torch's default group, which FSDP2 works on. The engine's processes have a
    default group of their own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    others = listening()
    created = cast(Any, distributed)
    store = created.FileStore(str(ranks.scratch / WORLD), ranks.count)
    created.init_process_group(
        BACKENDS[device], store=store, rank=ranks.rank, world_size=ranks.count, timeout=LONGEST
    )
    mesh = init_device_mesh(device, (ranks.count,))
    ranks.gather(None)
    close_listening(keep=others)  # all are connected
    return mesh


def share_layers(policy: PeftModel, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the base weights of each decoder layer, on the mesh's device."""
    decoder: Any = policy.get_base_model().model
    trained = {parameter for parameter in decoder.parameters() if parameter.requires_grad}
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
    # The root, which fetches the next layer in advance. The rest of its weights stays whole.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()))
