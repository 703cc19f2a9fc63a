"""Evaluations in the control plane: what can be evaluated, how one is asked for, and what its attempts say.

An evaluation is a run of `algorithm` eval in the same queue as training. Its result is filed as training's own
evaluations are, so that whoever reads one reads the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flash_mcp import catalog, stats
from flash_mcp.errors import FlashError
from flash_mcp.runfolder import Json, RunFolder
from flash_mcp.serving import find_deployment
from flash_mcp.spec import COMMON_RECIPE, EvalSpec, ResolvedEval, Source
from flash_mcp.store import LIVE_DEPLOYMENT, EnvironmentRow, EvalRow, RunRow, Store

RUN = re.compile(r"(?P<run>run-[0-9a-z]+)(?:@(?P<step>\d+))?")
DEFAULT_MAX_LENGTH = 4096
TAKEN_FROM_RUN = (
    "max_tokens",
    "max_length",
    "top_p",
    "stop_sequences",
    "thinking",
    "environment_args",
    "secrets",
    "env_timeout_s",
    "env_concurrency",
)
"""What an evaluation of a run's checkpoint has in common with that run unless told otherwise."""


# -- what is evaluated ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: base model `model`, with the adapter of `run` at `step` on it where there is one."""

    model: str
    context: int | None = None
    step: int = 0
    run: RunRow | None = None
    adapter: Json | None = None
    deployment: str | None = None

    @property
    def checkpoint(self) -> str | None:
        return f"{self.run['id']}@{self.step}" if self.run else None

    @property
    def name(self) -> str:
        """For people: what was evaluated."""
        if self.run is None:
            return self.model
        served = f", which {self.deployment} serves" if self.deployment else ""
        start = ", before its training" if self.step == 0 else ""
        return f"{self.model} with {self.checkpoint}{served}{start}"


def find_subject(store: Store, reference: str) -> Subject:
    """A base model, RUN, RUN@STEP (0: as before training), or a deployment by id, or, while it is served, by name.

    Raises FlashError(unknown_model | unknown_run | unknown_checkpoint | unknown_deployment | invalid_argument).
    """
    if named := RUN.fullmatch(reference):
        return _checkpoint(store, named["run"], int(named["step"]) if named["step"] else None)
    if not catalog.is_named(reference):  # nobody's deployment stands in a model's place
        live = [row for row in store.deployments(LIVE_DEPLOYMENT) if reference in (row["id"], row["name"])]
        if live or reference.startswith("dep-"):
            row = find_deployment(store, reference)
            served = row["id"] if live else None
            return replace(_checkpoint(store, str(row["run_id"]), row["step"]), deployment=served)
    card = catalog.find(reference)
    return Subject(card.name, card.context)


def _checkpoint(store: Store, run_id: str, step: int | None) -> Subject:
    run = store.run(run_id)
    if run["algorithm"] == "eval":
        fix = f"name the model that it evaluated: {run['spec']['checkpoint'] or run['model']!r}"
        raise FlashError("invalid_argument", f"{run_id} is an evaluation and has no model of its own", fix=fix)
    card = catalog.find(run["model"])
    if step == 0:
        return Subject(card.name, card.context, 0, run, run["init_adapter"])
    found = store.checkpoint(run_id, step)
    folder = RunFolder(run["folder"])
    path = folder.fetch_checkpoint(found["step"], store.base / "adapters" / f"{run_id}-{found['step']}")
    adapter = {"path": str(path), "run_id": run_id, "step": found["step"], "digest": found["digest"]}
    return Subject(card.name, card.context, found["step"], run, adapter)


# -- how it is asked for ----------------------------------------------------------------------------------------------


