"""Log-probabilities of a group's completions, its prompt computed once.

The rollouts of a group share their prompt. They are laid out as one sequence, the prompt and then
the completions, with padding only at the end (worker/training/attention.py). The language-model
head runs only on the positions that predict trained tokens.

A completion may be a tree: the calls of an agent, each token once. Its forks say where a branch
begins: from ids[start] of the row on, the tokens follow ids[after - 1] and what that one follows.

Axes: B rows of a batch, P prompt tokens, C completion tokens, T = P + C; L tokens of a packed
sequence, H hidden size, V vocabulary, N predicted tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_mcp.protocol.errors import FlashError
from worker.training.attention import Layout, can_flash
from worker.training.kernels import token_logps

log = logging.getLogger("worker")
PACK_TOKENS = 4096
"""A longer sequence is split: its mask grows with the square, and one more prompt is cheaper."""
PROMPT_SHARE = 4
"""A pack is split for lack of memory if its prompt takes at most 1/PROMPT_SHARE of it."""
Forks = Sequence[tuple[int, int]]
"""(start, after) of each branch of a row, in its own ids, the prompt first."""
HEAD_STEP = 16
"""Rows of the head are padded to a multiple, like sequences to one of attention.BLOCK."""


def group_logps(
    causal_lm: Any,
    ids_BT: Tensor,  # prompts padded left, completions padded right
    seen_BT: Tensor,  # the attention mask
    trained_BC: Tensor,  # 1 where a log-probability is wanted
    temperature: float,
    forks_B: Sequence[Forks] | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (B, C) in fp32, zero where `trained_BC` is 0. Entropies
    carry no gradient.

    `causal_lm` is a transformers decoder with a `model` and an `lm_head`."""
    logps_BC = ids_BT.new_zeros(trained_BC.shape, dtype=torch.float32)
    entropies_BC = torch.zeros_like(logps_BC)
    for pack in packs_of(ids_BT, seen_BT, trained_BC, forks_B=forks_B):
        values_N, entropies_N = pack.logps(causal_lm, temperature)
        logps_BC = pack.put(logps_BC, values_N)
        entropies_BC = pack.put(entropies_BC, entropies_N)
    return logps_BC, entropies_BC


