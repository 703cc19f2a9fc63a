"""Log-probabilities of a group's completions, its prompt computed once.

The rollouts of a group share their prompt. Which way a model is computed is tried before it is
trained (`way_of`): the first that gives what its own eager attention does.

    packed  one sequence, the prompt and then the completions, with padding only at the end
            (worker/training/attention.py)
    state   for layers that carry a state, such as linear attention and convolutions: the prompt by
            itself, and then the completions as rows that go on from its keys and states
    rows    each completion after a prompt of its own

The language-model head runs only on the positions that predict trained tokens.

A completion may be a tree: the calls of an agent, each token once. Its forks say where a branch
begins: from ids[start] of the row on, the tokens follow ids[after - 1] and what that one follows.
Only `packed` computes it as it is; otherwise each of its paths is a row.

Axes: B rows of a batch, P prompt tokens, C completion tokens, T = P + C; L tokens of a packed
sequence, H hidden size, V vocabulary, N predicted tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from flash_mcp.protocol.errors import FlashError
from worker.training.attention import ATTENTION, Layout, can_flash, use_flash_3, windows_of
from worker.training.kernels import Head, token_logps
from worker.training.routing import SameExperts, as_given, give_experts

log = logging.getLogger("worker")
PACK_TOKENS = 4096
"""A longer sequence is split: one more prompt is cheaper than the memory."""
LONGEST = 32_768
"""The same where attention is flash attention, and of a tree, whose paths have more in common."""
RECOMPUTED = 8
"""Tokens whose activations are recomputed take at most the memory of so many times fewer."""
LONG_PROMPT = 3
"""A pack may be so many times as long as its prompt, and as PACK_TOKENS at most."""
PROMPT_SHARE = 4
"""A pack is split for lack of memory if its prompt takes at most 1/PROMPT_SHARE of it."""
Forks = Sequence[tuple[int, int]]
"""(start, after) of each branch of a row, in its own ids, the prompt first."""
HEAD_STEP = 16
"""Rows of the head are padded to a multiple, like sequences to one of attention.BLOCK. So are
sequences that are computed as rows.
"""


class Way(StrEnum):
    """How a model's completions are computed; see above."""

    PACKED = "packed"
    STATE = "state"
    ROWS = "rows"