def resolve_eval(
    subject: Subject, environment: EnvironmentRow, *, split: str, tasks: Sequence[int], attempts: int, given: Json
) -> ResolvedEval:
    """Every value of the evaluation: `given` ones, then those of the run whose checkpoint it is, then the recipe's.

    Without a temperature one attempt a task is greedy, and several are sampled at 1.
    """
    run = dict(subject.run["spec"]) if subject.run else {}
    if subject.run and subject.run["environment"] != environment["name"]:
        del run["environment_args"], run["secrets"]  # of another environment
    names = [name for name in EvalSpec.model_fields if name in COMMON_RECIPE or name in ("max_length", "temperature")]
    values: Json = {}
    sources: dict[str, Source] = {}
    for name in names:
        if given.get(name) is not None:
            values[name], sources[name] = given[name], "argument"
        elif name in TAKEN_FROM_RUN and name in run:
            values[name], sources[name] = run[name], "run"
        else:
            values[name], sources[name] = COMMON_RECIPE.get(name), "recipe"
    if given.get("temperature") is None:
        values["temperature"] = 0.0 if attempts == 1 else 1.0
    room: int | None = values["max_length"] or (subject.context and min(subject.context, DEFAULT_MAX_LENGTH))
    values["max_length"] = room
    if room and values["max_tokens"] > room:
        what = f"max_tokens={values['max_tokens']} does not fit in max_length={room}"
        raise FlashError("invalid_argument", what, fix="lower max_tokens, or raise max_length")
    if room and subject.context and room > subject.context:
        what = f"max_length={room} is more than the model's context of {subject.context}"
        raise FlashError("invalid_argument", what, fix=f"use max_length={subject.context} or less")
    if subject.adapter:
        values |= _shape(Path(subject.adapter["path"]))
    spec = EvalSpec(
        environment=environment["name"],
        model=subject.model,
        checkpoint=subject.checkpoint,
        step=subject.step,
        split=split,
        tasks=list(tasks),
        attempts=attempts,
        steps=len(tasks) * attempts,
        **values,
    )
    return ResolvedEval(spec=spec, sources=sources)


def _shape(adapter: Path) -> Json:
    try:
        config: Json = json.loads((adapter / "adapter_config.json").read_text())
        return {"lora_rank": int(config["r"]), "lora_alpha": int(config["lora_alpha"])}
    except (OSError, ValueError, KeyError) as error:
        fix = "use another step; checkpoints lists them"
        raise FlashError("unknown_checkpoint", f"no adapter is there: {error}", folder=adapter, fix=fix) from error


# -- what came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Try:
    """One attempt at a task, without its transcript. `error`: code of what failed in environment code, else None."""

    index: int
    task_id: str
    success: bool
    reward: float
    error: str | None
    truncated: bool
    tokens: int
    turns: int


def tries(store: Store, run_id: str, step: int) -> list[Try]:
    """Every attempt of a run's evaluation at `step`, in order."""
    fields = ("task_id", "error.code", "truncated", "completion_tokens", "turns")
    columns = ", ".join(f"json_extract(body, '$.{field}') AS '{field}'" for field in fields)
    sql = f"""SELECT position, success, reward, {columns} FROM rollouts
              WHERE run_id = ? AND split = 'eval' AND step = ? ORDER BY position"""
    return [
        Try(
            index=row["position"],
            task_id=str(row["task_id"] if row["task_id"] is not None else row["position"]),
            success=bool(row["success"]),
            reward=row["reward"],
            error=row["error.code"],
            truncated=bool(row["truncated"]),
            tokens=int(row["completion_tokens"] or 0),
            turns=int(row["turns"] or 0),
        )
        for row in store.query(sql, [run_id, step])
    ]


def transcript(store: Store, run_id: str, step: int, index: int) -> Json:
    """One attempt with its messages."""
    sql = "SELECT body FROM rollouts WHERE run_id = ? AND split = 'eval' AND step = ? AND position = ?"
    return store.query(sql, [run_id, step, index])[0]["body"]


def prompt_length(row: Json) -> int:
    """Messages before the model's first turn; examples within the prompt are assistant messages too."""
    messages: list[Json] = row["messages"]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turns = min(int(row["turns"]), len(answers))
    return answers[-turns] if turns else len(messages) - 1


def by_task(attempts: Sequence[Try]) -> dict[str, list[Try]]:
    """{task id: its attempts that the environment did not fail}, in order; tasks without any are left out."""
    found: dict[str, list[Try]] = {}
    for attempt in attempts:
        if attempt.error is None:
            found.setdefault(attempt.task_id, []).append(attempt)
    return found


def means(tasks: Mapping[str, Sequence[Try]], metric: str) -> dict[str, float]:
    """{task id: mean of success (as 0 and 1) or reward over its attempts}"""
    return {task: fmean(float(getattr(each, metric)) for each in attempts) for task, attempts in tasks.items()}