@dataclass(frozen=True)
class Pack:
    """Completions of one prompt that are computed together. A batch needs the activations of one
    pack at a time if the backward pass of each pack runs before the next pack is computed."""

    prompt: Tensor
    """(P,) token ids."""
    completions: list[Tensor]
    """Token ids of each completion."""
    trained: list[Tensor]
    """For each completion, the positions in it of the tokens that are trained."""
    places_N: Tensor
    """Where the trained tokens are in the batch, flattened from (B, C)."""
    forks: list[Forks]
    """Of each completion."""

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.completions))

    def logps(
        self, causal_lm: Any, temperature: float, *, keep_tokens: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies), both (N,) in fp32, of the trained tokens. Entropies carry
        no gradient.

        Above `keep_tokens` tokens, activations are recomputed in the backward pass."""
        if torch.is_grad_enabled():
            recompute(causal_lm, self.tokens > keep_tokens)
        prompt = self.prompt
        lengths = [len(part) for part in self.completions]
        forks = self._placed_forks()
        layout = _layout(causal_lm, len(prompt), lengths, forks)
        ids_L = torch.cat([prompt, *self.completions])
        hidden_LH = hidden_states(causal_lm, ids_L, layout)
        # Token t is predicted at t-1; a completion's first token at the prompt's end.
        before_L = torch.arange(-1, len(ids_L) - 1, device=ids_L.device)
        for start, after, _ in forks:
            before_L[start] = after - 1
        predictors: list[Tensor] = []
        targets: list[Tensor] = []
        offset = len(prompt)
        for completion, at in zip(self.completions, self.trained, strict=True):
            before_L[offset] = len(prompt) - 1
            predictors.append(before_L[offset + at])
            targets.append(completion[at])
            offset += len(completion)
        count = len(self.places_N)
        filler = -count % HEAD_STEP
        values, entropies = token_logps(
            causal_lm.lm_head,
            pad(hidden_LH[torch.cat(predictors)], (0, 0, 0, filler)),
            pad(torch.cat(targets), (0, filler)),
            temperature,
        )
        return values[:count], entropies[:count]

    def _placed_forks(self) -> list[tuple[int, int, int]]:
        """(start, after, end) of each branch, in the packed sequence."""
        first = len(self.prompt)
        offset = 0  # from places in the completion's row to those in the packed sequence
        placed: list[tuple[int, int, int]] = []
        for completion, forks in zip(self.completions, self.forks, strict=True):
            end = first + offset + len(completion)
            for start, after in forks:
                shared = after if after <= first else after + offset
                placed.append((start + offset, shared, end))
            offset += len(completion)
        return placed

    def put(self, values_BC: Tensor, values_N: Tensor) -> Tensor:
        """A copy of `values_BC` with `values_N` at the trained tokens of this pack."""
        return values_BC.view(-1).index_put((self.places_N,), values_N).view_as(values_BC)


def packs_of(
    ids_BT: Tensor,
    seen_BT: Tensor,
    trained_BC: Tensor,
    keep_tokens: float = math.inf,
    forks_B: Sequence[Forks] | None = None,
) -> list[Pack]:
    """The packs of a batch (arguments as of `group_logps`): of at most PACK_TOKENS tokens or a
    single completion, and of at most `keep_tokens` where the repeated prompts cost little. A tree
    that is longer is split into its paths."""
    width = trained_BC.size(1)
    starts = ids_BT.size(1) - width
    packs: list[Pack] = []
    for prompt, rows in _rows_of_packs(ids_BT, seen_BT, starts, keep_tokens):
        forks = [forks_B[row] if forks_B else () for row in rows]
        completions = [ids_BT[row, starts:][seen_BT[row, starts:].bool()] for row in rows]
        if forks[0] and len(prompt) + len(completions[0]) > PACK_TOKENS:
            packs += packs_of_paths(ids_BT, seen_BT, trained_BC, forks_B, rows)
            continue
        trained: list[Tensor] = []
        places: list[Tensor] = []
        for row, completion in zip(rows, completions, strict=True):
            at = trained_BC[row, : len(completion)].nonzero().squeeze(1)
            trained.append(at)
            places.append(row * width + at)
        packs.append(Pack(prompt, completions, trained, torch.cat(places), forks))
    return packs


def packs_of_paths(
    ids_BT: Tensor,
    seen_BT: Tensor,
    trained_BC: Tensor,
    forks_B: Sequence[Forks] | None,
    rows: Sequence[int],
) -> list[Pack]:
    """A pack with one completion for each path through the trees of these rows. A token that is on
    several paths is trained on one of them."""
    width = trained_BC.size(1)
    starts = ids_BT.size(1) - width
    packs: list[Pack] = []
    for row in rows:
        places = seen_BT[row].nonzero().squeeze(1)
        requested = pad(trained_BC[row], (starts, 0))[places].bool()
        forks = forks_B[row] if forks_B else ()
        for path in paths_of(len(places), forks):
            path_ids = torch.tensor(path, device=places.device)
            new = requested[path_ids].nonzero().squeeze(1)
            if not len(new):
                continue
            requested[path_ids] = False
            path_places = places[path_ids]
            path_tokens = ids_BT[row, path_places]
            first = int(new[0])
            in_batch = row * width + path_places[new] - starts
            completion = path_tokens[first:]
            packs.append(Pack(path_tokens[:first], [completion], [new - first], in_batch, [()]))
    return packs


def paths_of(length: int, forks: Forks) -> Iterator[list[int]]:
    """The places of the tokens of each path through a tree, the newest path first."""
    before = list(range(-1, length - 1))
    for start, after in forks:
        before[start] = after - 1
    ends = [start - 1 for start, _ in forks]
    for end in [length - 1, *reversed(ends)]:
        path: list[int] = []
        at = end
        while at >= 0:
            path.append(at)
            at = before[at]
        yield path[::-1]


def recompute(causal_lm: Any, on: bool) -> None:
    """Set whether layers compute their activations again in the backward pass or keep them."""
    if on == causal_lm.is_gradient_checkpointing or not causal_lm.supports_gradient_checkpointing:
        return
    if on:
        causal_lm.gradient_checkpointing_enable()
        causal_lm.disable_input_require_grads()  # which only reentrant checkpointing needs
    else:
        causal_lm.gradient_checkpointing_disable()


def _rows_of_packs(
    ids_BT: Tensor, seen_BT: Tensor, starts: int, keep_tokens: float
) -> Iterator[tuple[Tensor, list[int]]]:
    """(prompt, rows) of each pack."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in range(ids_BT.size(0)):
        prompt: Any = ids_BT[row, :starts][seen_BT[row, :starts].bool()]
        by_prompt.setdefault(tuple(prompt.tolist()), []).append(row)
    lengths: list[int] = cast(Any, seen_BT[:, starts:].sum(1)).tolist()
    for key, rows in by_prompt.items():
        prompt = ids_BT.new_tensor(key)
        limit = pack_limit(len(prompt), keep_tokens)
        pack: list[int] = []
        size = len(prompt)
        for row in rows:
            if pack and size + lengths[row] > limit:
                yield prompt, pack
                pack = []
                size = len(prompt)
            pack.append(row)
            size += lengths[row]
        yield prompt, pack


def pack_limit(prompt: int, keep_tokens: float) -> float:
    """The most tokens of a pack of several completions. If only `keep_tokens` fit into memory, a
    pack is split where one more prompt costs less time than computing activations twice."""
    if prompt * PROMPT_SHARE <= keep_tokens < PACK_TOKENS:
        return keep_tokens
    return PACK_TOKENS