def group_logps(
    causal_lm: Any,
    ids_BT: Tensor,  # prompts padded left, completions padded right
    seen_BT: Tensor,  # the attention mask
    trained_BC: Tensor,  # 1 where a log-probability is wanted
    temperature: float,
    forks_B: Sequence[Forks] | None = None,
    way: Way = Way.PACKED,
    experts_B: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies), both (B, C) in fp32 (fp64 if the model is), zero where
    `trained_BC` is 0. Entropies carry no gradient."""
    exact = torch.promote_types(causal_lm.dtype, torch.float32)
    logps_BC = ids_BT.new_zeros(trained_BC.shape, dtype=exact)
    entropies_BC = torch.zeros_like(logps_BC)
    packs = packs_of(ids_BT, seen_BT, trained_BC, math.inf, forks_B, way, None, experts_B)
    for pack in packs:
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
    forks: Sequence[Forks]
    """Of each completion."""
    rows: list[int]
    """The row of the batch that each completion is of."""
    way: Way = Way.PACKED
    copies_N: Tensor | None = None
    """Which of the trained tokens each place has, where rows share some: by default its own."""
    experts: Tensor | None = None
    """(tokens, layers, k) that the prompt's and the completions' tokens pass, -1 where a router of
    the model chooses; None if it always does."""

    @property
    def tokens(self) -> int:
        prompts = len(self.completions) if self.way == Way.ROWS else 1
        return prompts * len(self.prompt) + sum(map(len, self.completions))

    def logps(
        self,
        causal_lm: Any,
        temperature: float,
        *,
        keep_tokens: float = math.inf,
        trains_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies), both (N,) in fp32, of the trained tokens. Entropies carry
        a gradient with `trains_entropy`.

        Above `keep_tokens` tokens, activations are recomputed in the backward pass."""
        if torch.is_grad_enabled():
            recomputed = self.tokens > keep_tokens
            recompute(causal_lm, recomputed)
            if recomputed and self.way == Way.STATE:  # transformers keeps no cache then
                rows = replace(self, way=Way.ROWS)
                options: dict[str, Any] = {"keep_tokens": 0, "trains_entropy": trains_entropy}
                return rows.logps(causal_lm, temperature, **options)
        hidden_NH = self.hidden(causal_lm)
        parts = zip(self.completions, self.trained, strict=True)
        targets_N = torch.cat([completion[at] for completion, at in parts])
        count = len(targets_N)
        filler = -count % HEAD_STEP
        values, entropies = token_logps(
            Head.from_model(causal_lm),
            pad(hidden_NH, (0, 0, 0, filler)),
            pad(targets_N, (0, filler)),
            temperature,
            trains_entropy=trains_entropy,
        )
        every = slice(count) if self.copies_N is None else self.copies_N
        return values[every], entropies[every]

    def hidden(self, causal_lm: Any) -> Tensor:
        """(N, H) last hidden states of the tokens that predict the trained ones."""
        return self._in_one(causal_lm) if self.way == Way.PACKED else self._by_rows(causal_lm)

    def _in_one(self, causal_lm: Any) -> Tensor:
        prompt = self.prompt
        lengths = [len(part) for part in self.completions]
        forks = self._placed_forks()
        ids_L = torch.cat([prompt, *self.completions])
        layout = layout_of(causal_lm, len(prompt), lengths, forks)
        give_experts(causal_lm, self.experts)
        hidden_LH = hidden_states(causal_lm, ids_L, layout)
        # Token t is predicted at t-1; a completion's first token at the prompt's end.
        before_L = torch.arange(-1, len(ids_L) - 1, device=ids_L.device)
        for start, after, _ in forks:
            before_L[start] = after - 1
        predictors: list[Tensor] = []
        offset = len(prompt)
        for length, at in zip(lengths, self.trained, strict=True):
            before_L[offset] = len(prompt) - 1
            predictors.append(before_L[offset + at])
            offset += length
        return hidden_LH[torch.cat(predictors)]

    def _by_rows(self, causal_lm: Any) -> Tensor:
        # Shared are a multiple of HEAD_STEP tokens: PyTorch keeps kernels for each new length.
        shares = self.way == Way.STATE and len(self.completions) > 1
        shared = max(0, len(self.prompt) - 1) // HEAD_STEP * HEAD_STEP if shares else 0
        state = None
        experts: list[Tensor] = []
        give_experts(causal_lm, None)
        if self.experts is not None:
            lengths = [len(self.prompt), *map(len, self.completions)]
            first, *others = torch.split(self.experts, lengths)
            experts = [torch.cat([first[shared:], part]) for part in others]
            give_experts(causal_lm, first[:shared])
        if shared:
            state = SharedState(config=causal_lm.config)
            causal_lm.base_model(
                input_ids=self.prompt[None, :shared], past_key_values=state, use_cache=True
            )
        rest = self.prompt[shared:]
        rows = [torch.cat([rest, completion]) for completion in self.completions]
        by_row: dict[int, Tensor] = {}
        for batch in _alike([len(row) for row in rows]):
            # Never one token: some layers have a path of its own for it, which stores the state.
            ids = _padded([rows[number] for number in batch], 0)
            if experts:
                give_experts(
                    causal_lm, _padded([experts[number] for number in batch], -1).flatten(0, 1)
                )
            past = {"past_key_values": state.shared(len(batch))} if state else {}
            output = causal_lm.base_model(input_ids=ids, use_cache=bool(past), **past)
            for number, hidden_TH in zip(batch, output.last_hidden_state, strict=True):
                by_row[number] = hidden_TH[len(rest) + self.trained[number] - 1]
        return torch.cat([by_row[number] for number in range(len(rows))])

    def _placed_forks(self) -> list[tuple[int, int, int]]:
        """(start, after, end) of each branch up to the next one, in the packed sequence."""
        first = len(self.prompt)
        offset = 0  # from places in the completion's row to those in the packed sequence
        placed: list[tuple[int, int, int]] = []
        for completion, forks in zip(self.completions, self.forks, strict=True):
            ends = [start for start, _ in forks[1:]]
            ends.append(first + len(completion))
            for (start, after), end in zip(forks, ends, strict=False):
                shared = after if after <= first else after + offset
                placed.append((start + offset, shared, end + offset))
            offset += len(completion)
        return placed

    def put(self, values_BC: Tensor, values_N: Tensor) -> Tensor:
        """A copy of `values_BC` with `values_N` at the trained tokens of this pack."""
        values_N = values_N.to(values_BC.dtype)
        return values_BC.view(-1).index_put((self.places_N,), values_N).view_as(values_BC)


