"""The teacher of a distillation on the policy: what it gives to each token that the policy wrote.

The advantage of a token is its log-probability under the teacher minus that under the policy: a
sample of the reverse KL divergence, which is least where the policy is the teacher."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import AutoTokenizer
from trl.trainer.utils import use_adapter

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from worker.adapter import names_as_they_are
from worker.model import Model
from worker.model_files import auto_class, config_of
from worker.precision import precision_of
from worker.training.attention import attention_of
from worker.training.packing import Way, way_of

TEACHER = "teacher"
"""The name of its adapter within the policy."""


@dataclass(frozen=True)
class Teacher:
    """Another model, or an adapter of the policy's."""

    causal_lm: Any
    way: Way
    policy: PeftModel | None = None
    """The policy that has its adapter."""

    @property
    def bytes(self) -> int:
        weights = self.causal_lm.named_parameters()
        return sum(p.nbytes for name, p in weights if self.policy is None or f".{TEACHER}." in name)

    @contextmanager
    def speaking(self) -> Generator[Any]:
        """Its causal language model, while it computes as the teacher."""
        if self.policy is None:
            yield self.causal_lm
            return
        with use_adapter(self.policy, TEACHER):
            yield self.causal_lm


def load_teacher(source: Json, folder: Path, model: Model, way: Way) -> Teacher:
    """The teacher that a job names as `source`, from its files in `folder`, for the policy of
    `model`, which is computed in this way.

    FlashError(invalid_argument) if it reads other tokens than the policy writes."""
    policy = model.policy
    assert isinstance(policy, PeftModel)
    if model.is_shared:
        what = "one card cannot hold the model, and layers that cards share have no teacher"
        raise FlashError("out_of_memory", what, fix="use a smaller model, or larger cards")
    if "model" not in source:
        with names_as_they_are():
            cast(Any, policy).load_adapter(folder, TEACHER)
        return Teacher(policy.get_base_model(), way, policy)
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(folder)
    if tokenizer.get_vocab() != model.template.tokenizer.get_vocab():
        raise FlashError(
            "invalid_argument",
            "the teacher's tokenizer is another one: it cannot read what the model writes",
            teacher=source["model"],
            fix="take a teacher of the model's own family, such as a larger one",
        )
    config = config_of(folder)
    causal_lm = auto_class(config).from_pretrained(
        folder, dtype=precision_of(config, folder).dtype, attn_implementation=attention_of(config)
    )
    causal_lm = causal_lm.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    causal_lm.requires_grad_(False)
    return Teacher(causal_lm, way_of(causal_lm))
