"""RunSpec: the fields of a training run, each with its default.

This one flat model is the `train` tool's schema, the TOML file, the table in docs/reference.md and
job.json. `resolve` records where every value came from."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from flash_mcp.protocol.errors import FlashError, did_you_mean

Algorithm = Literal["grpo", "sft", "distill"]
LossType = Literal["dr_grpo", "rollout_mean", "grpo", "bnpo", "dapo", "cispo", "maxrl"]
ImportanceSampling = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"
]
BasePrecision = Literal["full", "nf4"]
Precision = Literal["bfloat16", "float32"]
LrSchedule = Literal["constant", "linear", "cosine"]
Tracker = Literal["trackio", "wandb", "tensorboard", "mlflow"]
Source = Literal["argument", "file", "adapter", "run", "recipe", "default", "auto"]

DEFAULT_MODEL = "smollm2-135m-instruct"
LOCAL_TARGET = "local"
"""The target that is the server's own machine."""
AUTO = "auto"
"""Stands for the cheapest target that can take the run."""
MAX_GPUS = 64
MOST_AT_ONCE = 256
"""Conversations that an engine advances at once."""
MOST_MIXED = 7
"""Environments beside the first."""
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {
        "steps": 150,
        "batch_size": 4,
        "group_size": 8,
        "learning_rate": 2e-4,
        "lr_schedule": "constant",
        "warmup": 0.0,
    },
    "sft": {
        "epochs": 2.0,
        "batch_size": 8,
        "learning_rate": 5e-4,
        "lr_schedule": "linear",
        "warmup": 0.05,
    },
    "distill": {
        "steps": 50,
        "batch_size": 16,
        "group_size": 1,
        "learning_rate": 5e-4,
        "lr_schedule": "constant",
        "warmup": 0.0,
    },
}
"""The defaults that depend on the algorithm. The learning rate is that of the smallest models."""
LEARNING_RATES: tuple[tuple[float, dict[Algorithm, float]], ...] = (
    (0.5e9, {"grpo": 2e-4, "sft": 5e-4, "distill": 5e-4}),
    (2e9, {"grpo": 5e-5, "sft": 2e-4, "distill": 2e-4}),
    (math.inf, {"grpo": 2e-5, "sft": 1e-4, "distill": 1e-4}),
)
"""(parameters, default learning rate) of models below that size. For sft it is ten times that of
fine-tuning without an adapter (https://thinkingmachines.ai/blog/lora)."""


def default_learning_rate(algorithm: Algorithm, parameters: float) -> float:
    return next(rates[algorithm] for below, rates in LEARNING_RATES if parameters < below)


def _of_recipe(name: str) -> Callable[[dict[str, Any]], Any]:
    """A default factory: the value of field `name` in the recipe of the spec's algorithm."""
    return lambda data: RECIPES[data.get("algorithm", "grpo")].get(name)


