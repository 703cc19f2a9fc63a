"""Environments of the package verifiers, as `load_environment` of its modules returns them.

    from wordle import load_environment     # all that environment.py needs, with endpoint = true

verifiers plays each rollout itself, with its own client against the rollout's endpoint, and its
rubric scores it, together with the others of its group if it has rewards of groups. The adapter
only chooses tasks. Seen to work with verifiers 0.3.1; for tasksets of 0.4 see verifiers_tasksets.
"""

# Any method of an environment may be `async def`.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from environments.adapters import Row, prompt_text, tasks_of, verifiers_tasksets
from environments.base import (
    EnvironmentAgent,
    EnvironmentEpisode,
    RewardMetric,
    RewardResult,
    TaskExample,
    UnsupportedError,
)

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
STATE = "verifiers_state"
"""Where a rollout's metadata holds verifiers' record of it."""


def adapt(loaded: Any) -> EnvironmentAgent:
    """The environment of an object of verifiers. Raises UnsupportedError."""
    if not hasattr(loaded, "run_rollout"):
        return verifiers_tasksets.adapt(loaded)
    for kind in type(loaded).__mro__:
        if needed := ELSEWHERE.get(kind.__name__):
            raise UnsupportedError(f"{kind.__name__} of verifiers needs {needed}")
    members = getattr(loaded, "envs", ())  # an EnvGroup has several
    for member in members:
        adapt(member)
    if any(item.requires_group_rollouts for item in (loaded, *members)):
        return GroupedEnvironment(loaded)
    return VerifiersEnvironment(loaded)


class VerifiersEnvironment(EnvironmentAgent):
    """An object of verifiers. `success` means a reward of at least its pass_threshold."""

    main_thread = True
    """Its rubrics may use signals for their time limits, as math-verify does."""

    def __init__(self, loaded: Any) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # verifiers asks for its every request
        self._loaded = loaded
        rows: list[Row] = []
        if loaded.build_dataset() is not None:
            rows = list(loaded.get_dataset())
        held_out: list[Row] = []
        if loaded.build_eval_dataset() is not None:
            held_out = list(loaded.get_eval_dataset())
        self.dataset, self.eval_dataset = tasks_of(rows, held_out, prompt_text, {"example_id"})
        turns = getattr(loaded, "max_turns", UNBOUNDED_CALLS)
        self.max_calls = turns if turns > 0 else UNBOUNDED_CALLS
        openai = importlib.import_module("openai")
        self._client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each rollout")

    async def run(
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        row = dict(example.record)
        client = self._model(base_url, api_key)
        return self._result(await self._loaded.run_rollout(row, client, model, {"n": 1}))

    def _result(self, output: Mapping[str, Any]) -> RewardResult:
        """Raises RuntimeError if something other than the model failed."""
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
        own = self._client.with_options(base_url=base_url, api_key=api_key)
        return clients.OpenAIChatCompletionsClient(own)


class GroupedEnvironment(VerifiersEnvironment):
    """One whose rubric compares the rollouts of a task. One that is alone is a group of one."""

    _state: Any = None

    async def run(
        self, example: TaskExample, base_url: str, api_key: str, model: str
    ) -> RewardResult:
        row = dict(example.record)
        client = self._model(base_url, api_key)
        self._state = await self._loaded.rollout(row, client, model, {"n": 1})
        (result,) = await self._scored([copy.copy(self._state)])
        return replace(result, metadata={STATE: self._state})

    async def score_group(
        self, example: TaskExample, episodes: Sequence[EnvironmentEpisode]
    ) -> Sequence[RewardResult]:
        states = [episode.metadata[STATE] for episode in episodes if STATE in episode.metadata]
        scored = iter(await self._scored(states) if states else ())
        ended = RewardResult(0.0, success=False, reason="it ended at a limit")
        return [next(scored) if STATE in episode.metadata else ended for episode in episodes]

    async def _scored(self, states: list[Any]) -> list[RewardResult]:
        saving = importlib.import_module("verifiers.legacy.utils.save_utils")
        await self._loaded.rubric.score_group(states)
        results: list[RewardResult] = []
        for state in states:
            results.append(self._result(await asyncio.to_thread(saving.state_to_output, state)))
        return results

    async def close_episode(self) -> None:
        if self._state is not None:
            await self._loaded.rubric.cleanup(self._state)
