"""Which experts the tokens of a mixture pass in the trainer.

Where two experts are almost equal, rounding alone sends a token to the other one. So tokens pass
again what they passed before: in the engine (`give_experts`), or in the first of several passes
over the same tokens (`SameExperts`).

Axes: N tokens of a pass, k experts of each."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from worker.model_files import experts_of

GIVEN = "_given_experts"
"""The attribute of a model that holds its GivenExperts."""


class ChosenExperts(TorchFunctionMode):
    """Within it, a call for the k largest scores of each token returns those that `chosen`
    names."""

    def chosen(self, scores: Tensor, own_Nk: Tensor) -> Tensor | None:
        """(N, k) places in place of the router's own; None to leave them."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        top = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk) or top.indices.ndim < 2:
            return top
        scores = args[0] if args else (kwargs or {})["input"]
        chosen = self.chosen(scores, top.indices.flatten(0, -2))
        if chosen is None:
            return top
        indices = chosen.view_as(top.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class SameExperts(ChosenExperts):
    """Within it, the n-th choice in a pass over tokens gives each token what it chose when it was
    first seen. Tokens are told apart by their ids, which a probe has once."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self._decoder = causal_lm.base_model
        self._ids: list[int] = []
        self._chosen: dict[tuple[int, int], Tensor] = {}
        self._choices = 0

    def __enter__(self) -> Self:
        hook = self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._stop = hook.remove
        return cast(Any, super()).__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stop()
        cast(Any, super()).__exit__(*error)

    def _begin(self, _decoder: Any, args: Any, inputs: dict[str, Any]) -> None:
        # Some models pass them to their decoder by place.
        ids: Any = inputs["input_ids"] if "input_ids" in inputs else args[0]
        self._ids = ids.flatten().tolist()
        self._choices = 0

    def chosen(self, scores: Tensor, own_Nk: Tensor) -> Tensor | None:
        if len(own_Nk) != len(self._ids):
            return None
        number = self._choices
        self._choices += 1
        kept = [
            self._chosen.setdefault((number, token), row)
            for token, row in zip(self._ids, own_Nk, strict=True)
        ]
        return torch.stack(kept)


def give_experts(causal_lm: Any, experts: Tensor | None) -> None:
    """Let the first tokens of the model's next passes pass these (tokens, layers, k), but their
    router's own where one is -1. None: all of them their router's own."""
    held: GivenExperts | None = getattr(causal_lm, GIVEN, None)
    if held is None and experts is not None:
        held = GivenExperts(causal_lm)
        setattr(causal_lm, GIVEN, held)
    if held is not None:
        held.experts = None if experts is None else experts.to(causal_lm.device)


Context = AbstractContextManager[None]


def as_given(causal_lm: Any) -> tuple[Context, Context]:
    """Of a layer's pass, and of the one that computes its activations again: by then the model's
    next pass may have other experts. An argument of torch.utils.checkpoint."""
    held: GivenExperts | None = getattr(causal_lm, GIVEN, None)
    return nullcontext(), held.held(held.experts) if held else nullcontext()


class GivenExperts(ChosenExperts):
    """Hooks on a model's layers, each of which is computed within this mode. A backward pass that
    computes them again does so in a thread of its own, where no mode of the caller is."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.experts: Tensor | None = None
        self._count = experts_of(causal_lm.config.get_text_config())
        self._layer = -1
        for number, layer in enumerate(causal_lm.get_decoder().layers):
            layer.register_forward_pre_hook(partial(self._begin, number))
            layer.register_forward_hook(self._end, always_call=True)

    @contextmanager
    def held(self, experts: Tensor | None) -> Generator[None]:
        before = self.experts
        self.experts = experts
        try:
            yield
        finally:
            self.experts = before

    def _begin(self, number: int, *_: Any) -> None:
        if self.experts is not None:
            self._layer = number
            self.__enter__()

    def _end(self, *_: Any) -> None:
        if self._layer >= 0:
            self._layer = -1
            cast(Any, self).__exit__(None, None, None)

    def chosen(self, scores: Tensor, own_Nk: Tensor) -> Tensor | None:
        assert self.experts is not None
        given_Nk = self.experts[:, self._layer].long()
        is_router = scores.size(-1) == self._count and own_Nk.size(1) == given_Nk.size(1)
        if not is_router or len(own_Nk) < len(given_Nk):
            return None
        first_Nk = own_Nk[: len(given_Nk)]
        first_Nk = torch.where(given_Nk < 0, first_Nk, given_Nk)
        return torch.cat([first_Nk, own_Nk[len(given_Nk) :]])
