"""One record each for a run, a step's metrics, a rollout, an evaluation, an event, a checkpoint, an
environment version and a deployment, from the place where it is made to the tool that shows it.

Times are Unix seconds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from environments.settings import identity
from environments.tools import text_of as text_of  # for all of flash_mcp: judgement sees records
from environments.untrusted_text import is_plain, plain_name
from flash_mcp.protocol.errors import exam_sealed
from flash_mcp.protocol.run_files import Json as Json
from flash_mcp.protocol.spec import LOCAL_TARGET, EvalSpec, Precision, RunSpec, stored_spec

COPY = re.compile("copying the [a-z ]{4,40} of the prompt")
"""How a part of the prompt is named that answers as well as a constant does."""

RunState = Literal["queued", "starting", "running", "succeeded", "failed", "cancelled"]
DeploymentState = Literal["starting", "ready", "failed", "stopping", "stopped"]
ACTIVE: tuple[RunState, ...] = ("queued", "starting", "running")
ENDED: tuple[RunState, ...] = ("succeeded", "failed", "cancelled")
LIVE_DEPLOYMENT: tuple[DeploymentState, ...] = ("starting", "ready", "stopping")


def without_none(fields: Mapping[str, Any]) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record can do."""

    @classmethod
    def from_row(cls, fields: Mapping[str, Any]) -> Self:
        """The record with these fields; names that this version does not know are left out."""
        names = (existing.name for existing in dataclasses.fields(cls))
        return cls(**{name: fields[name] for name in names if name in fields})

    def fields(self) -> Json:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Run(Record):
    """A run of training, an evaluation, or the model server of deployments."""

    id: str
    owner: str
    state: RunState
    algorithm: str
    """grpo, sft, eval for an evaluation, whose steps are attempts at tasks, or serve."""
    model: str
    environment: str
    environment_digest: str
    environment_path: str
    spec: RunSpec | EvalSpec
    sources: Json
    init_adapter: Json | None
    dataset: Json | None
    """The curated rows of an sft run: {"name", "digest", "path", "files": {file: sha256}}."""
    lineage: Json
    """`code` is the version that made the run; `overlap` is {"shared", "eval_tasks", "evidence"},
    present if the splits share tasks; `name` and `note` are the owner's words."""
    idempotency_key: str | None
    folder: str
    attempt: int
    """Counts from 1 once the run is claimed."""
    max_attempts: int
    steps: int | None
    """None until the worker has counted the steps of `epochs`."""
    step: int
    phase: str | None
    beat: float | None
    """When the worker last wrote beat.json, by the supervisor's clock."""
    progress: float | None
    """When the step or phase last changed."""
    cancel_requested: float | None
    cancel_reason: str | None
    error: Json | None
    """FlashError.to_dict() of a failed run, and of the last lost attempt while the run waits for
    the next."""
    created: float
    started: float | None
    ended: float | None
    updated: float
    files_removed: float | None = None
    """When the operator's limits removed its files."""
    used_s: float = 0.0
    """Seconds of work of all attempts, up to the last heartbeat of each."""
    used_before_s: float = 0.0
    """`used_s` when the run was resumed: a budget counts from there."""
    target: str = LOCAL_TARGET
    """Where its attempts run: a name of targets.toml, or the server's own machine."""
    handle: str | None = None
    """What the target's engine calls the newest attempt, once it was submitted."""
    pending_reason: str | None = None
    """Why the newest attempt has not started, in the engine's own words; None once it has."""
    preemptions: int = 0
    """Attempts that the engine ended for its own reasons. They do not count as attempts."""
    serves: str | None = None
    """The deployment whose model server it is. Lists of runs leave such runs out."""
    reported_error: Json | None = None
    """Why its newest attempt is to be replaced, as who uses it found."""
    precision: Precision | None = None
    """In which the model is computed, in every attempt; None until the first has chosen it."""

    @classmethod
    def from_row(cls, fields: Mapping[str, Any]) -> Self:
        return super().from_row({**fields, "spec": stored_spec(fields["spec"])})

    def refuse_exam(self) -> None:
        """FlashError(exam_sealed) if it is a look at an exam."""
        if "exam" in self.lineage:
            raise exam_sealed(self.id)

    @property
    def name(self) -> str | None:
        """What its owner calls it, on one line."""
        return self.lineage.get("name")

    @property
    def note(self) -> str | None:
        """What its owner noted of it."""
        return self.lineage.get("note")

    @property
    def seed_group(self) -> str | None:
        return self.lineage.get("seed_group")

    @property
    def env_files(self) -> list[str]:
        """Files of this machine, named .env, that may have its secrets."""
        return self.lineage.get("env_files") or []

    @property
    def mixture(self) -> list[Json]:
        """Its environments, if they are several: `name`, `digest`, `path`, `owner`, `ratio`,
        `args`, `secrets`, `tasks`, `overlap`."""
        return self.lineage.get("mixture") or []

    @property
    def own_secrets(self) -> list[str]:
        """Names of the secrets of the environment that it is named after."""
        if self.mixture:
            return self.mixture[0]["secrets"]
        return self.spec.secrets

    def part(self, name: str) -> Json | None:
        for part in self.mixture:
            if part["name"] == name:
                return part
        return None

    @property
    def environment_reference(self) -> str:
        """NAME@DIGEST."""
        return f"{self.environment}@{self.environment_digest}"

    @property
    def environment_references(self) -> str:
        """NAME@DIGEST of each of its environments."""
        parts = [f"{part['name']}@{part['digest']}" for part in self.mixture]
        return ", ".join(parts) or self.environment_reference

    @property
    def evaluation(self) -> EvalSpec:
        """The spec of a run that is known to be an evaluation."""
        assert isinstance(self.spec, EvalSpec)
        return self.spec

    @property
    def training(self) -> RunSpec:
        """The spec of a run that is known to train."""
        assert isinstance(self.spec, RunSpec)
        return self.spec

    @property
    def eval_split(self) -> str:
        if isinstance(self.spec, EvalSpec):
            return self.spec.split
        return "eval"


