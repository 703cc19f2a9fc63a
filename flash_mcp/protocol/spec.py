"""RunSpec: what a training run is asked to do.

One flat model is the `train` tool's schema, the TOML file, the docs table and job.json. A field
left out (None) takes the recipe's value; `resolve` fills it in and records where every value came
from."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flash_mcp.protocol.errors import FlashError

Algorithm = Literal["grpo", "sft"]
LossType = Literal["dr_grpo", "grpo", "bnpo", "dapo"]
ImportanceSampling = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"
]
Source = Literal["argument", "file", "run", "recipe", "default"]

DEFAULT_MODEL = "smollm2-135m-instruct"


class RunSpec(BaseModel):
    """A run as asked for. Every field that is None is filled in by `resolve` from the algorithm's
    recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: Annotated[
        str,
        Field(
            min_length=1,
            description="Environment to train on: NAME (pinned to its newest "
            "version when the run is created) or NAME@DIGEST, as returned by env_push; or reasoning-gym:DATASET.",
        ),
    ]
    model: Annotated[
        str,
        Field(min_length=1, description="Base model: a catalog name, a hub id or a local folder."),
    ] = DEFAULT_MODEL
    algorithm: Annotated[
        Algorithm,
        Field(
            description="grpo: reinforcement learning from the environment's reward. "
            "sft: supervised fine-tuning on the environment's gold answers, or on a dataset."
        ),
    ] = "grpo"
    dataset: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Conversations to learn from, as returned by curate (NAME@DIGEST), "
            "sft only; default: the environment's gold answers.",
        ),
    ] = None

    steps: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Optimizer steps. grpo: default 150. sft: overrides epochs.",
        ),
    ] = None
    epochs: Annotated[
        float | None,
        Field(gt=0, le=1000, description="Passes over the dataset, sft only; default 2."),
    ] = None
    batch_size: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="Prompts per step (grpo) or examples per step (sft); default 4 (grpo), 8 (sft).",
        ),
    ] = None
    group_size: Annotated[
        int | None,
        Field(
            ge=2,
            le=256,
            description="Rollouts per prompt, grpo only; default 8. At "
            "least 2: the advantage of a rollout is relative to its group.",
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        Field(gt=0, le=1, description="Peak learning rate; default 1e-5 (grpo), 1e-4 (sft)."),
    ] = None
    lora_rank: Annotated[
        int | None, Field(ge=1, le=512, description="Rank of the LoRA adapter; default 32.")
    ] = None
    lora_alpha: Annotated[
        int | None, Field(ge=1, le=1024, description="Scale numerator of the adapter; default 64.")
    ] = None
    max_tokens: Annotated[
        int | None,
        Field(ge=1, le=131_072, description="Tokens the model may write in one turn; default 512."),
    ] = None
    max_length: Annotated[
        int | None,
        Field(
            ge=16,
            le=1_048_576,
            description="Tokens of a whole conversation, prompt "
            "and environment turns included; default: the model's context, at most 4096.",
        ),
    ] = None
    # vLLM takes at most 2, and what is below 0.01 for 0.01, by which the trainer would not divide.
    temperature: Annotated[
        float | None,
        Field(ge=0.01, le=2, description="Sampling temperature, 0.01 to 2; default 1.0."),
    ] = None
    top_p: Annotated[
        float | None, Field(gt=0, le=1, description="Nucleus sampling mass; default 1.0.")
    ] = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(
            max_length=16, description="Strings that end a turn; they are kept in the transcript."
        ),
    ] = None
    thinking: Annotated[
        bool | None,
        Field(
            description="Render the chat template with thinking enabled, where the model supports it; default false."
        ),
    ] = None
    kl_penalty_coef: Annotated[
        float | None,
        Field(
            ge=0,
            le=10,
            description="Weight of the KL penalty to the policy that the run starts from; default 0.",
        ),
    ] = None
    loss_type: Annotated[
        LossType | None, Field(description="Normalisation of the GRPO loss; default dr_grpo.")
    ] = None
    importance_sampling: Annotated[
        ImportanceSampling | None,
        Field(
            description="Correction of the mismatch between the "
            "engine's and the trainer's log-probabilities; default token_truncate."
        ),
    ] = None
    importance_sampling_clip: Annotated[
        float | None,
        Field(gt=1, le=100, description="Upper bound of the correction ratio; default 2.0."),
    ] = None
    max_grad_norm: Annotated[
        float | None,
        Field(
            gt=0,
            le=1000,
            description="Gradient norm above which gradients are scaled down; default 1.0.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Field(
            ge=0,
            le=2**31 - 1,
            description="Seed of data order, initial adapter and sampling; default 0.",
        ),
    ] = None
    save_every: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Steps between checkpoints; default 10. The last step is always saved.",
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        Field(
            ge=0,
            le=100_000,
            description="Steps between evaluations on the "
            "environment's eval split; 0 (default): only where eval_before or eval_after asks for one.",
        ),
    ] = None
    eval_before: Annotated[
        bool | None,
        Field(description="Evaluate the untrained model on the eval split first; default false."),
    ] = None
    eval_after: Annotated[
        bool | None,
        Field(description="Evaluate the trained model on the eval split last; default false."),
    ] = None
    eval_examples: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Rows of the eval split used, from the start; default 200.",
        ),
    ] = None
    init_from_adapter: Annotated[
        str | None,
        Field(
            description="Warm start: RUN_ID, RUN_ID@STEP or a folder with a plain PEFT "
            "LoRA of every linear layer and of the same base model, rank and alpha."
        ),
    ] = None
    environment_args: Annotated[
        dict[str, Any] | None,
        Field(description="Keyword arguments of the environment's load_environment."),
    ] = None
    secrets: Annotated[
        list[str] | None,
        Field(
            max_length=64,
            description="Names of environment variables of the "
            "server that the environment's process may see. Values are never stored.",
        ),
    ] = None
    env_timeout_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=3600,
            description="Deadline of one call into environment code, in seconds; default 30.",
        ),
    ] = None
    env_concurrency: Annotated[
        int | None,
        Field(ge=1, le=4096, description="Environment calls under way at once; default 32."),
    ] = None
    max_error_share: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            description="Share of a step's rollouts, and of the tasks looked at before the first step, that may fail "
            "in environment code before the run fails with the evidence; of gold answers at most 0.05; default 0.5.",
        ),
    ] = None
    max_attempts: Annotated[
        int | None,
        Field(
            ge=1,
            le=100,
            description="Attempts before a run whose worker died or stalled is given up; default 3.",
        ),
    ] = None
    stall_timeout_s: Annotated[
        float | None,
        Field(
            gt=0,
            le=86_400,
            description="Seconds without progress after which an attempt is restarted; default 900.",
        ),
    ] = None

    @model_validator(mode="after")
    def _fits_together(self) -> RunSpec:
        if self.algorithm == "grpo" and self.epochs is not None:
            raise ValueError("epochs is for algorithm='sft'; a grpo run is as long as its steps")
        if self.algorithm == "grpo" and self.dataset is not None:
            raise ValueError("dataset is for algorithm='sft'")
        if self.algorithm == "sft" and self.group_size is not None:
            raise ValueError("group_size is for algorithm='grpo'")
        if (
            self.max_tokens is not None
            and self.max_length is not None
            and self.max_tokens > self.max_length
        ):
            raise ValueError(
                f"max_tokens={self.max_tokens} does not fit in max_length={self.max_length}"
            )
        return self