class SharedState(DynamicCache):
    """A prompt's keys, values and states. Once `shared`, rows go on from them without changing
    them: transformers writes states in place, which their gradient does not survive."""

    _rows = 0
    _states: list[dict[int, Tensor]] | None = None

    def shared(self, rows: int) -> SharedState:
        """This, for so many rows."""
        layers: list[Any] = self.layers
        if self._states is None:
            self._states = [dict(getattr(layer, "recurrent_states", {})) for layer in layers]
        self._rows = rows
        for layer, states in zip(layers, self._states, strict=True):
            for name, state in states.items():
                if cast(Any, state) is not None:
                    layer.recurrent_states[name] = self._expanded(state)
        return self

    def _expanded(self, part: Tensor) -> Tensor:
        return part.expand(self._rows, *part.shape[1:])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._rows:
            return cast(Any, super()).update(key_states, value_states, layer_idx, *args, **others)
        layer: Any = self.layers[layer_idx]
        return (
            torch.cat([self._expanded(layer.keys), key_states], dim=-2),
            torch.cat([self._expanded(layer.values), value_states], dim=-2),
        )

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        if not self._rows:
            return cast(Any, super()).update_conv_state(conv_states, layer_idx, state_idx, **others)
        layer: Any = self.layers[layer_idx]
        return torch.cat([self._expanded(layer.conv_states[state_idx]), conv_states], dim=-1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        if self._rows:
            return recurrent_states
        return cast(Any, super()).update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **others
        )


def _padded(rows: list[Tensor], filler: int) -> Tensor:
    """(B, T, ...): the rows, with T a multiple of HEAD_STEP."""
    rows_BT = pad_sequence(rows, batch_first=True, padding_value=filler)
    behind = -rows_BT.size(1) % HEAD_STEP
    return pad(rows_BT, (*[0, 0] * (rows_BT.ndim - 2), 0, behind), value=filler)