def pass_at(tasks: Mapping[str, Sequence[Try]]) -> dict[str, float]:
    """{"1": pass@1, "2": ..., up to the most attempts of a task}, each over the tasks with as many attempts."""
    most = max(map(len, tasks.values()), default=0)
    ks = [2**power for power in range(most.bit_length()) if 2**power <= most]
    found: dict[str, float] = {}
    for k in sorted({*ks, most}) if most > 1 else []:
        enough = [attempts for attempts in tasks.values() if len(attempts) >= k]
        chances = [stats.pass_at_k(len(each), sum(attempt.success for attempt in each), k) for each in enough]
        found[str(k)] = fmean(chances)
    return found


def uniform_share(tasks: Mapping[str, Sequence[Try]]) -> float | None:
    """Share of the tasks attempted more than once whose attempts all got the same reward; None where there are none."""
    groups = [{attempt.reward for attempt in attempts} for attempts in tasks.values() if len(attempts) > 1]
    return fmean(len(rewards) == 1 for rewards in groups) if groups else None


def evaluation_at(store: Store, run: RunRow, step: int | None) -> EvalRow:
    """The run's evaluation at `step`, or its newest. FlashError where it has none (yet) that can be judged."""
    rows = store.evals(run["id"])
    found = [row for row in rows if step is None or row["step"] == step]
    if found and found[-1]["summary"]["n"]:
        return found[-1]
    run_id = run["id"]
    if found:
        fix = f"rollouts(run_id={run_id!r}, split='eval', step={found[-1]['step']}) shows why; mend the environment"
        raise FlashError("environment_error", f"every attempt of {run_id} failed in environment code", fix=fix)
    if run["ended"] is None:
        fix = f"status(run_id={run_id!r}, wait_s=40) waits for it"
        raise FlashError(
            "not_ready", f"{run_id} has not come to that evaluation yet", run_id=run_id, step=step, fix=fix
        )
    if run["algorithm"] == "eval":
        fix = f"status(run_id={run_id!r}) says why; call evaluate again"
        raise FlashError("not_ready", f"the evaluation {run_id} {run['state']} without a result", fix=fix)
    made = f"it has those of the steps {', '.join(str(row['step']) for row in rows)}; " if rows else ""
    fix = f"{made}evaluate(model='{run_id}{'' if step is None else f'@{step}'}') makes one"
    raise FlashError("invalid_argument", f"{run_id} has no such evaluation", run_id=run_id, step=step, fix=fix)


def settings(run: RunRow) -> dict[str, Any]:
    """What decides an evaluation's outcome beside model and tasks. Those within a training run are greedy."""
    spec, is_eval = run["spec"], run["algorithm"] == "eval"
    temperature = spec["temperature"] if is_eval else 0.0
    return {
        "attempts": spec["attempts"] if is_eval else 1,
        "temperature": temperature,
        "top_p": spec["top_p"] if temperature else 1.0,  # no nucleus matters to greedy decoding
        "max_tokens": spec["max_tokens"],
        "max_length": spec["max_length"] or _default_length(run["model"]),
        "stop_sequences": spec["stop_sequences"],
        "thinking": spec["thinking"],
        "environment_args": spec["environment_args"],
    }


def _default_length(model: str) -> int:
    """What the worker takes where a training run leaves max_length open."""
    try:
        return min(catalog.find(model).context or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    except FlashError:  # the folder of a local model is gone
        return DEFAULT_MAX_LENGTH


def differing(base: RunRow, other: RunRow) -> list[str]:
    """Names of the settings that differ and change what is measured: attempts change only the noise."""
    ours, theirs = settings(base), settings(other)
    return [name for name in ours if name != "attempts" and ours[name] != theirs[name]]


def weights(run: RunRow, step: int) -> tuple[str, str | None, int | None]:
    """The model that an evaluation is of: base model, and run and step of the adapter on it."""
    if run["algorithm"] != "eval" and step:
        return run["model"], run["id"], step
    adapter = run["init_adapter"] or {}
    return run["model"], adapter.get("run_id"), adapter.get("step")
