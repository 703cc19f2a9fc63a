"""Load the model of an attempt: fetch it, check that it fits, attach the adapter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from peft import PeftModel
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from environments.sandbox.needs import Needs
from flash_mcp.protocol.base_models import commit_of
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_files import read_adapter_config
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import EvalSpec, Precision, RunSpec
from worker.capacity import capacity_bytes
from worker.engine.fetch import ensure
from worker.engine.vllm import SYNC_VARIABLE, WAYS, Sync
from worker.heartbeat import Heartbeat
from worker.model_files import ModelFiles
from worker.precision import precision_of
from worker.process import CARDS, close_listening, listening
from worker.ranks import ALONE, LONGEST, Ranks
from worker.rollouts.transcript import ChatTemplate
from worker.training import memory
from worker.training.policy import load_policy

MAX_LENGTH = 4096
MERGED_FROM = 512
"""Each token of a turn reads all weights once, and a GPU's kernels for adapters take a tenth to a
fifth of that time. A merged sync moves the weights some six times, and its work on the processor
takes 5 ms a layer more than an adapter's: 0.26 against 0.10 s for 30 layers, measured on a CPU.
With 8B on an H200 that is 0.2 s, and 0.4 ms a token."""
EARLY_EVENTS = 10
"""An attempt reports the model and its precision among so many of its first events."""


@dataclass(frozen=True)
class Model:
    base: ModelFiles
    template: ChatTemplate
    dtype: torch.dtype
    max_length: int
    policy: PeftModel | Path | None
    """The policy; the folder of an adapter that only the engine reads; None for the base model."""
    sync: Sync = "merged"
    """How the engine gets the policy."""
    one_way: bool = False
    """Whether there is no other way than `sync`."""
    cards: Sequence[str] = ("",)
    """Those that share the base weights, as CUDA_VISIBLE_DEVICES names them. One holds them all."""

    @property
    def ways(self) -> list[Sync]:
        """Ways in which the engine can get the policy, the preferred first."""
        if self.one_way or (self.dtype == torch.float32 and torch.cuda.is_available()):
            return [self.sync]
        return sorted(WAYS, key=lambda way: way != self.sync)

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
    has_gpu = torch.cuda.is_available()
    # A look at a card takes some of its memory, which engines on several cards are to have.
    capacity = 0 if has_gpu and len(cards) > 1 else capacity_bytes()
    base: ModelFiles | None = None
    files = name = ""
    if ranks.is_first:  # each rank may see another memory and speed of the machine
        base = ModelFiles(_fetched(job, spec, writer, heartbeat))
        files, name = str(base.path), _precision(spec, base, capacity, writer)
    files, name = ranks.share([files, name])
    if base is None:
        base = ModelFiles(Path(files))
        precision_of(base, capacity, name)  # refuses what this rank's card cannot compute
    dtype: torch.dtype = getattr(torch, name)
    template = ChatTemplate(base.tokenizer, thinking=spec.thinking, end_ids=base.end_ids)
    adapter = Path(job["init_adapter"]["path"]) if job.get("init_adapter") else None
    # Tokens of a whole conversation, within the model's context
    context: int = base.text.max_position_embeddings
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
    can_share = has_gpu or dtype == torch.float32
    if len(cards) > 1:
        base.check_shape(len(cards))
        if not can_share:
            # Three processes of vLLM 0.31 gave SmolLM2-135M other words than one, in fp32 the same.
            what = "processors cannot share a model in bf16"
            raise FlashError("device_unsupported", what, gpus=len(cards), fix="use gpus=1")
        return Model(base, template, dtype, max_length, adapter, "adapter", cards=cards)
    four_bit = is_four_bit(spec)
    only: Sync | None = None
    if experts:  # their adapters are merged
        only = "merged"
    elif four_bit:  # nothing can be merged into base weights of 4 bits
        only = "adapter"
    sync = only or default_sync(dtype, job, spec, trains=trains)
    model = Model(base, template, dtype, max_length, adapter, sync, only is not None)
    if not trains and not (adapter and sync == "merged"):
        return model
    smallest = memory.Workload(
        max_length=max_length,
        sequences=int(isinstance(spec, EvalSpec) or spec.generates),
        lora_rank=spec.lora_rank,
        experts=experts,
        four_bit=four_bit,
    )
    sharing = ranks.count if can_share else 1
    most = max(ranks.gather(memory.check_model(base, smallest, dtype, capacity, sharing)))
    arguments: Json = {
        "rank": spec.lora_rank,
        "alpha": spec.lora_alpha,
        "seed": spec.seed,
        "dtype": dtype,
        "adapter_path": adapter,
        "experts": experts,
    }
    if most == 1:
        return replace(model, policy=load_policy(base, **arguments, four_bit=four_bit))
    # The ranks share the layers, in the trainer and in one engine of rank 0.
    _check_experts(experts, ranks.count)
    base.check_shape(ranks.count)
    what = f"one card cannot hold the model: {ranks.count} share each of its layers"
    writer.event("shared", what, gpus=ranks.count)
    cards = ranks.gather(os.environ.get(CARDS, ""))
    policy = load_shared_policy(base, ranks, **arguments)
    return replace(model, policy=policy, sync="adapter", one_way=False, cards=cards)


def _fetched(job: Json, spec: RunSpec | EvalSpec, writer: RunWriter, heartbeat: Heartbeat) -> Path:
    """The folder of the model's files, at the commit that the job or an earlier attempt named."""
    pinned = _early(writer.folder, "model", "commit") or job.get("lineage", {}).get("model_commit")
    path = ensure(
        spec.model,
        revision=pinned,
        has_gpu=torch.cuda.is_available(),
        on_progress=lambda stage, share: heartbeat.advance(),
    )
    if commit := commit_of(path) or pinned:  # the server may have sent its files
        writer.event("model", f"{spec.model} at commit {commit}", commit=commit)
    return path