class Part(TypedDict, total=False):
    """An environment of a mixture beside the run's first."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    ratio: Annotated[float, Field(ge=0.01, le=100)]
    environment_args: dict[str, Any]
    secrets: Annotated[list[str], Field(max_length=64)]


def _with_ratio(part: Any) -> Any:
    """A part that is its ratio alone, as one with that."""
    if isinstance(part, (int, float)):
        return {"ratio": part}
    return part


SbatchOption = Literal["account", "partition", "qos", "time"]
SbatchValue = Annotated[str, Field(pattern=r"^[\w.,:+-]+$")]


class RunSpec(BaseModel):
    """A training run. `model_fields_set` says which values the caller gave."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    environment: Annotated[str, Field(min_length=1)]
    """NAME (pinned to its newest version), NAME@DIGEST or reasoning-gym:DATASET."""
    model: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """Base model: a catalog name, a hub id (NAME@COMMIT pins its files) or a local folder."""
    algorithm: Algorithm = "grpo"
    """grpo: reinforcement by the environment's reward. sft: fine-tuning on its gold answers, or on
    a dataset. distill: on own rollouts towards a teacher; no reward."""
    teacher: Annotated[str | None, Field(min_length=1)] = None
    """For distill: RUN_ID, RUN_ID@STEP or an adapter's folder, of the same base model; or another
    model with its tokenizer."""
    dataset: Annotated[str | None, Field(min_length=1)] = None
    """For sft, instead of gold answers: NAME@DIGEST of curate, or rows as env_setup takes them."""
    question: str | None = None
    """As of env_setup: the column of the questions in the dataset's rows."""
    answer: str | None = None
    """As of env_setup: the column of the answers."""

    steps: Annotated[int | None, Field(ge=1, le=100_000, default_factory=_of_recipe("steps"))]
    """Optimizer steps; with sft, overrides epochs."""
    epochs: Annotated[float | None, Field(gt=0, le=1000, default_factory=_of_recipe("epochs"))]
    """Passes over the dataset, sft only."""
    batch_size: Annotated[int, Field(ge=1, le=4096, default_factory=_of_recipe("batch_size"))]
    """Prompts per step, or examples per step (sft)."""
    group_size: Annotated[int | None, Field(ge=1, le=256, default_factory=_of_recipe("group_size"))]
    """Rollouts per prompt, not for sft; at least 2 with grpo."""
    learning_rate: Annotated[float, Field(gt=0, le=1, default_factory=_of_recipe("learning_rate"))]
    """Peak learning rate; the default falls with the model's size."""
    lr_schedule: Annotated[LrSchedule, Field(default_factory=_of_recipe("lr_schedule"))]
    """How the rate goes on after its warm-up; linear and cosine fall to 0 at the last step."""
    warmup: Annotated[float, Field(ge=0, le=0.5, default_factory=_of_recipe("warmup"))]
    """Share of the steps over which the rate rises to its peak."""
    lora_rank: Annotated[int, Field(ge=1, le=512)] = 32
    """Rank of the LoRA adapter."""
    lora_alpha: Annotated[int, Field(ge=1, le=1024)] = 64
    """Scale numerator of the adapter."""
    base_precision: BasePrecision = "full"
    """nf4: 4-bit trainer, untested on GPUs."""
    experts: bool = False
    """Adapt the experts of a mixture too, never its router; the engine gets merged weights."""
    fp32_head: bool = False
    """Compute the trainer's logits in fp32: more exact, and slower."""
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 512
    """Tokens the model may write in one turn."""
    max_length: Annotated[int | None, Field(ge=16, le=1_048_576)] = None
    """Tokens of a whole conversation; default: the model's context, at most 4096."""
    # vLLM takes at most 2, and treats values below 0.01 as 0.01. The trainer divides by it.
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling mass."""
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] = []
    """Strings that end a turn; the transcript keeps them."""
    thinking: bool = False
    """Thinking in the chat template, if supported."""
    kl_penalty_coef: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Weight of the KL penalty to the starting policy."""
    kl_schedule: LrSchedule = "constant"
    """How that weight goes on; linear and cosine fall to 0 at the last step."""
    entropy_coef: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of a bonus for the mean entropy of the trained tokens; not for sft."""
    mask_truncated: bool = False
    """Train no rollout that was cut off; it still counts in its group's mean."""
    thinking_length_penalty_coef: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Taken off the reward for each token of thinking, times the share of the group that succeeds;
    grpo only."""
    loss_type: LossType = "dr_grpo"
    """What a rollout's loss is divided by: a constant (dr_grpo, maxrl), its tokens (rollout_mean,
    grpo), its group's (bnpo), the step's (dapo, cispo); rollout_mean by default for agents.
    grpo, bnpo, dapo and cispo scale advantages by their group's deviation, maxrl by its mean."""
    importance_sampling: ImportanceSampling = "token_truncate"
    """Correction for the mismatch of engine and trainer."""
    importance_sampling_clip: Annotated[float, Field(gt=1, le=100)] = 2.0
    """Upper bound of the correction ratio."""
    max_staleness: Annotated[int, Field(ge=0, le=4)] = 0
    """Steps by which a rollout may begin ahead of its own, so that no step waits for the longest
    one; grpo only. Needs importance_sampling; saves and evaluations begin nothing ahead."""
    task_sampling: Literal["passes", "useful"] = "passes"
    """passes: each task once a pass. useful: tasks whose groups are likely to differ in reward, and
    up to two more rounds of tasks in a step where none does; grpo only."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Gradients are scaled down to this norm."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of data, adapter and sampling."""
    save_every: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Steps between checkpoints; the last step is saved too."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 4
    """Checkpoints kept besides the newest, the best and those in use."""
    eval_every: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Steps between evaluations; 0: only eval_before and eval_after."""
    eval_before: bool = False
    """Evaluate the untrained model first."""
    eval_after: bool = False
    """Evaluate the trained model last."""
    eval_examples: Annotated[int, Field(ge=1, le=100_000)] = 200
    """First rows of the eval split used."""
    regression: Literal["auto", "on", "off"] = "auto"
    """Try short tasks of other kinds before and after, to see what was forgotten. on: all 311;
    auto: a tenth of the run's conversations, if 120 tasks; at least 120 in sft."""
    init_from_adapter: str | None = None
    """Warm start: RUN_ID, RUN_ID@STEP or a folder with a plain PEFT LoRA of every linear layer. Its
    rank and alpha apply."""
    environment_args: dict[str, Any] = {}
    """Keyword arguments of load_environment."""
    secrets: Annotated[list[str], Field(max_length=64)] = []
    """Server variables that the environment may read; never stored."""
    mixture: Annotated[
        dict[str, Annotated[Part, BeforeValidator(_with_ratio)]], Field(max_length=MOST_MIXED)
    ] = {}
    """More environments of the same run, not for sft: {NAME: ratio}, where `environment` has 1, or
    {NAME: {"ratio": 1, "environment_args": {}, "secrets": []}}."""
    env_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds that one call into environment code may take."""
    env_concurrency: Annotated[int, Field(ge=1, le=4096)] = 32
    """Concurrent environment calls. Unset: as many as rollouts are under way, from 32 to 256."""
    max_error_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of rollouts, and of tasks read first, that may fail in environment code; of gold
    answers 0.05."""
    target: Annotated[str, Field(min_length=1)] = LOCAL_TARGET
    """As listed by catalog; auto: the cheapest that fits."""
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    """GPUs that share each step, and a model too large for one."""
    slurm: dict[SbatchOption, SbatchValue] | None = None
    """Arguments of sbatch for its jobs on a target of Slurm."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts before a run whose worker dies or stalls fails."""
    stall_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 900.0
    """Seconds without progress before a restart."""
    max_hours: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Hours, then it ends as cancelled."""
    finish_by: str | None = None
    """As 25 min: only steps that fit."""
    early_stopping: bool = True
    """End after ten steps with nothing left to learn: sft at a loss below 0.001, grpo where every
    rollout succeeds and no group differs in reward."""
    max_cost: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """The same by cost."""
    report_to: Annotated[list[Tracker], Field(max_length=4)] = []
    """Trackers, installed beside the worker, that get the metrics too."""

    @model_validator(mode="after")
    def _fits_together(self) -> RunSpec:
        self._check_algorithm()
        if self.mixture and (self.algorithm == "sft" or self.task_sampling == "useful"):
            raise ValueError("mixture is for grpo and distill, with task_sampling='passes'")
        if self.mixture and (self.gpus > 1 or self.target != LOCAL_TARGET):
            raise ValueError(f"mixture needs gpus=1 and target={LOCAL_TARGET!r}")
        if self.finish_by is not None and self.finish_s is None:
            raise ValueError(f"finish_by={self.finish_by!r} is no time: use 90 s, 25 min or 2 h")
        if self.gpus > self.batch_size:
            raise ValueError(f"gpus={self.gpus} cannot share a batch of {self.batch_size}")
        if self.max_staleness and self.importance_sampling == "none":
            raise ValueError("max_staleness needs importance_sampling, which is 'none'")
        if self.experts and self.base_precision == "nf4":
            raise ValueError("experts=true needs base_precision='full'")
        if self.loss_type == "cispo" and self.importance_sampling != "token_truncate":
            raise ValueError("loss_type='cispo' needs importance_sampling='token_truncate'")
        room = self.max_length
        if "max_tokens" in self.model_fields_set and room is not None and self.max_tokens > room:
            raise ValueError(f"max_tokens={self.max_tokens} does not fit in max_length={room}")
        return self

    def _check_algorithm(self) -> None:
        name = self.algorithm
        if name != "sft" and self.epochs is not None:
            raise ValueError(f"epochs is for algorithm='sft'; a {name} run is as long as its steps")
        if name != "sft" and self.dataset is not None:
            what = f"env_setup(dataset={self.dataset!r}) makes an environment of rows for {name}"
            raise ValueError(f"dataset is for algorithm='sft'; {what}")
        if (self.question or self.answer) and self.dataset is None:
            raise ValueError("question and answer name columns of dataset, which is missing")
        for field in ("group_size", "max_staleness", "entropy_coef", "mask_truncated"):
            if name == "sft" and getattr(self, field):
                raise ValueError(f"{field} is for algorithm='grpo'")
        if name != "grpo" and self.thinking_length_penalty_coef:
            raise ValueError("thinking_length_penalty_coef is for algorithm='grpo'")
        if name != "grpo" and self.task_sampling != "passes":
            raise ValueError(f"task_sampling={self.task_sampling!r} is for algorithm='grpo'")
        if name == "grpo" and self.group_size == 1:
            raise ValueError("group_size=1 is for algorithm='distill': grpo compares rollouts")
        if (name == "distill") != (self.teacher is not None):
            raise ValueError("algorithm='distill' and teacher need each other")

    @property
    def rollouts_per_prompt(self) -> int:
        """`group_size`; 1 with sft."""
        if self.group_size is None:
            return 1
        return self.group_size

    @property
    def finish_s(self) -> float | None:
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?) ?(s|min|h)", self.finish_by or "")
        if match is None:
            return None
        return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]

    @property
    def conversations_per_step(self) -> int:
        return self.batch_size * self.rollouts_per_prompt

    @property
    def evaluates(self) -> bool:
        return self.eval_before or self.eval_after or self.eval_every > 0

    @property
    def generates(self) -> bool:
        return self.algorithm != "sft" or self.evaluates or self.regression == "on"


class ResolvedSpec(BaseModel):
    """What job.json holds: the spec, and `sources[field]` = where that value came from.

    `max_length` may still be None: then the model's context decides."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: RunSpec
    sources: dict[str, Source]