def plain_refusal(kind: str) -> str:
    code, _, field = kind.partition(": ")
    return f"{plain_name(code)} of {plain_name(field)}"


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Record):
    """The metrics of one training step: metrics/STEP.json."""

    step: int
    epoch: int
    time: float
    metrics: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Rollout(Record):
    """A finished conversation: a line of rollouts/STEP.jsonl, or an attempt of evals/STEP.json."""

    step: int = 0
    index: int = 0
    group: int = 0
    task_id: str = ""
    split: str = "train"
    attempt: int = 0
    messages: list[Json] = field(default_factory=list[Json])
    branches: list[Json] = field(default_factory=list[Json])
    """Other conversations of an agent, that `messages` does not hold: {"of": K, "after": N,
    "turns": T, "messages": [...], "tools": [...]} begins with the first N messages of conversation
    K, which may be a branch itself, and has T turns of its own."""
    calls: list[Json] = field(default_factory=list[Json])
    """The answered calls of an agent, in order, as worker/rollouts/calls.py describes them.
    Conversation 0 is `messages`, the others are `branches`."""
    tokens: Json | None = None
    """Of an agent: {"ids", "forks"} of all its calls, as worker/rollouts/transcript.py has them."""
    conversation: int = 0
    """Which of an agent's conversations this is, where it is only one of them."""
    tools: list[Json] = field(default_factory=list[Json])
    """OpenAI function schemas of what the model could call."""
    reward: float = 0.0
    is_scored: bool = True
    """False for what a deployment recorded and nobody rated: its reward means nothing."""
    success: bool = False
    advantage: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    reason: str | None = None
    expected: str | None = None
    """The beginning of the task's gold answer, if it has one as text."""
    kind: str | None = None
    """The group that the task declares, else a digest of its prompt without numbers and names."""
    error: Json | None = None
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    env_tokens: int = 0
    truncated: bool = False
    finish: str = "done"
    seconds: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """What an agent asked of its endpoint that was refused or left out, and how often."""

    @property
    def prompt_messages(self) -> int:
        """Messages before the model's first turn; the prompt's examples are the assistant's too."""
        said: list[int] = []
        for number, message in enumerate(self.messages):
            if message["role"] == "assistant":
                said.append(number)
        beside = sum(branch["turns"] for branch in self.branches)
        turns = min(self.turns - beside, len(said))
        if turns:
            return said[-turns]
        return len(self.messages) - 1

    @property
    def conversations(self) -> list[Self]:
        """Each conversation of an agent that is trained, as a rollout of its own, with the turns
        that no earlier one has; of all others this one.
        """
        if not self.calls:
            return [self]
        main: Json = {"messages": self.messages, "turns": self.turns}
        for branch in self.branches:
            main["turns"] -= branch["turns"]
        cut: set[int] = set()
        untrained: set[int] = set()
        for call in self.calls:
            if call["finish"] == "length":
                cut.add(call["conversation"])
            if not call.get("trained", True):
                untrained.add(call["conversation"])
        results: list[Self] = []
        whole = [self.messages]
        for number, part in enumerate([main, *self.branches]):
            if number:
                messages: list[Json] = part["messages"]
                whole.append([*whole[part.get("of", 0)][: part["after"]], *messages])
            if number in untrained:
                continue
            results.append(
                dataclasses.replace(
                    self,
                    messages=whole[number],
                    turns=part["turns"],
                    tools=part.get("tools", self.tools),
                    truncated=number in cut,
                    branches=[],
                    calls=[],
                    conversation=number,
                )
            )
        return results

    def token_ids(self, call: Json) -> tuple[list[int], list[int]]:
        """What the model was shown in a call, and what it answered."""
        tokens = self.tokens or {"ids": [], "forks": []}
        after = dict(tokens["forks"])
        path: list[int] = []
        place = call["last"]
        while place >= 0 and tokens["ids"]:
            path.append(tokens["ids"][place])
            place = after.get(place, place) - 1
        path.reverse()
        return path[: call["prompt_tokens"]], path[call["prompt_tokens"] :]

    @property
    def shown_messages(self) -> list[Json]:
        """All messages in one list for a reader, each branch after a message that announces it."""
        shown = [*self.messages]
        for branch in self.branches:
            begins = f"after the first {branch['after']} messages" if branch["after"] else "anew"
            if of := branch.get("of"):
                begins += f" of branch {of}"
            shown.append({"role": "branch", "content": f"Another conversation began {begins}:"})
            shown += branch["messages"]
        return shown

    @property
    def answers(self) -> list[str]:
        """What the model wrote, turn by turn, its tool calls included."""
        return list(map(text_of, self._turns))

    @property
    def bad_tool_call(self) -> str | None:
        """Why a tool call of the model could not be run: the first such reason."""
        return next((why for turn in self._turns if (why := turn.get("bad_tool_call"))), None)

    @property
    def _turns(self) -> list[Json]:
        created = self.messages[self.prompt_messages :] if self.turns else []
        return [message for message in created if message["role"] == "assistant"]