COMMON_RECIPE: dict[str, Any] = {
    "lora_rank": 32,
    "lora_alpha": 64,
    "max_tokens": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "stop_sequences": [],
    "thinking": False,
    "kl_penalty_coef": 0.0,
    "loss_type": "dr_grpo",
    "importance_sampling": "token_truncate",
    "importance_sampling_clip": 2.0,
    "max_grad_norm": 1.0,
    "seed": 0,
    "save_every": 10,
    "eval_every": 0,
    "eval_before": False,
    "eval_after": False,
    "eval_examples": 200,
    "environment_args": {},
    "secrets": [],
    "env_timeout_s": 30.0,
    "env_concurrency": 32,
    "max_error_share": 0.5,
    "max_attempts": 3,
    "stall_timeout_s": 900.0,
}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {
        **COMMON_RECIPE,
        "steps": 150,
        "batch_size": 4,
        "group_size": 8,
        "learning_rate": 1e-5,
    },
    "sft": {**COMMON_RECIPE, "epochs": 2.0, "batch_size": 8, "learning_rate": 1e-4},
}


class ResolvedSpec(BaseModel):
    """What job.json holds: the spec with every value filled in, and `sources[field]` = where that
    value came from.

    `max_length`, `init_from_adapter` and `dataset` may still be None: the model's context decides
    the first, a cold start and gold answers are what the others mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: RunSpec
    sources: dict[str, Source]


class EvalSpec(BaseModel):
    """What job.json holds of an evaluation: a run of `algorithm` eval. The evaluate tool fills in
    every value.

    `checkpoint` (RUN@STEP) only says where the adapter came from; `step` is that step, 0 for a
    model that was not trained, and what the result is filed under. `tasks` are places within the
    split. `steps` is how many attempts there are in all: an evaluation's step is one attempt."""

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