class EvalSpec(BaseModel):
    """What job.json holds of an evaluation: a run of `algorithm` eval. The evaluate tool gives
    every value.

    `checkpoint` (RUN@STEP) only says where the adapter came from. `step` is that step, 0 for a
    model that was not trained; the result is filed under it. `tasks` are indices within the split.
    `steps` is the total number of attempts: an evaluation's step is one attempt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Literal["eval"] = "eval"
    environment: str
    model: str
    checkpoint: str | None = None
    step: int = 0
    split: str = "eval"
    tasks: list[int]
    attempts: int
    steps: int
    temperature: float
    top_p: float
    max_tokens: int
    max_length: int | None
    stop_sequences: list[str]
    thinking: bool
    system_prompt: str | None = None
    """In place of the environment's; an empty one takes that away."""
    precision: Precision | None = None
    """None: the worker chooses by measurement."""
    seed: int
    lora_rank: int
    lora_alpha: int
    environment_args: dict[str, Any]
    secrets: list[str]
    env_timeout_s: float
    env_concurrency: int
    max_error_share: float
    max_attempts: int
    stall_timeout_s: float
    target: str = LOCAL_TARGET
    gpus: int = 1
    """Cards that share the model."""

    @property
    def is_sample(self) -> bool:
        """Whether it plays groups of train tasks, which show what GRPO could learn from."""
        return self.split == "train" and self.attempts > 1


