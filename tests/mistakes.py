"""Mistakes that agents make, as rows: what they call, and what the answer has to name.

tests/tools/test_mistakes.py plays every row. A text in capitals, such as IMPROVED, stands for the id of that run;
FOLDER for the test's folder. `code` is the error's; without one the call is understood as it was meant, and `names`
are in its result. `names` are words of the answer: the wrong value, and what to write instead."""

from dataclasses import dataclass
from typing import Any

from tests.samples import ENVIRONMENT

Json = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    kind: str
    tool: str
    arguments: Json
    code: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.tool} {self.arguments}"[:90]


@dataclass(frozen=True)
class Request:
    """A request over HTTP of a client that does something odd, and the status that it gets."""

    about: str
    status: int
    names: tuple[str, ...]
    method: str = "POST"
    path: str = "/mcp"
    headers: Json | None = None
    body: Any = None


def of(kind: str, *rows: tuple[Any, ...]) -> list[Mistake]:
    return [Mistake(kind, tool, arguments, code, names) for tool, arguments, code, *names in rows]  # type: ignore


def code_of(body: str) -> Json:
    """Files of an environment whose episode is that of the sound one, but for `body` at the end."""
    return {"environment.py": f"{ENVIRONMENT}\n{body}\n"}


ECHO: Json = {"environment": "echo"}
CHECKED: Json = {**ECHO, "validate_only": True}
DISTILL: Json = {"algorithm": "distill"}
MIXED: Json = {**ECHO, "settings": {"mixture": {"other": 1}}}
KEPT: Json = {"runs": ["IMPROVED"], "name": "new"}

