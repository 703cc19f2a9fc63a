"""The environments of a run, one or several in a mixture, and what loading them shows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from environments.checks.playing import Task, gold_turns
from environments.checks.splits import Overlap, overlap
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.same_task import SameTasks, task_of
from environments.sandbox.needs import Needs
from environments.untrusted_text import plain_name
from flash_mcp.exam import exams as sealed
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import EnvironmentVersion, GateVerdict, Json, Run, text_of
from flash_mcp.protocol.spec import ResolvedSpec, RunSpec
from flash_mcp.state import references
from flash_mcp.state.datasets import Dataset
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.loading import LOAD_TIMEOUT_S, loaded, read_held_out, read_prompts
from flash_mcp.tools.shared.rows import CHARACTERS_PER_TOKEN

OPENINGS_S = 12.0
"""Time to open a few tasks. Tasks that take longer are no reason to refuse a run."""


@dataclass(frozen=True)
class Probed:
    splits: dict[str, int]
    """{"train": rows, "eval": rows}"""
    prompt_tokens: int
    """The longest first prompt among a few."""
    shared: list[Overlap]
    """The tasks that are in both splits, of each environment."""
    evaluated: int = 0
    """Tasks of one evaluation."""
    exams: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    """Rows that ask what an exam asks (flash_mcp.exam.exams.rows_by_exam)."""

    @property
    def overlap(self) -> Json | None:
        """The first overlap of splits, as a run's lineage has it."""
        for item in self.shared:
            if item.shared:
                return {"shared": item.shared, "eval_tasks": item.eval_tasks, "evidence": str(item)}
        return None

    def __add__(self, other: Probed) -> Probed:
        splits = Counter(self.splits) + Counter(other.splits)
        longest = max(self.prompt_tokens, other.prompt_tokens)
        shared = [*self.shared, *other.shared]
        exams = dict(self.exams)
        for name, rows in other.exams.items():
            exams[name] = rows or exams.get(name, rows)
        return Probed(dict(splits), longest, shared, self.evaluated + other.evaluated, exams)


NO_PROBE = Probed({}, 0, [])


async def probe(
    spec: RunSpec,
    environment: EnvironmentVersion,
    dataset: Dataset | None,
    card: ModelCard,
    env_files: Sequence[str],
) -> Probed:
    async with loaded(
        environment,
        args=spec.environment_args,
        secrets=spec.secrets,
        env_files=env_files,
        timeout_s=min(spec.env_timeout_s, LOAD_TIMEOUT_S),
        fix="correct the folder, env_test it, env_push it, and train again",
    ) as host:
        gold = spec.algorithm == "sft" and not dataset
        # Characters of the longest first prompt among train tasks that open within OPENINGS_S; with
        # `gold` asks for gold answers too. A run does without tasks that fail: raises only if all
        # do
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
                        length += len(json.dumps(opening.tools))
                    if opening.tools and card.scheme == "folder" and card.tools is None:
                        what = "the tasks have tools, which the model's chat template cannot show"
                        fix = (
                            "use a model whose template knows tools, or a ChatML one: it gets ours"
                        )
                        raise FlashError("tools_unsupported", what, model=card.name, fix=fix)
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
        if dataset:
            await _check_contamination(host, spec, environment, dataset)
        exams: dict[str, int | None] = {}
        if sealed.exams(home()):
            if dataset:
                questions = sealed.questions_of(dataset.rows())
            else:
                questions = (task.text for task in await read_prompts(host, "train"))
            exams = await run_sync(sealed.rows_by_exam, home(), questions)
        splits = dict(host.splits)
        shared = await overlap(host)
    if spec.evaluates and not splits.get("eval"):
        what = f"{environment.reference} has no eval split to evaluate on"
        fix = "add eval rows (env.eval_dataset, usually datasets/eval.jsonl), or leave eval_* out"
        raise FlashError("dataset_invalid", what, fix=fix)
    tokens = math.ceil(longest / CHARACTERS_PER_TOKEN)
    return Probed(splits, tokens, [shared], min(splits.get("eval", 0), spec.eval_examples), exams)


async def _check_contamination(
    host: EnvironmentHost, spec: RunSpec, environment: EnvironmentVersion, dataset: Dataset
) -> None:
    """FlashError(dataset_invalid) if the dataset has eval prompts of this environment."""
    made_with = dataset.manifest["environment"]
    args = spec.environment_args
    current = {"name": environment.name, "digest": environment.digest, "args": args}
    if made_with == current or dataset.manifest["allow_eval_tasks"]:
        return
    held_out = SameTasks((await read_held_out(host)).prompts)
    rows: list[Json] = []
    for row in dataset.rows():
        if held_out.find(task_of(row["messages"][: row["prompt_messages"]])):
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


@dataclass
class MixturePart:
    environment: EnvironmentVersion
    ratio: float
    args: Json
    secrets: list[str]
    """What this environment gets of the run's."""
    probe: Probed = NO_PROBE
    gate: GateVerdict = field(default_factory=GateVerdict)
    """The newest verdict of env_test on it."""

    def spec(self, spec: RunSpec) -> RunSpec:
        """The run's, if this were its only environment."""
        own = {"environment_args": self.args, "secrets": self.secrets}
        return spec.model_copy(update=own)

    def pinned(self) -> Json:
        """As the run's lineage and job.json have it."""
        version = self.environment
        place = {"name": version.name, "digest": version.digest, "path": version.path}
        own: Json = {"ratio": self.ratio, "args": self.args, "secrets": self.secrets}
        seen: Json = {"tasks": self.probe.splits, "overlap": self.probe.overlap}
        return {**place, "owner": version.owner, **own, **seen}


def parts_of(store: Store, spec: RunSpec, first: Run | None) -> list[MixturePart]:
    """The environments of a run, the one that it is named after first; those of `first`, which the
    same idempotency key started. FlashError(unknown_environment | invalid_argument).
    """
    if first and first.mixture:
        again: list[MixturePart] = []
        for part in first.mixture:
            version = store.environment(f"{part['name']}@{part['digest']}")
            again.append(MixturePart(version, part["ratio"], part["args"], part["secrets"]))
        return again
    reference = spec.environment
    if first:
        reference = first.environment_reference
    version = references.environment(store, reference)
    parts = [MixturePart(version, 1.0, spec.environment_args, spec.secrets)]
    for name, fields in spec.mixture.items():
        version = references.environment(store, name)
        args, secrets = fields.get("environment_args", {}), fields.get("secrets", [])
        parts.append(MixturePart(version, fields.get("ratio", 1.0), args, secrets))
    if spec.mixture:
        names: set[str] = set()
        for part in parts:
            name = part.environment.name
            if name in names:
                fix = "name each environment once; one with other arguments needs a push of its own"
                raise FlashError("invalid_argument", f"the mixture has {name} twice", fix=fix)
            names.add(name)
            if Needs.from_folder(Path(part.environment.path)).gateway:
                what = f"{name} is played by agents outside, through a gateway"
                fix = "train on it alone: a mixture has one engine and many environments"
                raise FlashError("invalid_argument", what, fix=fix)
    return parts


def with_all_secrets(resolved: ResolvedSpec) -> ResolvedSpec:
    """With the secrets of all its environments as the run's: each environment gets its own only."""
    spec = resolved.spec
    names = list(spec.secrets)
    for part in spec.mixture.values():
        names += part.get("secrets", [])
    spec = spec.model_copy(update={"secrets": list(dict.fromkeys(names))})
    return resolved.model_copy(update={"spec": spec})
