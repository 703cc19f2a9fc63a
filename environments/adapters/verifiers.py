"""Environments of the package verifiers, as `load_environment` of its modules returns them.

    from wordle import load_environment     # all that environment.py needs, with endpoint = true

verifiers plays each rollout itself, with its own client against the rollout's endpoint, and its
rubric scores it. The adapter only chooses tasks. Seen to work with verifiers 0.3.1."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from environments.adapters import tasks_of
from environments.base import (
    EnvironmentAgent,
    RewardMetric,
    RewardResult,
    TaskExample,
    UnsupportedError,
)
from environments.tools import text_of

UNBOUNDED_CALLS = 64
"""Answers that a rollout gets if its environment sets no max_turns."""
ELSEWHERE = {
    "SandboxEnv": "a sandbox of Prime Intellect's service",
    "CliAgentEnv": "a container and a tunnel to it",
    "HarborEnv": "a container",
    "BrowserEnv": "a browser",
    "OpenEnvEnv": "a container",
}
"""Classes of verifiers by name, and what they start for each rollout."""
FAILED = {"Error", "InfraError", "TunnelError", "SandboxError", "BrowserSandboxError"}
"""Errors of a rollout that say nothing about the model."""


def adapt(loaded: Any) -> VerifiersEnvironment:
    """The environment of an object of verifiers. Raises UnsupportedError."""
    for kind in type(loaded).__mro__:
        if needed := ELSEWHERE.get(kind.__name__):
            raise UnsupportedError(f"{kind.__name__} of verifiers needs {needed}")
    if not hasattr(loaded, "run_rollout"):
        what = f"{type(loaded).__module__}.{type(loaded).__qualname__}"
        raise UnsupportedError(f"{what} is no environment with rollouts; use verifiers 0.3.1")
    members = getattr(loaded, "envs", ())  # an EnvGroup has several
    for member in members:
        adapt(member)
    if loaded.requires_group_rollouts:
        what = "its rubric scores the rollouts of a group together"
        raise UnsupportedError(f"{what}, and an agent's rollout is scored when it ends")
    return VerifiersEnvironment(loaded)


class VerifiersEnvironment(EnvironmentAgent):
    """An object of verifiers. `success` means a reward of at least its pass_threshold."""

    def __init__(self, loaded: Any) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # verifiers asks for its every request
        self._loaded = loaded
        rows: list[Mapping[str, Any]] = []
        if loaded.build_dataset() is not None:
            rows = list(loaded.get_dataset())
        held_out: list[Mapping[str, Any]] = []
        if loaded.build_eval_dataset() is not None:
            held_out = list(loaded.get_eval_dataset())
        self.dataset, self.eval_dataset = tasks_of(rows, held_out, _question, {"example_id"})
        turns = getattr(loaded, "max_turns", UNBOUNDED_CALLS)
        self.max_calls = turns if turns > 0 else UNBOUNDED_CALLS
        self._client: Any = None

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        row = dict(example.record)
        client = self._model(base_url, api_key)
        output = await self._loaded.run_rollout(row, client, model, {"n": 1})
        error = output.get("error")
        reason = output.get("stop_condition")
        if error is not None:
            reason = error["error_chain_str"]
            if error["error"] in FAILED:
                raise RuntimeError(f"the rollout failed: {reason}")
        metrics: Mapping[str, Any] = output.get("metrics") or {}
        reward = float(output["reward"])
        return RewardResult(
            reward,
            success=reward >= self._loaded.pass_threshold,
            reason=reason,
            metrics=[RewardMetric(name, score=float(value)) for name, value in metrics.items()],
        )

    def _model(self, base_url: str, api_key: str) -> Any:
        """A client of verifiers for one rollout. All share one pool of connections."""
        clients = importlib.import_module("verifiers.legacy.clients")
        if self._client is None:
            openai = importlib.import_module("openai")
            self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        own = self._client.with_options(base_url=base_url, api_key=api_key)
        return clients.OpenAIChatCompletionsClient(own)


def _question(row: Mapping[str, Any]) -> str:
    """The messages of a row's prompt as text."""
    prompt: Any = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(text_of(dict(message)) for message in prompt or ())
