"""What loading the environment shows before a run starts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from environments.checks.playing import Task, gold_turns
from environments.checks.splits import Overlap, overlap
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.untrusted_text import plain_name
from flash_mcp.judgement.curation import prompt_digest
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Json, text_of
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state.datasets import Dataset
from flash_mcp.tools.shared.held_out import read_held_out
from flash_mcp.tools.shared.loading import LOAD_TIMEOUT_S, loaded

CHARACTERS_PER_TOKEN = 3.5
"""For English text in common vocabularies; the server has no tokenizer."""
OPENINGS_S = 12.0
"""Time to open a few tasks. Tasks that take longer are no reason to refuse a run."""


@dataclass(frozen=True)
class Probe:
    splits: dict[str, int]
    """{"train": rows, "eval": rows}"""
    prompt_tokens: int
    """The longest first prompt among a few."""
    shared: list[Overlap]
    """The tasks that are in both splits, of each environment."""
    evaluated: int = 0
    """Tasks of one evaluation."""

    @property
    def overlap(self) -> Json | None:
        """The first overlap of splits, as a run's lineage has it."""
        for item in self.shared:
            if item.shared:
                return {
                    "shared": item.shared,
                    "eval_tasks": item.eval_tasks,
                    "evidence": str(item),
                }
        return None

    def __add__(self, other: Probe) -> Probe:
        """Of the environments of both."""
        splits = Counter(self.splits) + Counter(other.splits)
        longest = max(self.prompt_tokens, other.prompt_tokens)
        shared = [*self.shared, *other.shared]
        return Probe(dict(splits), longest, shared, self.evaluated + other.evaluated)


NO_PROBE = Probe({}, 0, [])


async def probe(
    spec: RunSpec,
    environment: EnvironmentVersion,
    dataset: Dataset | None,
    card: ModelCard,
    env_files: Sequence[str],
) -> Probe:
    async with loaded(
        environment,
        args=spec.environment_args,
        secrets=spec.secrets,
        env_files=env_files,
        timeout_s=min(spec.env_timeout_s, LOAD_TIMEOUT_S),
        fix="correct the folder, env_test it, env_push it, and train again",
    ) as host:
        gold = spec.algorithm == "sft" and not dataset
        longest = await _longest_prompt(host, card, gold=gold)
        if dataset:
            await _check_contamination(host, spec, environment, dataset)
        splits = dict(host.splits)
        shared = await overlap(host)
    if spec.evaluates and not splits.get("eval"):
        what = f"{environment.reference} has no eval split to evaluate on"
        fix = "add eval rows (env.eval_dataset, usually datasets/eval.jsonl), or leave eval_* out"
        raise FlashError("dataset_invalid", what, fix=fix)
    tokens = math.ceil(longest / CHARACTERS_PER_TOKEN)
    return Probe(splits, tokens, [shared], min(splits.get("eval", 0), spec.eval_examples))


async def _longest_prompt(host: EnvironmentHost, card: ModelCard, *, gold: bool) -> int:
    """Characters of the longest first prompt among the train tasks that open within OPENINGS_S.

    With `gold`, also asks for their gold answers. Raises EnvironmentFault only if every task fails:
    a run continues without tasks that fail.
    """
    longest = 0
    # A few: to open a task may take seconds.
    tasks = min(4, host.splits["train"])
    faults: list[EnvironmentFault] = []
    with anyio.move_on_after(OPENINGS_S):
        for index in range(tasks):
            try:
                opening = await host.open("train", index)
                length = sum(len(text_of(message)) for message in opening.messages)
                if opening.tools:
                    _check_tools(card)
                    length += len(json.dumps(opening.tools))
                longest = max(longest, length)
                await host.close(opening.episode)
                # SFT trains on gold answers: better to learn now that there are
                # none.
                if gold:
                    await gold_turns(host, Task("train", index))
            except EnvironmentFault as fault:
                faults.append(fault)
    if len(faults) == tasks:
        raise faults[0]
    return longest


def _check_tools(card: ModelCard) -> None:
    """FlashError(tools_unsupported) if the model is known to see no tools."""
    if card.scheme == "folder" and card.tools is None:
        what = "the tasks have tools, which the model's chat template cannot show"
        fix = "use a model whose template knows tools, or a ChatML one, which gets ours"
        raise FlashError("tools_unsupported", what, model=card.name, fix=fix)


async def _check_contamination(
    host: EnvironmentHost, spec: RunSpec, environment: EnvironmentVersion, dataset: Dataset
) -> None:
    """FlashError(dataset_invalid) if the dataset has eval prompts of this environment."""
    made_with = dataset.manifest["environment"]
    args = spec.environment_args
    current = {"name": environment.name, "digest": environment.digest, "args": args}
    if made_with == current or dataset.manifest["allow_eval_tasks"]:
        return
    held_out = (await read_held_out(host)).prompts
    rows: list[Json] = []
    for row in dataset.rows():
        prompt = row["messages"][: row["prompt_messages"]]
        if prompt_digest(prompt) in held_out:
            rows.append(row)
    if rows:
        task = rows[0]["provenance"]["task_id"]
        what = (
            f"{len(rows)} rows show prompts of the eval split of {environment.reference}, for "
            f"instance task {plain_name(task)}; the dataset was made with "
            f"{made_with['name']}@{made_with['digest']}"
        )
        fix = "train on the version that it was made with, or curate it from runs of this one"
        raise FlashError("dataset_invalid", what, dataset=dataset.reference, fix=fix)