def _precision(spec: RunSpec | EvalSpec, base: ModelFiles, capacity: int, writer: RunWriter) -> str:
    """The name of the one that is asked for, or that an earlier attempt chose, or that the machine
    computes faster."""
    setting = getattr(spec, "precision", None) or _early(writer.folder, "precision")
    chosen = setting if setting in get_args(Precision) else None
    dtype, why = precision_of(base, capacity, chosen)
    name = str(dtype).removeprefix("torch.")
    writer.event("precision", f"the model is computed in {name}: {why}", precision=name)
    return name


def default_sync(dtype: torch.dtype, job: Json, spec: RunSpec | EvalSpec, *, trains: bool) -> Sync:
    """Merged weights on a CPU, whose kernels for adapters are slow, in fp32, which the GPU's
    kernels for adapters do not support, and where turns of MERGED_FROM tokens make up for their
    sync, unless agents may ask the base model, which a merge replaces; the adapter elsewhere.
    FLASH_SYNC overrides it."""
    if (named := os.environ.get(SYNC_VARIABLE)) in WAYS:
        return named
    if not torch.cuda.is_available() or dtype == torch.float32:
        return "merged"
    environments: list[Json] = job.get("mixture") or [job["environment"]]
    folders = [Path(environment["path"]) for environment in environments]
    has_agents = any(Needs.from_folder(folder).endpoint for folder in folders)
    is_worth_it = trains and spec.max_tokens >= MERGED_FROM and not has_agents
    return "merged" if is_worth_it else "adapter"


def _check_experts(experts: bool, count: int) -> None:
    if experts and count > 1:
        what = "adapters of experts are merged, and cards that share a model take adapters only"
        fix = "leave experts out, or use a card that holds the whole model"
        raise FlashError("invalid_argument", what, gpus=count, fix=fix)


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


def load_shared_policy(base: ModelFiles, ranks: Ranks, **arguments: Any) -> PeftModel:
    """`load_policy` with these arguments, of which each rank keeps its part. One rank after the
    other loads the whole of it into the machine's memory."""
    mesh = meet(ranks)
    for _ in range(ranks.rank):
        ranks.gather(None)
    policy = load_policy(base, device="cpu", **arguments)
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