class ResolvedEval(BaseModel):
    """An evaluation with every value, and where each came from: "run" is the run whose checkpoint
    is evaluated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: EvalSpec
    sources: dict[str, Source]


def default_of(name: str) -> Any:
    """The default of a field of RunSpec that does not depend on the algorithm; None without one."""
    field = RunSpec.model_fields[name]
    if field.is_required() or field.default_factory:
        return None
    return field.get_default()


def resolve(
    spec: RunSpec,
    *,
    file_fields: frozenset[str] = frozenset(),
    adapter_fields: frozenset[str] = frozenset(),
    parameters: float | None = None,
) -> ResolvedSpec:
    """The spec with the source of every value.

    `file_fields` names the fields that came from a TOML file, `adapter_fields` those from the
    adapter of a warm start; other given fields count as arguments. An unset `max_tokens` is at most
    `max_length`, an unset `learning_rate` that of a model with so many `parameters`, and an unset
    `env_concurrency` lets the calls of all rollouts run that the engine advances."""
    sources: dict[str, Source] = {}
    for name, value in spec:
        if value is None:
            sources[name] = "default"
        elif name in adapter_fields:
            sources[name] = "adapter"
        elif name in spec.model_fields_set:
            sources[name] = "file" if name in file_fields else "argument"
        else:
            sources[name] = "default" if name in ("model", "algorithm") else "recipe"
    if spec.max_length and sources["max_tokens"] == "recipe":
        room = {"max_tokens": min(spec.max_tokens, spec.max_length)}
        spec = spec.model_copy(update=room)
    if parameters and sources["learning_rate"] == "recipe":
        rate = {"learning_rate": default_learning_rate(spec.algorithm, parameters)}
        spec = spec.model_copy(update=rate)
    if sources["env_concurrency"] == "recipe":
        rollouts = spec.conversations_per_step * (1 + spec.max_staleness)
        under_way = min(rollouts, MOST_AT_ONCE * spec.gpus)
        calls = {"env_concurrency": max(spec.env_concurrency, under_way)}
        spec = spec.model_copy(update=calls)
    return ResolvedSpec(spec=spec, sources=sources)


def stored_spec(fields: dict[str, Any]) -> RunSpec | EvalSpec:
    """The spec of a stored run or of a job.json.

    It was checked when the run was created, so it is not checked again. A field that is newer than
    the run has its default; a field that exists no more is left out."""
    if fields.get("algorithm") != "eval":
        return RunSpec.model_construct(**fields)
    newer = [name for name in EvalSpec.model_fields if name not in fields]
    defaults = {name: default_of(name) for name in newer if name in RunSpec.model_fields}
    return EvalSpec.model_construct(**defaults, **fields)


ADAPTER_EXTRAS = (
    "use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "rank_pattern",
    "alpha_pattern", "modules_to_save", "trainable_token_indices", "layer_replication",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Settings of adapter_config.json with which an adapter is no longer W + alpha/rank BA."""