NAMES = of(
    "names",
    ("staus", {}, "invalid_argument", "'staus'", "'status'"),
    ("start_training", {}, "invalid_argument", "'start_training'", "'train'"),
    ("train", {**CHECKED, "lr": 1e-4}, "unknown_argument", "'lr'", "'learning_rate'"),
    ("train", {**CHECKED, "num_steps": 3}, "unknown_argument", "'num_steps'", "'steps'"),
    ("train", {**CHECKED, "max_new_tokens": 3}, "unknown_argument", "'max_new_tokens'", "'max_tokens'"),
    ("train", {**CHECKED, "settings": {"lr_sched": "cosine"}}, "unknown_argument", "'lr_sched'", "'lr_schedule'"),
    *(
        ("evaluate", {**ECHO, name: 10}, "unknown_argument", "did you mean 'limit'?")
        for name in ("n", "count", "max_tasks", "num_examples", "limits", "max")
    ),
    ("rollouts", {"run_id": "IMPROVED", "max_rows": 10}, "unknown_argument", "did you mean 'limit'?"),
    ("rollouts", {"run_id": "IMPROVED", "offset": 3}, "unknown_argument", "did you mean 'cursor'?"),
    ("status", {"id": "IMPROVED"}, "unknown_argument", "did you mean 'run_id'?"),
    ("rollouts", {"run": "IMPROVED"}, "unknown_argument", "'run'", "'run_id'"),
    ("deploy", {"run_id": "IMPROVED", "checkpoint": 20}, "unknown_argument", "'checkpoint'", "step"),
    ("env_push", {"name": "new", "path": "FOLDER"}, "unknown_argument", "'path'", "folder"),
    *(
        (tool, {other: "x"}, "unknown_argument", f"{other!r}; nothing was done; did you mean {name!r}?")
        for tool in ("train", "env_setup")
        for other, name in (("data", "dataset"), ("train_file", "dataset"), ("prompt", "question"), ("label", "answer"))
    ),
    *(
        (tool, {"dataset": "rows.csv"}, "unknown_argument", "env_setup(dataset=..., question=..., answer=...)")
        for tool in ("evaluate", "env_test", "env_push")
    ),
    ("evaluate", {**ECHO, "label_column": "y"}, "unknown_argument", "env_setup(dataset=..., question=..., answer=...)"),
    ("curate", {**KEPT, "data": "rows.csv"}, "unknown_argument", "runs=['rows.csv'] takes a file of rows"),
    ("curate", {**KEPT, "question": "q"}, "invalid_argument", "runs names no file of rows"),
    ("train", {**CHECKED, "dataset": "r.csv"}, "invalid_argument", "env_setup(dataset='r.csv') makes an environment"),
    ("train", {**CHECKED, "algorithm": "sft", "question": "q"}, "invalid_argument", "dataset, which is missing"),
    ("train", {**CHECKED, "algorithm": "sft", "dataset": "answers", "answer": "q"}, "invalid_argument", "has messages"),
    ("env_setup", {"server": "server.py"}, "invalid_argument", "template='mcp_server'"),
    ("train", {"environment": "ecko", "validate_only": True}, "unknown_environment", "'ecko'", "'echo'"),
    ("train", {"environment": "echo@ffffff"}, "unknown_environment", "ffffff", "echo"),
    ("train", {**ECHO, "step": 3}, "unknown_argument", "'step'; nothing was done; did you mean 'steps'?"),
    ("train", {"environment": "./echo"}, "unknown_environment", "./echo", "env_push"),
    ("env_test", {"environment": "ecko"}, "unknown_environment", "'ecko'", "'echo'"),
    ("train", {**CHECKED, "model": "smollm"}, "unknown_model", "'smollm'", "smollm2-135m-instruct"),
    ("train", {**CHECKED, "model": "gpt-4o"}, "unknown_model", "'gpt-4o'", "hub id"),
    ("train", {**CHECKED, "model": "FOLDER/nothing"}, "unknown_model", "FOLDER/nothing", "no such folder"),
    ("evaluate", {**ECHO, "model": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("status", {"run_id": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("checkpoints", {"run_id": "latest"}, "unknown_run", "'latest'", "status"),
    ("cancel", {"run_id": "dates sft"}, "unknown_run", "'dates sft'", "status"),
    ("rollouts", {"run_id": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("deploy", {"run_id": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("compare", {"base": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("deploy", {"run_id": "run-none0000@30"}, "unknown_run", "run_id='run-none0000', and step=30"),
    ("train", {"resume": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("train", {**CHECKED, "init_from_adapter": "run-none0000"}, "unknown_run", "run-none0000", "status"),
    ("train", {**CHECKED, "init_from_adapter": "run-none0000@x"}, "invalid_argument", "x"),
    ("train", {**CHECKED, **DISTILL, "teacher": "run-none0000"}, "unknown_run", "run-none0000"),
    ("train", {**CHECKED, **DISTILL, "teacher": "no-such-model"}, "unknown_model", "no-such-model"),
    ("evaluate", {**ECHO, "model": "dep-none0000"}, "unknown_deployment", "dep-none0000"),
    ("evaluate", {**ECHO, "model": "smollm"}, "unknown_model", "smollm"),
    ("evaluate", {"environment": "ecko"}, "unknown_environment", "'ecko'", "'echo'"),
    ("curate", {"runs": ["run-none0000"], "dry_run": True}, "unknown_run", "run-none0000", "status"),
    ("chat", {"deployment": "dep-none", "message": "hello"}, "unknown_deployment", "dep-none", "use one of: dep-"),
    ("undeploy", {"deployment": "dep-none"}, "unknown_deployment", "dep-none", "use one of: dep-"),
    ("tournament", {"tournament_id": "run-none0000"}, "unknown_tournament", "run-none0000"),
    ("tournament", {**ECHO, "arms": [{}, {"temprature": 1}]}, "invalid_argument", "arm 2: temprature"),
    ("train", {**ECHO, "settings": {"mixture": {"othr": 1}}}, "unknown_environment", "othr"),
    ("train", {**ECHO, "settings": {"mixture": {"other": {"rato": 1}}}}, "invalid_argument", "mixture.other.rato"),
    ("train", {**CHECKED, "algorithm": "sft", "dataset": "answer"}, "unknown_dataset", "answer", "answers"),
    ("train", {**CHECKED, "target": "lab"}, "unknown_target", "'lab'", "local"),
    ("env_setup", {"template": "sortwords"}, "invalid_argument", "'sortwords'", "sort_words"),
    ("train", {**CHECKED, "algorithm": "ppo"}, "invalid_argument", "'ppo'", "grpo"),
    ("train", {**CHECKED, "loss_type": "x"}, "invalid_argument", "'x'", "dr_grpo"),
    ("checkpoints", {"run_id": "IMPROVED", "export": "onnx"}, "invalid_argument", "'onnx'", "gguf-q8_0"),
    ("catalog", {"kind": "model"}, "invalid_argument", "'model'", "'models'"),
    ("status", {"state": "done"}, "invalid_argument", "'done'", "succeeded"),
    ("rollouts", {"run_id": "IMPROVED", "which": "top"}, "invalid_argument", "'top'", "'best'"),
    ("rollouts", {"run_id": "IMPROVED", "split": "test"}, "invalid_argument", "'test'", "'eval'"),
    ("compare", {"base": "IMPROVED", "metric": "accuracy"}, "invalid_argument", "'accuracy'", "'success'"),
    ("curate", {"runs": ["IMPROVED"], "filter": "mean > 0.5", "dry_run": True}, "invalid_argument", "mean", "avg"),
    ("curate", {"runs": ["IMPROVED"], "filter": "Pass@4 > 0", "dry_run": True}, "invalid_argument", "Pass@4", "pass@"),
    ("curate", {"runs": ["IMPROVED"], "select": "top", "dry_run": True}, "invalid_argument", "'top'", "'best'"),
    ("curate", {**KEPT, "select": "best-n"}, "invalid_argument", "max_per_task"),
    ("curate", {**KEPT, "name": "No Spaces"}, "invalid_argument", "no-spaces"),
    ("train", {**CHECKED, "report_to": ["wandbb"]}, "invalid_argument", "'wandbb'", "'wandb'"),
    ("env_push", {"name": "My Env!", "folder": "FOLDER/echo"}, "invalid_argument", "My Env!", "lowercase"),
)

TYPES = of(
    "types",
    ("train", {**CHECKED, "steps": "ten"}, "invalid_argument", "steps", "'ten'", "integer"),
    ("train", {**CHECKED, "steps": 3.5}, "invalid_argument", "steps", "3.5", "integer"),
    ("train", {**CHECKED, "steps": [3]}, "invalid_argument", "steps", "[3]", "integer"),
    ("train", {**CHECKED, "learning_rate": "fast"}, "invalid_argument", "learning_rate", "'fast'", "number"),
    ("train", {"environment": 3}, "invalid_argument", "environment", "3", "string"),
    ("train", {**CHECKED, "environment_args": "size=3"}, "invalid_argument", "environment_args", "size=3"),
    ("train", {**CHECKED, "settings": "steps=3"}, "invalid_argument", "settings", "steps=3"),
    ("train", {**CHECKED, "seeds": 5}, "invalid_argument", "seeds", "5", "list"),
    ("train", {**CHECKED, "stop_sequences": 3}, "invalid_argument", "stop_sequences", "3"),
    ("train", {**CHECKED, "eval_before": "maybe"}, "invalid_argument", "eval_before", "'maybe'"),
    ("deploy", {"run_id": "IMPROVED", "step": "newest"}, "invalid_argument", "step", "'newest'", "integer"),
    ("chat", {"messages": "hello"}, "invalid_argument", "messages", "'hello'"),
    ("chat", {"messages": [{"role": "human", "content": "hello"}]}, "invalid_argument", "'human'", "'user'"),
    ("chat", {"messages": [{"text": "hello"}]}, "invalid_argument", "role"),
    ("env_push", {"name": "new", "files": ["environment.py"]}, "invalid_argument", "files"),
    ("env_push", {"name": "new", "files": {"environment.py": 3}}, "invalid_argument", "files", "3"),
    ("rollouts", {"run_id": "IMPROVED", "success": "perhaps"}, "invalid_argument", "success", "'perhaps'"),
    ("tournament", {**ECHO, "arms": {"a": {}, "b": {}}}, "invalid_argument", "arms"),
    ("cancel", {}, "invalid_argument", "run_id"),
    ("curate", {"name": "new"}, "invalid_argument", "runs"),
    ("curate", {"runs": "IMPROVED", "dry_run": True}, "invalid_argument", "IMPROVED", "list"),
    ("train", {**CHECKED, "steps": "3"}, "", "validated"),
    ("train", {**CHECKED, "secrets": "[]"}, "", "validated"),
    ("status", {"run_id": "IMPROVED", "state": None}, "", "succeeded"),
)

RANGES = of(
    "ranges",
    ("train", {**CHECKED, "steps": 0}, "invalid_argument", "steps", "got 0", "1"),
    ("train", {**CHECKED, "steps": -1}, "invalid_argument", "steps", "-1"),
    ("train", {**CHECKED, "epochs": 0, "algorithm": "sft"}, "invalid_argument", "epochs", "0"),
    ("train", {**CHECKED, "epochs": 2}, "invalid_argument", "epochs", "steps"),
    ("train", {**CHECKED, "batch_size": 0}, "invalid_argument", "batch_size", "0"),
    ("train", {**CHECKED, "group_size": 1}, "invalid_argument", "group_size", "1"),
    ("train", {**CHECKED, "learning_rate": -1}, "invalid_argument", "learning_rate", "-1"),
    ("train", {**CHECKED, "lora_rank": 0}, "invalid_argument", "lora_rank", "0"),
    ("train", {**CHECKED, "max_tokens": 0}, "invalid_argument", "max_tokens", "0"),
    ("train", {**CHECKED, "max_length": 9000}, "invalid_argument", "9000", "8192"),
    ("train", {**CHECKED, "max_tokens": 600, "max_length": 512}, "invalid_argument", "600", "512"),
    ("train", {**CHECKED, "temperature": -1}, "invalid_argument", "temperature", "-1"),
    ("train", {**CHECKED, "temperature": 0}, "invalid_argument", "temperature", "0"),
    ("train", {**CHECKED, "top_p": 2}, "invalid_argument", "top_p", "2"),
    ("train", {**CHECKED, "gpus": 0}, "invalid_argument", "gpus", "0"),
    ("train", {**CHECKED, "gpus": 64, "batch_size": 64}, "device_unsupported", "64", "no GPU", "leave gpus out"),
    ("train", {**CHECKED, "max_staleness": 9}, "invalid_argument", "max_staleness", "9", "4"),
    ("train", {**CHECKED, "finish_by": "soon"}, "invalid_argument", "'soon'", "25 min"),
    ("train", {**CHECKED, "max_cost": 3}, "invalid_argument", "max_cost", "price", "max_hours"),
    ("train", {**CHECKED, "seeds": [1, 1]}, "invalid_argument", "seeds", "1"),
    ("train", {**CHECKED, "seeds": [1, 2], "seed": 3}, "invalid_argument", "seed"),
    ("evaluate", {**ECHO, "attempts": 0}, "invalid_argument", "attempts", "0"),
    ("evaluate", {**ECHO, "limit": 0}, "invalid_argument", "limit", "0"),
    ("evaluate", {**ECHO, "task_ids": ["no-such-task"]}, "invalid_argument", "no-such-task", "eval"),
    ("status", {"run_id": "IMPROVED", "wait_s": 600}, "invalid_argument", "wait_s", "600", "45"),
    ("status", {"limit": 500}, "invalid_argument", "limit", "500", "40"),
    ("status", {"cursor": "2"}, "invalid_argument", "cursor=2", "leave it out"),
    ("status", {"run_id": "RUNNING", "since": "x"}, "invalid_argument", "since=x", "leave it out"),
    ("rollouts", {"run_id": "IMPROVED", "cursor": "x"}, "invalid_argument", "cursor=x", "leave it out"),
    ("rollouts", {"run_id": "IMPROVED", "step": 99}, "", "20"),
    ("rollouts", {"run_id": "IMPROVED", "step": 20, "index": 999}, "", "index is 0 to 7"),
    ("curate", {"runs": ["IMPROVED"], "holdout": 2, "dry_run": True}, "invalid_argument", "holdout", "2"),
    ("curate", {"runs": ["IMPROVED"], "filter": "pass@0 > 0", "dry_run": True}, "invalid_argument", "pass@0"),
    ("tournament", {**ECHO, "arms": [{"name": "one"}]}, "invalid_argument", "arms", "2"),
    ("tournament", {**ECHO, "arms": [{}, {}]}, "invalid_argument", "arm-2", "another name"),
    ("tournament", {**ECHO, "arms": [{"name": "a"}, {"name": "b"}]}, "invalid_argument", "there twice"),
    ("tournament", {**ECHO, "arms": [{"name": "a"}, {"name": "a", "top_p": 0.5}]}, "invalid_argument", "there twice"),
    ("tournament", {**ECHO, "arms": [{}, {"temperature": 3}]}, "invalid_argument", "arm 2: temperature"),
    ("evaluate", {**ECHO, "max_length": 9000}, "invalid_argument", "9000", "8192"),
    ("evaluate", {**ECHO, "max_length": 100, "max_tokens": 200}, "invalid_argument", "100", "200"),
    ("curate", {"runs": [], "dry_run": True}, "invalid_argument", "runs"),
    ("curate", {**KEPT, "filter": "n > 99"}, "dataset_invalid", "loosen the filter"),
    ("curate", {**KEPT, "filter": "pass@99 > 0"}, "dataset_invalid", "insufficient"),
    ("curate", {**KEPT, "success_threshold": 9.0}, "dataset_invalid", "never_solved"),
    ("curate", {**KEPT, "since_step": 99}, "dataset_invalid", "no attempts"),
    ("train", {**ECHO, "settings": {"mixture": {"other": 0}}}, "invalid_argument", "mixture.other"),
    ("deploy", {"run_id": "IMPROVED", "port": 80}, "invalid_argument", "port", "80", "1024"),
    ("deploy", {"run_id": "IMPROVED", "step": 11}, "unknown_checkpoint", "11", "20"),
    ("catalog", {"contains": "x" * 200}, "invalid_argument", "contains", "100"),
)

ORDER = of(
    "order of tools",
    ("train", {}, "invalid_argument", "environment", "env_push"),
    ("train", {"environment": "refused"}, "gate_failed", "junk", "env_test"),
    ("train", {**ECHO, "sample": True}, "invalid_argument", "sample", "validate_only"),
    ("train", {**CHECKED, "algorithm": "sft", "sample": True}, "invalid_argument", "sample", "evaluate"),
    ("train", {**CHECKED, "price_per_hour": 2}, "invalid_argument", "price_per_hour", "sample"),
    ("train", {**CHECKED, "dataset": "answers"}, "invalid_argument", "dataset", "sft"),
    ("train", {**CHECKED, "algorithm": "distill"}, "invalid_argument", "teacher"),
    ("train", {**CHECKED, "teacher": "IMPROVED"}, "invalid_argument", "teacher", "distill"),
    ("train", {**CHECKED, "init_from_adapter": "QUEUED"}, "unknown_checkpoint", "QUEUED", "status"),
    ("train", {**CHECKED, "init_from_adapter": "IMPROVED", "lora_rank": 8}, "adapter_mismatch", "8", "lora_rank=32"),
    ("train", {**CHECKED, "init_from_adapter": "IMPROVED", "model": "qwen3-0.6b"}, "adapter_mismatch", "qwen3-0.6b"),
    ("train", {**CHECKED, "init_from_adapter": "IMPROVED", "lora_alpha": 8}, "adapter_mismatch", "alpha 64"),
    ("train", {**CHECKED, "init_from_adapter": "IMPROVED", "experts": True}, "adapter_mismatch", "no experts"),
    ("train", {**ECHO, **DISTILL, "teacher": "smollm2-135m-instruct"}, "invalid_argument", "the model itself"),
    ("train", {**ECHO, **DISTILL, "teacher": "IMPROVED", "model": "qwen3-0.6b"}, "adapter_mismatch", "smollm2-135m"),
    ("train", {**ECHO, "settings": {"mixture": {"echo": 1}}}, "invalid_argument", "echo twice"),
    ("train", {**MIXED, "task_sampling": "useful"}, "invalid_argument", "task_sampling"),
    ("train", {**MIXED, "algorithm": "sft"}, "invalid_argument", "mixture is for grpo"),
    ("train", {**MIXED, "gpus": 2}, "invalid_argument", "gpus=1"),
    ("train", {**MIXED, "target": "auto"}, "invalid_argument", "target='local'"),
    ("train", {**MIXED, "validate_only": True, "sample": True}, "invalid_argument", "one env"),
    ("train", {**CHECKED, "secrets": ["NOT_SET_HERE"]}, "invalid_argument", "NOT_SET_HERE"),
    ("train", {**ECHO, "steps": 9, "idempotency_key": "used"}, "idempotency_conflict", "used"),
    ("train", {"config": "FOLDER/none.toml"}, "invalid_argument", "none.toml", "env_setup"),
    ("train", {"config": "FOLDER/bad.toml"}, "invalid_argument", "bad.toml", "line 1"),
    ("train", {"resume": "RUNNING"}, "", "it is running already"),
    ("train", {"resume": "IMPROVED"}, "invalid_argument", "IMPROVED"),
    ("train", {"resume": "IMPROVED", "steps": 10}, "invalid_argument", "10"),
    ("train", {"resume": "IMPROVED", "steps": 40, "learning_rate": 1e-3}, "invalid_argument", "learning_rate"),
    ("train", {"resume": "IMPROVED", "steps": 40, "validate_only": True}, "invalid_argument", "validate_only"),
    ("train", {"resume": "RUNNING", "steps": 99}, "not_ready", "RUNNING"),
    ("train", {"resume": "CANCELLED", "learning_rate": 1e-3}, "invalid_argument", "learning_rate", "leave them out"),
    ("chat", {"message": "hello"}, "not_ready", "starting"),
    ("chat", {"deployment": "starting", "message": "hello"}, "not_ready", "starting"),
    ("chat", {"deployment": "starting"}, "invalid_argument", "message"),
    ("undeploy", {"deployment": "stopped"}, "", "stopped"),
    ("deploy", {"run_id": "QUEUED"}, "unknown_checkpoint", "QUEUED", "status"),
    ("deploy", {"run_id": "RUNNING"}, "unknown_checkpoint", "RUNNING", "status"),
    ("deploy", {"run_id": "EVALUATION"}, "unknown_checkpoint", "EVALUATION"),
    ("evaluate", {"model": "QUEUED"}, "unknown_checkpoint", "QUEUED", "status"),
    ("evaluate", {"model": "smollm2-135m-instruct"}, "invalid_argument", "environment"),
    ("compare", {"base": "QUEUED"}, "invalid_argument", "QUEUED"),
    ("compare", {"base": "smollm2-135m-instruct", "other": "IMPROVED"}, "invalid_argument", "smollm2-135m-instruct"),
    ("compare", {"base": "EVALUATION"}, "invalid_argument", "other", "no before and after"),
    ("compare", {"base": "EVALUATION", "other": "EVALUATION"}, "invalid_argument", "same evaluation"),
    ("evaluate", {"model": "EVALUATION"}, "invalid_argument", "is an evaluation"),
    ("evaluate", {"model": "IMPROVED@7"}, "unknown_checkpoint", "7", "20"),
    ("compare", {"base": "EVALUATION", "other": "ELSEWHERE"}, "invalid_argument", "different environments"),
    ("curate", {"runs": ["QUEUED"], "dry_run": True}, "", "QUEUED"),
    ("curate", {"runs": ["IMPROVED"]}, "invalid_argument", "name", "dry_run"),
    ("curate", {"runs": ["EVALUATION"], "dry_run": True}, "", "split='train'"),
    ("curate", {"runs": ["IMPROVED", "ELSEWHERE"], "dry_run": True}, "invalid_argument", "other"),
    ("checkpoints", {"run_id": "QUEUED", "export": "merged"}, "unknown_checkpoint", "QUEUED"),
    ("checkpoints", {"run_id": "IMPROVED", "push_to": "me/model"}, "invalid_argument", "push_to", "export"),
    ("tournament", {"environment": "echo"}, "invalid_argument", "arms"),
    ("tournament", {}, "invalid_argument", "tournament_id"),
    *(
        ("tournament", {**ECHO, "arms": arms, "settings": {"steps": 2, **settings}}, "invalid_argument", says)
        for arms, settings, says in (
            ([{}, {}], {"steps": 1}, "too few"),
            ([{"name": "a"}, {"name": "a"}], {}, "two arms are called 'a'"),
            ([{}, {"lr_schedule": "linear"}], {}, "arm-2: arms that learn cannot have lr_schedule"),
            ([{}, {"batch_size": None, "warmup": 0.1}], {}, "arm-2: arms that learn cannot have lr_schedule"),
            ([{"eval_after": True}, {}], {}, "the rounds evaluate"),
            ([{"system_prompt": "a"}, {}], {}, "arm-1: system_prompt"),
            ([{"seed": 1}, {"seed": 2}], {}, "arms that learn cannot choose seed. Fix: environment, seed"),
            ([{"steps": 3}, {}], {"target": "far", "regression": "on"}, "choose regression, steps, target."),
        )
    ),
    ("tournament", {**ECHO, "arms": [{}, {}], "settings": {"steps": 2}, "split": "train"}, "invalid_argument", "split"),
    ("rollouts", {"run_id": "SFT"}, "", "has none"),
    ("status", {"until": "end"}, "invalid_argument", "run_id"),
)

DEAD = of(
    "dead runs",
    ("deploy", {"run_id": "FAILED"}, "unknown_checkpoint", "FAILED", "train("),
    ("deploy", {"run_id": "UNSTARTED"}, "unknown_checkpoint", "UNSTARTED", "train("),
    ("evaluate", {"model": "FAILED"}, "unknown_checkpoint", "FAILED", "train("),
    ("evaluate", {"model": "CANCELLED@99"}, "unknown_checkpoint", "99", "6"),
    ("compare", {"base": "FAILED"}, "invalid_argument", "FAILED"),
    ("compare", {"base": "UNSTARTED", "other": "UNSTARTED"}, "invalid_argument", "UNSTARTED", "train(resume="),
    ("checkpoints", {"run_id": "FAILED"}, "", "it ended before it saved one", "train("),
    ("checkpoints", {"run_id": "FAILED", "export": "merged"}, "unknown_checkpoint", "FAILED"),
    ("train", {"resume": "REMOVED"}, "unknown_checkpoint", "REMOVED"),
    ("train", {"resume": "REMOVED", "steps": 40}, "unknown_checkpoint", "REMOVED"),
    ("rollouts", {"run_id": "REMOVED"}, "", "split='eval'"),
    ("deploy", {"run_id": "REMOVED"}, "unknown_checkpoint", "REMOVED"),
    ("rollouts", {"run_id": "UNSTARTED"}, "", "has none"),
    ("cancel", {"run_id": "IMPROVED"}, "run_finished", "succeeded"),
    ("cancel", {"run_id": "UNSTARTED"}, "", "cancelled"),
    ("status", {"run_id": "FAILED", "until": "end"}, "", "train("),
    ("curate", {"runs": ["UNSTARTED"], "dry_run": True}, "", "UNSTARTED"),
    ("train", {**CHECKED, "init_from_adapter": "FAILED"}, "unknown_checkpoint", "FAILED"),
)

PUSHED: list[tuple[Any, ...]] = [
    ({}, "upload_invalid", "environment.py"),
    ({"main.py": ""}, "upload_invalid", "main.py", "environment.py"),
    ({"../x.py": "", "environment.py": ""}, "upload_invalid", "../x.py"),
    ({"/etc/x": "", "environment.py": ""}, "upload_invalid", "/etc/x"),
    ({"environment.py": "def load_environment(:"}, "environment_invalid", "line 1"),
    ({"environment.py": "import nothing_here"}, "environment_invalid", "nothing_here"),
    ({"environment.py": "x = 1"}, "environment_invalid", "load_environment"),
    (code_of("def load_environment(): return 3"), "environment_invalid", "int"),
    (code_of("def load_environment(): raise OSError('no rows')"), "environment_invalid", "no rows"),
    (code_of("raise SystemExit(3)"), "environment_invalid", "3"),
    (code_of("import os; os._exit(3)"), "environment_invalid", "code 3"),
    (code_of("open('/etc/shadow').read()"), "environment_access", "/etc/shadow"),
    (code_of("x = bytearray(1 << 44)"), "environment_memory"),
    ({**code_of(""), "environment.toml": "network = maybe"}, "environment_invalid", "environment.toml"),
]
"""Files that are pushed, and as of the other rows."""

BROKEN = of(
    "broken environments",
    *(("env_push", {"name": "new", "files": files}, *answer) for files, *answer in PUSHED),
    ("env_push", {"name": "new"}, "invalid_argument", "either folder or files"),
    ("env_push", {"name": "new", "folder": "/tmp", "files": {}}, "invalid_argument", "either folder or files"),
    ("env_push", {"name": "new", "files": {}, "secrets": ["NO_SUCH_KEY"]}, "invalid_argument", "have: NO_SUCH_KEY"),
    ("train", {**ECHO, "environment_args": {"fail": True}}, "environment_invalid", "asked to fail"),
    ("train", {**ECHO, "environment_args": {"nope": 1}}, "environment_invalid", "nope"),
    ("evaluate", {**ECHO, "environment_args": {"fail": True}}, "environment_invalid", "asked to fail"),
    ("env_push", {"name": "new", "folder": "FOLDER"}, "upload_invalid", "environment.py"),
    ("env_push", {"name": "new", "folder": "FOLDER/nothing"}, "upload_invalid", "FOLDER/nothing"),
    ("env_push", {"name": "new", "folder": "FOLDER/echo", "environment_args": {"n": 3}}, "environment_invalid", "'n'"),
    ("env_test", {}, "invalid_argument", "environment", "folder"),
    ("env_test", {"folder": "FOLDER/nothing"}, "invalid_argument", "FOLDER/nothing"),
    ("env_test", {"environment": "echo", "folder": "FOLDER/echo"}, "invalid_argument", "environment", "folder"),
    ("env_test", {"folder": "FOLDER/echo", "accept": ["jnk"]}, "invalid_argument", "'jnk'", "'junk'"),
    ("env_test", {"folder": "FOLDER/echo", "answers": ["x"], "task_id": "none"}, "invalid_argument", "none"),
    ("env_setup", {"folder": "FOLDER/echo"}, "invalid_argument", "environment.py"),
    ("env_setup", {"dataset": "FOLDER/rows.csv"}, "invalid_argument", "folder"),
    ("env_setup", {"folder": "FOLDER/new", "dataset": "FOLDER/none.csv"}, "invalid_argument", "none.csv"),
    ("env_setup", {"folder": "FOLDER/new", "dataset": "FOLDER/rows.csv", "question": "q"}, "invalid_argument", "'q'"),
    *(
        ("env_setup", {"folder": "FOLDER/new", **given}, "invalid_argument", f"does not go with {what}", fix)
        for given, what, fix in (
            (
                {"template": "agent", "dataset": "rows.csv"},
                "dataset='rows.csv'",
                "leave out dataset or template='agent'",
            ),
            ({"template": "agent", "question": "q"}, "question='q'", "leave out question or template='agent'"),
            ({"template": "mcp_server", "answer": "a"}, "answer='a'", "leave out answer or template='mcp_server'"),
            ({"template": "agent", "scorer": "judge"}, "scorer='judge'", "leave out scorer or template='agent'"),
            ({"environment": "plain", "template": "dataset"}, "template='dataset'", "out template or environment"),
            ({"environment": "plain", "dataset": "rows.csv"}, "dataset='rows.csv'", "leave out dataset or environment"),
        )
    ),
)

MISTAKES = [*NAMES, *TYPES, *RANGES, *ORDER, *DEAD, *BROKEN]


@dataclass(frozen=True)
class Lost:
    """A call whose client leaves before the answer, and then calls again. `table` has one row of `made`
    more after both."""

    tool: str
    arguments: Json
    table: str = "runs"
    made: int = 0


LOST = [
    Lost("train", {**ECHO, "steps": 7, "idempotency_key": "lost"}, made=1),
    Lost("train", {**CHECKED}),
    Lost("train", {**ECHO, "seeds": [1, 2], "idempotency_key": "seeds"}, made=2),
    Lost("evaluate", {**ECHO, "limit": 9, "wait_s": 0}, made=1),
    Lost("evaluate", {**ECHO, "limit": 8, "wait_s": 30}, made=1),
    Lost("env_push", {"name": "new", "files": code_of("")}, "environments", 1),
    Lost("env_test", {**ECHO}),
    Lost("curate", {"runs": ["IMPROVED"], "name": "new", "filter": "best >= 0.5"}),
    Lost("deploy", {"run_id": "IMPROVED", "step": 10, "wait_s": 0}, "deployments", 1),
    Lost("status", {"run_id": "QUEUED", "until": "end", "wait_s": 30}),
    Lost("cancel", {"run_id": "QUEUED"}),
]

CALL: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "status", "arguments": {}}}
BOTH = "application/json, text/event-stream"
ODD = [
    Request("no token", 401, ("unauthenticated", "Bearer"), headers={"authorization": ""}, body=CALL),
    Request("a wrong token", 401, ("unauthenticated",), headers={"authorization": "Bearer flash_x"}, body=CALL),
    Request("the wrong scheme", 401, ("unauthenticated",), headers={"authorization": "Basic eA=="}, body=CALL),
    Request("another host", 421, ("host_refused", "evil.example"), headers={"host": "evil.example"}, body=CALL),
    Request("another origin", 403, ("origin_refused", "evil"), headers={"origin": "http://evil"}, body=CALL),
    Request("no JSON", 400, ("Parse error",), body=b"{"),
    Request("plain text", 400, ("Content-Type",), headers={"content-type": "text/plain"}, body=b"status"),
    Request("an empty list", 400, ("batches",), body=[]),
    Request("accepts pictures", 406, ("application/json",), headers={"accept": "image/png"}, body=CALL),
    Request("an ended session", 404, ("Session",), headers={"mcp-session-id": "0" * 32}, body=CALL),
    Request("a call before initialize", 400, ("session",), body=CALL),
    Request("another version", 400, ("protocolVersion",), headers={"mcp-protocol-version": "1999-01-01"}, body=CALL),
    Request("another path", 404, ("/mcp",), path="/", body=CALL),
    Request("the old SSE path", 404, ("/mcp",), method="GET", path="/sse"),
    Request("another verb", 405, ("Method Not Allowed",), method="PUT", body=CALL),
    Request("much too much", 413, ("too_large",), body=b"x" * (6 << 20)),
]