@dataclass(frozen=True, kw_only=True)
class Try(Record):
    index: int
    task_id: str
    success: bool
    reward: float
    error: str | None
    """The code, if environment code failed."""
    truncated: bool
    tokens: int
    """That the model wrote."""
    turns: int
    kind: str = ""
    """What its task has in common with others; unknown ones are each of its own."""
    has_gold: bool = False
    """Whether its task has a gold answer as text."""

    @classmethod
    def from_row(cls, fields: Mapping[str, Any]) -> Self:
        """The attempt of a stored row; SQLite has no booleans."""
        switches = {name: bool(fields[name]) for name in ("success", "truncated", "has_gold")}
        return super().from_row({**fields, **switches, "error": fields["code"]})


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """An evaluation's summary: evals/STEP.json without its rollouts."""

    step: int
    """The step that the evaluated policy comes from; 0 is the untrained model."""
    epoch: int
    time: float
    summary: dict[str, float]
    constant: str | None = None
    """The best answer that is the same for every task, or part of the prompt to copy. It may hold
    words of the environment."""

    @property
    def can_be_judged(self) -> bool:
        return bool(self.summary["n"])

    @property
    def constant_name(self) -> str:
        """It in a sentence of ours."""
        if COPY.fullmatch(self.constant or ""):
            return str(self.constant)
        if self.constant is not None and is_plain(self.constant):
            return f"always answering {plain_name(self.constant)}"
        return "one constant answer"


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """`kind`: phase, warning, checkpoint, error (by the worker), attempt (by the supervisor)."""

    name: str
    time: float
    epoch: int
    kind: str
    message: str
    data: Json


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    step: int
    epoch: int
    time: float
    digest: str
    size_bytes: int
    path: str
    metrics: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class EnvironmentVersion(Record):
    owner: str
    name: str
    digest: str
    path: str
    size_bytes: int
    pushed: float
    data: Json
    """What the pusher recorded: splits, kind, files."""

    @property
    def reference(self) -> str:
        """NAME@DIGEST."""
        return f"{self.name}@{self.digest}"

    @property
    def identity(self) -> str:
        """How settings.toml names it."""
        return identity(self.owner, self.name)


@dataclass(frozen=True, kw_only=True)
class GateVerdict(Record):
    """What env_test found of an environment's files when it last ran."""

    time: float | None = None
    """None if it never ran on these files with these arguments."""
    failed: list[str] = field(default_factory=list[str])
    """The checks that failed."""
    unfinished: list[str] = field(default_factory=list[str])
    """The checks for which there was no time."""
    accepted: list[str] = field(default_factory=list[str])
    """The checks that failed, and whose failure was accepted."""

    @property
    def is_refused(self) -> bool:
        return bool(self.failed or self.unfinished)

    def __str__(self) -> str:
        if self.time is None:
            return "never run"
        if self.failed:
            return f"failed: {', '.join(self.failed)}"
        if self.unfinished:
            return f"unfinished: {', '.join(self.unfinished)}"
        if self.accepted:
            return f"passed, accepted: {', '.join(self.accepted)}"
        return "passed"


@dataclass(frozen=True, kw_only=True)
class Deployment(Record):
    """A checkpoint that is served. Its owner is the run's."""

    id: str
    owner: str
    name: str
    model: str
    run_id: str
    step: int | None
    adapter_path: str | None
    state: DeploymentState
    error: Json | None
    base_url: str | None
    created: float
    updated: float
    target: str = LOCAL_TARGET
    """Where its server runs."""
    server_run: str | None = None
    """The run of its server. On this machine, deployments of a model share it."""
    server_attempt: int | None = None
    """The attempt of that run which answers."""
    lora_rank: int = 0
    thinking: bool = False
    port: int | None = None
    """The port that was asked for."""
    idle_minutes: float | None = None
    """Without a request for so long it ends; None: as the operator has it."""
    record: bool = False
    """Whether its requests are recorded."""

    @classmethod
    def from_row(cls, fields: Mapping[str, Any]) -> Self:
        """The deployment of a stored row; SQLite has no booleans."""
        switches = {name: bool(fields[name]) for name in ("thinking", "record")}
        return super().from_row({**fields, **switches})