BASE_KEEPING = (True, False, "gaussian", "orthogonal", "eva")
"""Values of its init_lora_weights that leave the base model's weights as they are."""


def check_adapter(
    config: dict[str, Any], *, rank: int, alpha: int, experts: bool, wrong: Sequence[str] = ()
) -> None:
    """FlashError(adapter_mismatch) unless a run with this rank and alpha, and experts or none, can
    start from an adapter with this adapter_config.json.

    `wrong` lists what the caller has already found not to fit.
    """
    its_rank = config.get("r")
    its_alpha = config.get("lora_alpha")
    wrong = list(wrong)
    if its_rank != rank:
        wrong.append(f"rank {its_rank} (the run: lora_rank={rank})")
    if its_alpha != alpha:
        wrong.append(f"alpha {its_alpha} (the run: lora_alpha={alpha})")
    if bool(config.get("target_parameters")) != experts:
        wrong.append(f"{'no ' if experts else ''}experts (the run: experts={experts})")
    plain = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": BASE_KEEPING}
    extras = list(filter(config.get, ADAPTER_EXTRAS))
    extras += [name for name, values in plain.items() if config.get(name, values[0]) not in values]
    if not wrong and not extras:
        return
    fix = f"use lora_rank={its_rank}, lora_alpha={its_alpha} and its base model"
    if extras:
        fix = "merge it into its base model and train that, or start from a plain LoRA adapter"
    result = ", ".join([*wrong, *(f"{name}={config[name]}" for name in extras)])
    raise FlashError("adapter_mismatch", f"the adapter has {result}", fix=fix)


