"""How much probability a grammar leaves to each token of an answer, noted where vLLM applies it.

vLLM applies grammars in functions that know no engine, in the process of the model runner: this
one, or those of an engine on several cards, each of which has all logits and records the same."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from worker.process import PortClosing


@dataclass
class Shares:
    """Of a request with a grammar: the log-probability that the model gave to the allowed tokens,
    by the place of the token in the answer.

    A token that vLLM drops, when a policy comes in mid turn, is sampled again at its place. Tensors
    are kept, because on a GPU the step is still being computed."""

    temperature: float
    prompt_tokens: int
    logs: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def of(self, tokens: int) -> list[float] | None:
        """Of an answer of so many tokens; None if one is unknown."""
        if not tokens or not set(range(tokens)) <= self.logs.keys():
            return None
        logs = [self.logs[place] for place in range(tokens)]
        return cast(Any, torch.stack(logs).clamp(max=0.0)).tolist()


SHARES: dict[str, Shares] = {}
"""By request."""


class SharesRecording(PortClosing):
    """Mixed into vLLM's worker class as its `worker_extension_cls`."""

    def record_shares(self) -> None:
        record_shares()

    def expect_shares(self, request_id: str, temperature: float, prompt_tokens: int) -> None:
        SHARES[request_id] = Shares(temperature, prompt_tokens)

    def take_shares(self, request_id: str, tokens: int) -> list[float] | None:
        """Those of an answer of so many tokens, which are then forgotten."""
        shares = SHARES.pop(request_id, None)
        return shares and shares.of(tokens)


def record_shares() -> None:
    """Begin to record. A CPU uses the first of vLLM's model runners, a GPU the second."""
    from vllm.v1.worker import gpu_model_runner as first  # noqa: PLC0415
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker  # noqa: PLC0415

    second = cast(Any, StructuredOutputsWorker)
    if getattr(second.apply_grammar_bitmask, "records_shares", False):
        return
    apply_first = cast(Any, first).apply_grammar_bitmask
    apply_second = second.apply_grammar_bitmask

    def recording_first(scheduled: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        """Without drafts each request has one row, in the batch's order."""
        rows = {request_id: row for row, request_id in enumerate(batch.req_ids)}
        ends: dict[str, int] = {}
        for request_id, row in rows.items():
            scheduled_tokens = scheduled.num_scheduled_tokens[request_id]
            ends[request_id] = int(batch.num_computed_tokens_cpu[row]) + scheduled_tokens
        with _recorded(logits, grammar.structured_output_request_ids, rows, ends):
            apply_first(scheduled, grammar, batch, logits)

    def recording_second(
        worker: Any, logits: Tensor, batch: Any, request_ids: list[str], bitmask: Any
    ) -> None:
        rows = dict(zip(batch.req_ids, batch.cu_num_logits_np.tolist(), strict=False))
        after_step = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        ends = dict(zip(batch.req_ids, after_step.tolist(), strict=True))
        with _recorded(logits, request_ids, rows, ends):
            apply_second(worker, logits, batch, request_ids, bitmask)

    cast(Any, recording_second).records_shares = True
    cast(Any, first).apply_grammar_bitmask = recording_first
    second.apply_grammar_bitmask = recording_second


@contextmanager
def _recorded(
    logits: Tensor, request_ids: Sequence[str], rows: dict[str, int], ends: dict[str, int]
) -> Generator[None]:
    """While the grammars are applied to `logits`. `ends` are the tokens that each request has after
    the step, without the one that is sampled."""
    # A request may have ended while its last step was under way.
    names = [name for name in request_ids if own_id(name) in SHARES and name in rows]
    if not names:
        yield
        return
    held = [SHARES[own_id(name)] for name in names]
    index = [rows[name] for name in names]
    temperatures = [shares.temperature or 1.0 for shares in held]
    before = _log_sums(logits, index, temperatures)
    yield
    logs = _log_sums(logits, index, temperatures) - before
    for name, shares, log in zip(names, held, logs.unbind(), strict=True):
        shares.logs[ends[name] - shares.prompt_tokens] = log


def own_id(request_id: str) -> str:
    """The number of a request, to which vLLM adds a random ending."""
    return request_id.partition("-")[0]


def _log_sums(logits: Tensor, rows: list[int], temperatures: list[float]) -> Tensor:
    scale = torch.tensor(temperatures).to(logits.device, non_blocking=True)
    return torch.logsumexp(logits[rows].float() / scale[:, None], dim=-1)
