"""Base weights that the ranks of a run share, for a model that one card cannot hold.

Each rank keeps a part of every decoder layer, and has the whole of a layer only while it computes
it: FSDP2 collects the parts before and forgets them after. Embeddings, head and adapter are whole
on each rank. Frozen weights have no gradient, so nothing of them is summed.

Collecting needs every rank at the same time, so all make equally many passes: one that has fewer
packs in a step adds passes that count nothing (worker.training.parallel.Passes)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from worker.ports import close_listening, listening
from worker.ranks import LONGEST, Ranks
from worker.training.policy import load_policy

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