class ResolvedEval(BaseModel):
    """An evaluation with every value filled in, and where each is from: "run" is the run whose
    checkpoint it is of.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: EvalSpec
    sources: dict[str, Source]


def resolve(spec: RunSpec, *, file_fields: frozenset[str] = frozenset()) -> ResolvedSpec:
    """Fill every unset field from the algorithm's recipe.

    `file_fields` names the fields that came from a TOML file; other set fields count as arguments.
    """
    recipe = RECIPES[spec.algorithm]
    given = spec.model_fields_set
    values: dict[str, Any] = spec.model_dump()
    sources: dict[str, Source] = {}
    for name, value in values.items():
        if name in given and value is not None:
            sources[name] = "file" if name in file_fields else "argument"
        elif name in recipe:
            values[name], sources[name] = recipe[name], "recipe"
        else:
            sources[name] = "default"
    if spec.max_length and sources["max_tokens"] == "recipe":
        values["max_tokens"] = min(values["max_tokens"], spec.max_length)
    return ResolvedSpec(spec=RunSpec.model_construct(**values), sources=sources)


ADAPTER_EXTRAS = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Of an adapter_config.json: with any of these an adapter computes something else than W +
alpha/rank BA.
"""
BASE_KEEPING = (True, False, "gaussian", "orthogonal", "eva")
"""Values of its init_lora_weights that leave the base model's weights as they are."""


def check_adapter(
    config: dict[str, Any], *, rank: int | None, alpha: int | None, wrong: Sequence[str] = ()
) -> None:
    """FlashError(adapter_mismatch) unless a run can start from an adapter with this
    adapter_config.json as it is.

    `wrong` says what else of it is known not to fit.
    """
    shape = {
        "rank": (config.get("r"), "lora_rank", rank),
        "alpha": (config.get("lora_alpha"), "lora_alpha", alpha),
    }
    wrong = [
        *wrong,
        *(
            f"{name} {its} (the run: {field}={our})"
            for name, (its, field, our) in shape.items()
            if its != our
        ),
    ]
    plain = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": BASE_KEEPING}
    extras = [name for name in ADAPTER_EXTRAS if config.get(name)]
    extras += [name for name, values in plain.items() if config.get(name, values[0]) not in values]
    if wrong or extras:
        raise FlashError(
            "adapter_mismatch",
            f"the adapter has {', '.join([*wrong, *(f'{name}={config[name]}' for name in extras)])}",
            fix="merge it into its base model and train that, or start from a plain LoRA adapter"
            if extras
            else f"use lora_rank={config.get('r')}, lora_alpha={config.get('lora_alpha')} and its base model",
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Fields of a run's TOML file. Tables only group fields for the reader: `[train] steps = 3` is
    `steps = 3`.

    Raises FlashError(invalid_argument) for a missing or malformed file, an unknown field or one
    given twice."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        fix = "name a TOML file on the server; env_setup writes one under configs/"
        raise FlashError(
            "invalid_argument", f"the config file cannot be read: {error}", path=path, fix=fix
        ) from error
    fields: dict[str, Any] = {}
    for name, value in document.items():
        is_table = isinstance(value, dict) and name not in RunSpec.model_fields
        table = cast("dict[str, Any]", value if is_table else {name: value})
        for field, inner in table.items():
            if field not in RunSpec.model_fields:
                near = difflib.get_close_matches(field, RunSpec.model_fields, n=1, cutoff=0.5)
                guess = f" (did you mean {near[0]!r}?)" if near else ""
                raise FlashError(
                    "invalid_argument",
                    f"the config file has an unknown field {field!r}{guess}",
                    path=path,
                    fix=f"use fields of: {', '.join(RunSpec.model_fields)}",
                )
            if field in fields:
                fix = "keep one of the two"
                raise FlashError(
                    "invalid_argument", f"the config file gives {field!r} twice", path=path, fix=fix
                )
            fields[field] = inner
    return fields


def validate(fields: dict[str, Any]) -> RunSpec:
    """A RunSpec of these fields; FlashError(invalid_argument) with one line per field otherwise."""
    try:
        return RunSpec(**fields)
    except ValidationError as error:
        raise FlashError(
            "invalid_argument", explain(error), fix="correct the fields named and call again"
        ) from error


def explain(error: ValidationError) -> str:
    """A validation error, one line per field: `field: what is wrong (got value)`."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "arguments"
        message = item["msg"].removeprefix("Value error, ")
        got = (
            "" if not item["loc"] or item["type"] == "missing" else f" (got {item['input']!r:.100})"
        )
        lines.append(f"{field}: {message}{got}")
    return "; ".join(lines) if len(lines) == 1 else "\n" + "\n".join(lines)