OTHER_NAMES = {
    other: name
    for name, others in {
        "learning_rate": ("lr",),
        "steps": ("num_steps", "max_steps"),
        "epochs": ("num_epochs", "num_train_epochs"),
        "group_size": ("num_generations",),
        "batch_size": ("per_device_train_batch_size",),
        "lora_rank": ("rank", "r"),
        "lora_alpha": ("alpha",),
        "max_tokens": ("max_new_tokens",),
        "max_length": ("max_seq_length",),
        "kl_penalty_coef": ("beta", "kl_coef"),
        "environment": ("env",),
        "model": ("model_name", "base_model"),
        "gpus": ("n_gpus",),
        "dataset": (
            "data", "data_file", "data_files", "data_path", "dataset_id", "dataset_name",
            "dataset_path", "file", "hub", "rows", "train_data", "train_dataset", "train_file",
            "training_data", "training_file",
        ),
        "question": (
            "dataset_text_field", "input_column", "input_field", "input_key", "prompt",
            "prompt_column", "prompt_field", "prompt_key", "question_column", "text_column",
            "text_field",
        ),
        "answer": (
            "answer_column", "completion", "completion_column", "label", "label_column",
            "label_key", "labels", "output_column", "response_column", "response_key",
            "target_column",
        ),
    }.items()
    for other in others
}  # fmt: skip
"""What other programs call a run's fields."""
SDK_NAMES = {"id": "environment", "params": "environment_args"}
"""What `[environment]` of a file for the freesolo SDK calls a run's fields."""


def read_toml(path: Path) -> dict[str, Any]:
    """Fields of a run's TOML file. Tables only group fields for the reader: `[train] steps = 3` is
    `steps = 3`. Files written for the freesolo SDK may say `[environment] id = "NAME"` and
    `seeds = [0]`; several seeds stay there as `seeds`, with the first as `seed`.

    Raises FlashError(invalid_argument) for a missing or malformed file, an unknown field or a field
    given twice."""

    def refused(what: str, fix: str) -> FlashError:
        return FlashError("invalid_argument", f"the config file {what}", path=path, fix=fix)

    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        fix = "name a TOML file on the server; env_setup writes one under configs/"
        raise refused(f"cannot be read: {error}", fix) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        fix = 'correct it there: a line is `steps = 100` or `model = "NAME"`, in UTF-8'
        raise refused(f"is no TOML: {error}", fix) from error
    environment = document.get("environment")
    if isinstance(environment, dict):
        table = cast("dict[str, Any]", document.pop("environment"))
        document["environment.*"] = {SDK_NAMES.get(name, name): table[name] for name in table}
    fields: dict[str, Any] = {}
    for name, value in document.items():
        is_table = isinstance(value, dict) and name not in RunSpec.model_fields
        table = cast("dict[str, Any]", value if is_table else {name: value})
        if seeds := table.pop("seeds", None):
            if not isinstance(seeds, list):
                raise refused(f"has seeds = {seeds!r}, which is no list", "write `seeds = [1, 2]`")
            seeds = cast("list[Any]", seeds)
            table["seed"] = seeds[0]
            if len(seeds) > 1:
                fields["seeds"] = seeds
        for field, inner in table.items():
            if field not in RunSpec.model_fields:
                guess = did_you_mean(field, RunSpec.model_fields, count=1, also=OTHER_NAMES)
                fix = f"use fields of: {', '.join(RunSpec.model_fields)}"
                raise refused(f"has an unknown field {field!r}{guess}", fix)
            if field in fields:
                raise refused(f"gives {field!r} twice", "keep one of the two")
            fields[field] = inner
    return fields


def validate(fields: dict[str, Any], files: Mapping[str, str] | None = None) -> RunSpec:
    """A RunSpec of these fields; FlashError(invalid_argument) with one line per field otherwise.
    `files` names the file of each field that came from one.
    """
    try:
        return RunSpec(**fields)
    except ValidationError as error:
        fix = "correct the fields named and call again"
        raise FlashError("invalid_argument", explain(error, files or {}), fix=fix) from error


def explain(error: ValidationError, files: Mapping[str, str] = MappingProxyType({})) -> str:
    """A validation error, one line per field: `field: what is wrong (got value)`."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # a consequence of another error
            continue
        field = ".".join(map(str, item["loc"])) or "arguments"
        message = item["msg"].removeprefix("Value error, ")
        has_value = item["loc"] and item["type"] != "missing"
        got = f" (got {item['input']!r:.100})" if has_value else ""
        if item["loc"] and (file := files.get(str(item["loc"][0]))):
            got += f", in {file}"
        lines.append(f"{field}: {message}{got}")
    if len(lines) == 1:
        return lines[0]
    return "\n" + "\n".join(lines)