def _alike(lengths: list[int]) -> Iterator[list[int]]:
    """Batches of rows, the longest first, in which none is padded to more than twice its length."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batch: list[int] = []
    for row in order:
        if batch and 2 * lengths[row] < lengths[batch[0]]:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def packs_of(
    ids_BT: Tensor,
    seen_BT: Tensor,
    trained_BC: Tensor,
    keep_tokens: float = math.inf,
    forks_B: Sequence[Forks] | None = None,
    way: Way = Way.PACKED,
    longest: float | None = None,
    experts_B: Sequence[Tensor] | None = None,
) -> list[Pack]:
    """The packs of a batch's trained rows (arguments as of `group_logps`): of at most `pack_limit`
    tokens or a single completion, and of at most `keep_tokens` where the repeated prompts cost
    little. A tree of more than LONGEST tokens, or more than memory holds with recomputed
    activations, or whose model is not packed, is split into its paths. `experts_B` are of each
    row's first tokens, as a Pack has them.

    On a CPU, rows of several prompts share a pack, and each token that they begin with alike."""
    width = trained_BC.size(1)
    starts = ids_BT.size(1) - width
    limit = partial(pack_limit, keep_tokens=keep_tokens, longest=longest)
    tree_limit = min(LONGEST, RECOMPUTED * keep_tokens, longest or math.inf)
    packs: list[Pack] = []
    by_prompt: dict[tuple[int, ...], list[_TrainedRow]] = {}
    trained_rows: list[int] = cast(Any, trained_BC.any(1).nonzero()).flatten().tolist()
    for row in trained_rows:
        seen = seen_BT[row].bool()
        ids = ids_BT[row, seen]
        forks = forks_B[row] if forks_B else ()
        experts = None
        if experts_B is not None:
            unknown = len(ids) - len(experts_B[row])
            experts = pad(experts_B[row], (0, 0, 0, 0, 0, unknown), value=-1)
        prompt = int(seen[:starts].sum())
        if forks and (way != Way.PACKED or len(ids) > tree_limit):
            packs += packs_of_paths(ids, forks, prompt, trained_BC, row, way, experts)
            continue
        columns = trained_BC[row].nonzero().squeeze(1)
        item = _TrainedRow(row, ids, forks, prompt + columns, row * width + columns, experts)
        by_prompt.setdefault(tuple(cast(Any, ids[:prompt]).tolist()), []).append(item)
    if way == Way.PACKED and ids_BT.device.type == "cpu":
        return packs + list(_tree_packs(by_prompt, limit))
    for prompt_ids, rows in by_prompt.items():
        prompt = len(prompt_ids)
        for part in _parts(prompt, rows, way, limit):
            completions = [row.ids[prompt:] for row in part]
            trained = [row.at - prompt for row in part]
            places = torch.cat([row.places for row in part])
            trees = [row.forks for row in part]
            numbers = [row.number for row in part]
            shared = part[0].ids[:prompt]
            experts = None
            if experts_B is not None:
                own = [row.experts[prompt:] for row in part]
                experts = torch.cat([part[0].experts[:prompt], *own])
            batch = completions, trained, places, trees, numbers, way
            packs.append(Pack(shared, *batch, experts=experts))
    return packs


@dataclass(frozen=True)
class _TrainedRow:
    """A trained row of a batch."""

    number: int
    ids: Tensor
    forks: Forks
    at: Tensor
    """The places of its trained tokens."""
    places: Tensor
    """The same in the batch, flattened from (B, C)."""
    experts: Any
    """As of a Pack, of `ids`."""


def _parts(
    prompt: int, rows: list[_TrainedRow], way: Way, limit_of: Callable[[int], float]
) -> Iterator[list[_TrainedRow]]:
    """The rows of each pack of those with one prompt of so many tokens; `limit_of` is `pack_limit`
    of a prompt's tokens."""
    shared = 0 if way == Way.ROWS else prompt
    limit = limit_of(shared)
    part: list[_TrainedRow] = []
    size = shared
    for row in rows:
        own = len(row.ids) - shared
        if part and size + own > limit:
            yield part
            part = []
            size = shared
        part.append(row)
        size += own
    yield part


def _tree_packs(
    by_prompt: dict[tuple[int, ...], list[_TrainedRow]], limit_of: Callable[[int], float]
) -> Iterator[Pack]:
    """Packs that are trees of their rows: of all those of a prompt, unless they are too many.
    `limit_of` is `pack_limit` of a prompt's tokens."""
    tree = _Tree()
    waiting = [(limit_of(len(key)), rows) for key, rows in reversed(by_prompt.items())]
    while waiting:
        limit, rows = waiting.pop()
        size = len(tree.ids)
        for row in rows:
            tree.add(row)
        if len(tree.ids) <= limit or (len(rows) == 1 and not size):
            continue
        tree.cut(size, rows)
        if size:
            yield tree.pack()
            tree = _Tree()
            waiting.append((limit, rows))
        else:
            waiting += [(limit, [row]) for row in reversed(rows)]
    if tree.ids:
        yield tree.pack()