def _layout(
    causal_lm: Any,
    prompt: int,
    completions: list[int],
    forks: Sequence[tuple[int, int, int]] = (),
) -> Layout:
    dtype: torch.dtype = causal_lm.dtype
    device: torch.device = causal_lm.device
    flash = can_flash(causal_lm.config, dtype, device)
    return Layout(prompt, completions, dtype, device, flash=flash, forks=forks)


def hidden_states(causal_lm: Any, ids: Tensor, layout: Layout) -> Tensor:
    """Last hidden states (L, H) of `ids` and the filler after them."""
    ids = pad(ids, (0, layout.filler))
    output = causal_lm.model(
        input_ids=ids[None],
        attention_mask=layout.mask,
        position_ids=layout.positions[None],
        use_cache=False,
    )
    return output.last_hidden_state[0]


# -- whether a model is computed correctly ---------------------------------------------------------

PROBE_PROMPT = 4
PROBE = [12, 4]
"""Tokens of the prompt, and of the completions, that a model is tried with."""


def can_pack(causal_lm: Any) -> bool:
    """Whether `group_logps` computes what the model itself would, tried on a few tokens without
    random numbers.

    A model may scale its logits, number its positions itself or carry a state from one completion
    to the next. An attention window is longer than these tokens: there the config decides."""
    config = causal_lm.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) != {"full_attention"}:
        return False
    if not kinds and getattr(config, "sliding_window", None):
        return False
    try:
        with _at_rest(causal_lm):
            return _is_exact(causal_lm)
    except Exception as error:  # whatever a model raises that `group_logps` does not fit
        log.info("no packed training pass: %s: %s", type(error).__name__, error)
        return False


def _is_exact(causal_lm: Any) -> bool:
    ids_BT, seen_BT = _few_tokens(causal_lm)
    inputs = {"input_ids": ids_BT, "attention_mask": seen_BT, "use_cache": False}
    hidden_BTH = causal_lm.model(**inputs).last_hidden_state
    logits_BTV = causal_lm(**inputs).logits
    layout = _layout(causal_lm, PROBE_PROMPT, PROBE)
    ends = [PROBE_PROMPT + length for length in PROBE]
    tokens = [row[PROBE_PROMPT:end] for row, end in zip(ids_BT, ends, strict=True)]
    completions = [row[PROBE_PROMPT:end] for row, end in zip(hidden_BTH, ends, strict=True)]
    ids_L = torch.cat([ids_BT[0, :PROBE_PROMPT], *tokens])
    packed_LH = hidden_states(causal_lm, ids_L, layout)[PROBE_PROMPT:]
    parts = torch.split(packed_LH[: sum(PROBE)], PROBE)
    # Attention by blocks sums in another order.
    rounding = torch.finfo(causal_lm.dtype).eps ** 0.5
    if not _off(causal_lm.lm_head(hidden_BTH), logits_BTV) < 1e-3:  # also where it is NaN
        return False
    return all(_off(*pair) < rounding for pair in zip(parts, completions, strict=True))


def check_trl_head(causal_lm: Any, temperature: float) -> None:
    """FlashError unless the head that a TRL trainer put on the model gives the model's own
    log-probabilities.
    """
    ids_BT, seen_BT = _few_tokens(causal_lm)
    inputs = {"input_ids": ids_BT, "attention_mask": seen_BT}
    targets_BT = ids_BT.masked_fill(seen_BT == 0, -100)
    with _at_rest(causal_lm):
        logits = causal_lm(**inputs, use_cache=False).logits[:, :-1].float() / temperature
        logps = logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
        theirs = causal_lm(**inputs, labels=targets_BT, fused_lm_head=True).log_probs
    if not _off(theirs, logps * seen_BT[:, 1:]) < torch.finfo(causal_lm.dtype).eps ** 0.5:
        raise FlashError(
            "invalid_argument",
            "the model changes its logits in a way that the trainer does not know: its gradients "
            "would be wrong",
            model_type=causal_lm.config.model_type,
            fix="use a model of another architecture",
        )


@contextmanager
def _at_rest(model: torch.nn.Module) -> Generator[None]:
    """Without gradients and without dropout, which would draw random numbers."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def _few_tokens(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, T), of two rows with the same prompt, the second shorter."""
    width = PROBE_PROMPT + max(PROBE)
    ids = torch.arange(7, 7 + 14 * width, 7, device=causal_lm.device).view(2, width)
    ids = ids % causal_lm.config.get_text_config().vocab_size
    ids[1, :PROBE_PROMPT] = ids[0, :PROBE_PROMPT]
    ends = torch.tensor(PROBE, device=ids.device) + PROBE_PROMPT
    return ids, (torch.arange(width, device=ids.device) < ends[:, None]).long()


def _off(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to what was expected."""
    difference: Any = (values - expected).float()
    return (difference.norm() / cast(Any, expected.float()).norm()).item()
