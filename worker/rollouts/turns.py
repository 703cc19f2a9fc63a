"""One turn of a model: the request to an engine, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Grammar:
    """What a turn may be. Exactly one is given, as JSON: a JSON schema of its whole text, or a
    structural tag of xgrammar."""

    json_schema: str | None = None
    structural_tag: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. `temperature` 0 is greedy. `seed` makes the turn repeatable.

    A seeded turn draws the same numbers wherever it runs. It gives the same tokens, bit for bit, if
    the same requests are submitted between the same steps. Otherwise it may not: batch composition
    and prefix caching change how logits are rounded, and a draw close to the border of two tokens
    then gives the other one. This is rare in fp32. In bf16, a turn of a 135M model alone and the
    same turn among 24 differ after about five tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    grammar: Grammar | None = None
    is_base: bool = False
    """Whether the base model samples it. ValueError from `submit` if the engine has it no more."""


@dataclass(frozen=True)
class Completion:
    """The model's own tokens of a turn and the log-probability of each, both of length T."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    stopped_by: str | None = None
    """The stop string that ended the turn."""
    allowed: list[float] | None = None
    """For a turn with a grammar: of each token, the log-probability that the model gave to all the
    tokens that the grammar allowed there. None without a grammar, or if the engine cannot tell."""
    has_grammar: bool = False
    policies: Mapping[int, int] = field(default_factory=dict[int, int])
    """{number of the policy: tokens that it sampled}"""
    experts: Any = field(default=None, compare=False)
    """A NumPy array (tokens, layers, k): the experts of each token of the prompt and the turn but
    the last one, which the model has not read yet. None if the engine does not return them."""


class RolloutEngine(Protocol):
    """A continuous-batching engine. Not thread-safe: one owner calls its methods."""

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue one turn. ValueError if it cannot be sampled so."""
        ...

    def step(self) -> list[tuple[str, Completion]]:
        """Advance every running request by one iteration; those that finished."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ones are passed over."""
        ...