class _Tree:
    """The tokens of rows. Those that follow the same tokens are one."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._experts: list[Tensor] = []
        self._before: list[int] = []  # the place of the token that each follows, or -1
        self._places: dict[tuple[int, int], int] = {}  # of a token after that at a place
        self._rows: list[tuple[_TrainedRow, list[int]]] = []  # with the places of their tokens

    def add(self, row: _TrainedRow) -> None:
        begins = dict(row.forks)
        at = -1
        places: list[int] = []
        ids: list[int] = cast(Any, row.ids).tolist()
        for number, token in enumerate(ids):
            if number in begins:
                at = places[begins[number] - 1] if begins[number] else -1
            place = self._places.setdefault((at, token), len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self._before.append(at)
                if row.experts is not None:
                    self._experts.append(row.experts[number])
            places.append(place)
            at = place
        self._rows.append((row, places))

    def cut(self, size: int, rows: Sequence[_TrainedRow]) -> None:
        """Leave out the last ones, which are `rows`: without them it had so many tokens."""
        del self._rows[-len(rows) :]
        for key in zip(self._before[size:], self.ids[size:], strict=True):
            del self._places[key]
        del self.ids[size:], self._before[size:], self._experts[size:]

    def pack(self) -> Pack:
        ids = self._rows[0][0].ids.new_tensor(self.ids)
        forks = [(at, before + 1) for at, before in enumerate(self._before) if before != at - 1]
        trained_N = torch.cat([ids.new_tensor(places)[row.at] for row, places in self._rows])
        distinct, copies_N = cast(Any, trained_N).unique(return_inverse=True)
        places_N = torch.cat([row.places for row, _ in self._rows])
        numbers = [row.number for row, _ in self._rows]
        experts = torch.stack(self._experts) if self._experts else None
        batch = [ids], [distinct], places_N, [forks], numbers
        return Pack(ids[:0], *batch, copies_N=copies_N, experts=experts)


def packs_of_paths(
    ids: Tensor,
    forks: Forks,
    prompt: int,
    trained_BC: Tensor,
    row: int,
    way: Way,
    experts: Tensor | None = None,
) -> Iterator[Pack]:
    """A pack with one completion for each path through a row's tree, of whose tokens the first
    `prompt` are its prompt. A token that is on several paths is trained on one of them."""
    requested = pad(trained_BC[row], (prompt, 0))[: len(ids)].bool()
    in_batch = row * trained_BC.size(1) - prompt
    for path in paths_of(len(ids), forks):
        path_ids = torch.tensor(path, device=ids.device)
        new = requested[path_ids].nonzero().squeeze(1)
        if not len(new):
            continue
        requested[path_ids] = False
        tokens = ids[path_ids]
        first = int(new[0])
        places = in_batch + path_ids[new]
        batch = [tokens[first:]], [new - first], places, [()], [row], way
        own = None if experts is None else experts[path]
        yield Pack(tokens[:first], *batch, experts=own)


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
        again = {"use_reentrant": False, "context_fn": partial(as_given, causal_lm)}
        causal_lm.gradient_checkpointing_enable(again)
        causal_lm.disable_input_require_grads()  # which only reentrant checkpointing needs
    else:
        causal_lm.gradient_checkpointing_disable()


def pack_limit(prompt: int, keep_tokens: float = math.inf, longest: float | None = None) -> float:
    """The most tokens of a pack of several completions: `longest`, by default PACK_TOKENS, which is
    more after a long prompt, as that would be computed for each of them. If only `keep_tokens` fit
    into memory, a pack is split where one more prompt costs less time than computing activations
    twice."""
    short = min(max(PACK_TOKENS, LONG_PROMPT * prompt), LONG_PROMPT * PACK_TOKENS)
    limit = short if longest is None else longest
    if keep_tokens >= limit:
        return limit
    if prompt * PROMPT_SHARE <= keep_tokens:
        return keep_tokens
    return min(limit, short)


def longest_pack(causal_lm: Any) -> float | None:
    """`longest` of `pack_limit`: with flash attention, memory alone bounds a pack."""
    is_packed = windows_of(causal_lm.config) is not None
    flash = is_packed and can_flash(causal_lm.config, causal_lm.dtype, causal_lm.device)
    return LONGEST if flash else None


def layout_of(
    causal_lm: Any, prompt: int, completions: list[int], forks: Sequence[tuple[int, int, int]] = ()
) -> Layout:
    """The layout of a pack."""
    dtype: torch.dtype = causal_lm.dtype
    device: torch.device = causal_lm.device
    flash = can_flash(causal_lm.config, dtype, device)
    windows = windows_of(causal_lm.config)
    if windows is None:
        raise NotImplementedError("a mask for layers of this model's kinds")
    return Layout(prompt, completions, dtype, device, flash=flash, forks=forks, windows=windows)


def hidden_states(causal_lm: Any, ids: Tensor, layout: Layout) -> Tensor:
    """Last hidden states (L, H) of `ids` and the filler after them."""
    ids = pad(ids, (0, layout.filler))
    output = causal_lm.base_model(
        input_ids=ids[None],
        attention_mask=layout.mask,
        position_ids=layout.positions[None],
        use_cache=False,
    )
    return output.last_hidden_state[0]


# -- whether a model is computed correctly ---------------------------------------------------------

PROBE_PROMPT = HEAD_STEP + 4
PROBE = [12, 4]
"""Tokens of the prompt, and of the completions, that a model is tried with."""
PROBE_WINDOW = 5
"""Tokens of the window, if it has one: the probe must be longer."""


def way_of(causal_lm: Any) -> Way:
    """The first way that computes what the model's own eager attention would, tried on a few tokens
    without random numbers. A model may number its positions itself, carry a state, or have
    attention with options of its own.

    Routers of a mixture choose in each pass what they chose in the first: where two experts are
    almost equal, rounding alone would send a token to the other one.

    FlashError(invalid_argument) if there is none, or if its logits are no such `Head`."""
    use_flash_3(causal_lm.config, causal_lm.dtype, causal_lm.device)
    window = _short_window(causal_lm.config.get_text_config())
    with at_rest(causal_lm), window, SameExperts(causal_lm):
        pack = probe(causal_lm, [PROBE_PROMPT, *PROBE])
        expected_NH = _eager_states(causal_lm, pack)
        rounding = torch.finfo(causal_lm.dtype).eps ** 0.5
        for way in Way:
            if way == Way.PACKED and causal_lm.config._attn_implementation != ATTENTION:
                continue
            try:
                off = _off(replace(pack, way=way).hidden(causal_lm), expected_NH)
            except Exception as error:  # whatever a model raises that a way does not fit
                log.info("no %s training pass: %s: %s", way, type(error).__name__, error)
                continue
            if off < rounding:  # also false where it is NaN
                return way
            log.info("no %s training pass: it is off by %.1e", way, off)
    raise FlashError(
        "invalid_argument",
        "no training pass computes what the model does: its gradients would be wrong",
        model_type=causal_lm.config.model_type,
        fix="use a model of another architecture",
    )


def probe(causal_lm: Any, lengths: list[int], way: Way = Way.PACKED) -> Pack:
    """A prompt and its completions, of so many tokens each, all of them trained."""
    ids = torch.arange(7, 7 + 7 * sum(lengths), 7, device=causal_lm.device)
    prompt, *completions = (ids % causal_lm.config.get_text_config().vocab_size).split(lengths)
    trained = [torch.arange(len(completion), device=ids.device) for completion in completions]
    rows = list(range(len(completions)))
    places = torch.arange(sum(map(len, completions)))
    return Pack(prompt, completions, trained, places, [()] * len(rows), rows, way)


def _eager_states(causal_lm: Any, pack: Pack) -> Tensor:
    """`pack.hidden` of each sequence by itself and with the model's eager attention. FlashError if
    `Head` does not give the model's logits."""
    states: list[Tensor] = []
    off = 0.0
    with eagerly(causal_lm):
        for completion in pack.completions:
            ids = torch.cat([pack.prompt, completion])[None]
            hidden_TH = causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            logits_TV = causal_lm(input_ids=ids, use_cache=False).logits[0]
            off = max(off, _off(Head.from_model(causal_lm).logits(hidden_TH), logits_TV))
            states.append(hidden_TH[PROBE_PROMPT - 1 : -1])
    if not off < (1e-3 if causal_lm.dtype == torch.float32 else 2e-2):
        raise FlashError(
            "invalid_argument",
            "the model changes its logits in a way that the trainer does not know: its gradients "
            "would be wrong",
            model_type=causal_lm.config.model_type,
            fix="use a model of another architecture",
        )
    return torch.cat(states)


@contextmanager
def eagerly(causal_lm: Any) -> Generator[None]:
    """With transformers' plain attention, where the model looks its attention up."""
    before: str = causal_lm.config._attn_implementation
    if before != ATTENTION:
        yield
        return
    causal_lm.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(before)


@contextmanager
def _short_window(config: Any) -> Generator[None]:
    """With an attention window of PROBE_WINDOW, if there is any: masks are made from the config in
    each pass."""
    before: int | None = getattr(config, "sliding_window", None)
    try:
        if before:
            config.sliding_window = min(before, PROBE_WINDOW)
        yield
    finally:
        if before:
            config.sliding_window = before


@contextmanager
def at_rest(model: torch.nn.Module) -> Generator[None]:
    """Without gradients and without dropout, which would draw random numbers."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


def _off(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to what was expected."""
    difference: Any = (values - expected).float()
    return (difference.norm() / cast(Any, expected.float()).norm()).item()
