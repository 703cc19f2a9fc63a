"""The calls whose results tests/golden/results/ keeps, on a store with runs of every kind; see tests/freeze.py.

Calls name runs, evaluations and deployments as the golden files do: `run-improved` stands for an id that is another
each time."""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcp import Client

from flash_mcp import __version__
from flash_mcp.judgement import health
from flash_mcp.protocol.errors import FlashError
from flash_mcp.server.mcp_server import server
from flash_mcp.state.store import open_store
from tests.outlines import pretty
from tests.samples import (
    ENVIRONMENT,
    end,
    finished_run,
    learn,
    push_echo,
    queued_run,
    read_in,
    sample_rollout,
    save_adapter,
    start,
    started_run,
)

MADE_ID = re.compile(r"\b(run|dep)-[0-9a-z]{8}\b")
REPLACEMENTS: dict[str, tuple[str, str]] = {
    "the package's version, and the commit of a checkout": (rf"{re.escape(__version__)}(\+g[\w.]+)?", "<version>"),
    "how a cursor of status begins, which is how the run's id ends": (r"(since(?:=\\?'|\": \")).{2}", r"\1<id>"),
    "a time to the second": (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<second>"),
    "a time to the minute": (r"\d{4}-\d\d-\d\d \d\d:\d\d", "<minute>"),
    "how long something took, as JSON": (r'"(elapsed_s|seconds)": [\d.]+', r'"\1": "<seconds>"'),
    "how long something took, as text": (r"\b(elapsed_s: |seconds: |seconds=)[\d.]+", r"\1<seconds>"),
    "how long a run took, in a terminal": (r", in \d+ s, ", ", in <seconds> s, "),
    "how long ago a run was made": (r"  (now|\d+ min) *(?= (grpo|sft|eval) )", "  <age>"),
    "how long a run took, on its page": (r"<b>\d+ s</b> time", "<b><seconds> s</b> time"),
    "how long an environment took to load": (r"\bin [\d.]+ s: ", "in <seconds> s: "),
    "how long a call into an environment took": (r"\b[\d.]+ ms\b", "<milliseconds> ms"),
    "where the command is": (r"`/[^`]*/flash-mcp ", "`flash-mcp "),
    "what is free on the disk": (r"[\d.]+ [MG]B free", "<size> free"),
    "what a traceback points at, which each Python shows otherwise": (r', "\| +[~^]+"', ""),
    "how busy the machine is": (r"; the machine is busy [^\";]* times as long", ""),
    "where an environment lies before it is published": (r"\.staged-\w+", "<staged>"),
}


class Names:
    """Names of the golden files for what is called otherwise each time."""

    def __init__(self, folder: Path) -> None:
        self.actual: dict[str, str] = {"FOLDER": str(folder)}
        self.numbers = itertools.count(1)

    def give(self, name: str, actual: str) -> None:
        self.actual[name] = actual

    def as_called(self, value: Any) -> Any:
        """An argument with the names of the golden files in it, as the tool has to be given it."""
        text = json.dumps(value)
        for name, actual in self.actual.items():
            text = text.replace(name, actual)
        return json.loads(text)

    def as_frozen(self, text: str) -> str:
        """What a tool said, with the names of the golden files in it."""
        for name, actual in self.actual.items():
            text = text.replace(actual, name)
        for pattern, replacement in REPLACEMENTS.values():
            text = re.sub(pattern, replacement, text)
        unnamed = [found[0] for found in MADE_ID.finditer(text) if found[0] not in self.actual]
        assert not unnamed, f"give these a name first: {unnamed}"
        return text


class Calls:
    """Calls of tools, and what each gave: `results` has {name: text of the golden file}. Of a result that is much like
    an earlier one of its tool, the text has what differs, and what it lacks as `without`."""

    def __init__(self, client: Client, names: Names) -> None:
        self.client, self.names = client, names
        self.results: dict[str, str] = {}
        self.bodies: dict[str, dict[str, Any]] = {}

    async def __call__(
        self, name: str, tool: str, /, *, gives: Mapping[str, str] | None = None, **arguments: Any
    ) -> Any:
        """Call the tool and keep its result; `gives` are {field of the result: name for the id in it}."""
        result = await self.client.call_tool(tool, self.names.as_called(arguments))
        text = result.content[0].text
        kept: dict[str, Any] = {"tool": tool, "arguments": arguments}
        if result.is_error:
            kept["error"] = text.splitlines()
        else:
            body = result.structured_content
            # Both say the same, in the same order.
            assert json.dumps(body) == json.dumps(json.loads(text))
            for field, given in (gives or {}).items():
                self.names.give(given, body[field])
            body.pop("sandbox", None)  # what this machine's kernel cannot protect
            if "devices" in body:
                body["devices"] = "<those of this machine>"
            kept["result"] = body
        if pictures := [each.mime_type for each in result.content[1:]]:
            kept["pictures"] = pictures
        self.results[name] = self._text(name, kept)

    async def read(self, name: str, uri: str) -> None:
        """Read a resource and keep its lines."""
        contents = (await self.client.read_resource(self.names.as_called(uri))).contents[0]
        self.results[name] = self._text(name, {"uri": uri, "lines": contents.text.splitlines()})

    def _text(self, name: str, kept: dict[str, Any]) -> str:
        """Lines are filled when the names are in: they are as long each time."""
        kept = json.loads(self.names.as_frozen(json.dumps(kept, ensure_ascii=False)))
        text = pretty(kept)
        for earlier, body in self.bodies.items():
            if "result" in kept and body["tool"] == kept["tool"]:
                shorter = {**kept, "result": {"otherwise_as": earlier, **difference(body["result"], kept["result"])}}
                text = min(text, pretty(shorter), key=lambda each: each.count("\n"))
        if "result" in kept:
            self.bodies[name] = kept
        return text


def difference(earlier: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in body.items():
        before = earlier.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and before != value:
            kept[key] = difference(before, value)
        elif key not in earlier or before != value:
            kept[key] = value
    absent = sorted({*earlier} - {*body})
    return kept | ({"without": absent} if absent else {})


Metric = float | Callable[[int], float]
TROUBLES: dict[str, dict[str, Metric]] = {
    "environment_errors": {"rollouts/error_share": 0.3},
    "refused_requests": {"rollouts/refused_share": 0.4, "refused/unknown_parameter: min_tokens": 5},
    "untrained_answers": {"schema/answers": 8, "schema/untrained": 2},
    "no_gradient": {"grad_norm": 0.0},
    "uniform_groups": {"groups/uniform_share": 0.7},
    "uniform_zero": {"groups/uniform_share": 0.97, "groups/zero_share": 0.9},
    "too_hard": {"groups/unsolved_share": 0.85},
    "too_easy": {"groups/solved_share": 0.85},
    "truncation": {"rollouts/truncated_share": 0.6},
    "reward_flat": {"reward/mean": lambda step: 0.3 + 0.01 * (step % 2)},
    "reward_falling": {"reward/mean": lambda step: 0.8 - 0.02 * step},
    "reward_without_success": {"success/rate": lambda step: 0.2 + 0.01 * (step % 2)},
    "length_collapse": {"tokens/completion_mean": lambda step: 100 / step},
    "reward_follows_length": {"tokens/reward_correlation": 0.8},
    "repeated_outputs": {"rollouts/repeated_share": 0.8, "success/rate": 0.3},
    "answer_collapse": {"answers/common_share": 0.97, "answers/common_success": 0.6},
    "entropy_collapse": {"entropy": lambda step: 1 / step**2},
    "policy_mismatch": {"is_ratio/mean": 1.4},
    "policy_spike": {"kl": lambda step: 3.0 if step == 17 else 0.02},
    "stale_policy": {"is_ratio/clipped_share": 0.3, "is_ratio/effective_share": 0.9},
    "destroyed_model": {"loss": lambda step: 0.1 if step == 1 else 9.0, "frequencies/loss": 2.5},
    "ignored_prompts": {"prompt_effect": 0.01, "prompt_effect/before": 0.8},
    "overfitting": {"eval_loss": lambda step: 1 + step / 10},
}
"""Metrics of runs of 20 steps with one warning sign each, and others where these go together."""


def flags() -> dict[str, list[str]]:
    """{warning sign: whether to go on, and of each flag how grave it is and what to do}. What it says of the numbers
    is in tests/judgement."""
    told: dict[str, list[str]] = {}
    healthy: dict[str, Metric] = {"groups/uniform_share": 0.1, "grad_norm": 0.5, "entropy": 1.0}
    healthy |= dict.fromkeys(("reward/mean", "success/rate"), lambda step: 0.1 + 0.03 * step)
    for trouble, metrics in TROUBLES.items():
        columns = {**healthy, "tokens/completion_mean": 20.0, **metrics}
        rows: list[dict[str, float | None]] = [
            {"step": step, **{name: each(step) if callable(each) else each for name, each in columns.items()}}
            for step in range(1, 21)
        ]
        found = health.flags(rows)
        told[trouble] = [health.outlook(rows, found).partition(":")[0]]
        for flag in found:
            told[trouble] += [*{flag.name} - {trouble}, flag.severity, flag.remedy]
    return told


def write_files(folder: Path) -> None:
    """A sound and a broken environment, a config file, and a model that lies ready."""
    files = {
        "echo/environment.py": ENVIRONMENT.replace("response_text.strip()", "str(response_text).strip()"),
        "broken/environment.py": ENVIRONMENT.replace('"role": "user"', '"role": "nobody"'),
        "rl.toml": 'environment = "echo"\n[train]\nsteps = 5\nseed = 3\n',
        "models/smollm2-135m-instruct/config.json": "{}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def fill_store(folder: Path, names: Names) -> None:
    """Runs that ended in every way, and one that is running. Queued ones come later: the oldest would start first."""
    names.give("run-improved", finished_run(folder / "improved").id)
    names.give("run-no-better", finished_run(folder / "no-better", solved=25).id)
    names.give("run-failed", failed_run(folder).id)
    names.give("run-cancelled", cancelled_run(folder).id)
    names.give("run-sft", sft_run(folder).id)
    running, writer = started_run(folder / "environment", steps=30, group_size=4)
    learn(writer, range(1, 6), of=30)
    writer.event("warning", "2 of 8 rollouts of step 3 failed in environment code")
    read_in(open_store(), running.id)
    names.give("run-running", running.id)


def failed_run(folder: Path) -> Any:
    run, writer = started_run(folder / "environment")
    Path(run.folder, "log.1").write_text("loading the model\nKeyError: 'answer'\n")
    learn(writer, range(1, 4))
    failure = FlashError("environment_error", "70 % of the rollouts failed", fix="correct the scorer")
    return end(writer, run.id, 3, "failed", failure)


def cancelled_run(folder: Path) -> Any:
    run, writer = started_run(folder / "environment", lora_rank=8, lora_alpha=16, max_tokens=64)
    learn(writer, range(1, 7))
    save_adapter(writer, 6, folder / "cancelled", rank=8, alpha=16)
    return end(writer, run.id, 6, "cancelled")


def sft_run(folder: Path) -> Any:
    run, writer = started_run(folder / "environment", algorithm="sft")
    for step in range(1, 21):
        losses = {"loss": 2 / (step + 1), "grad_norm": 0.5, "learning_rate": 1e-4, "time/step_s": 1.5}
        held_out = {"eval_loss": 0.1 + 2 / (step + 1)} if step % 5 == 0 else {}
        writer.metrics(step, losses | held_out)
    save_adapter(writer, 20, folder / "sft")
    return end(writer, run.id, 20)


def play_evaluation(run_id: str, solved: int, tasks: int = 60) -> None:
    """Be the worker of an evaluation: the first `solved` tasks succeed, the last one fails in environment code."""
    writer, step = start(run_id), open_store().run(run_id).spec.step
    rows = [
        {**sample_rollout(step, index, float(index < solved)), "task_id": f"eval-{index}"} for index in range(tasks)
    ]
    rows[-1]["error"] = {"code": "environment_error", "what": "KeyError: 'answer'"}
    rows[-2]["truncated"] = True
    summary = {"n": tasks - 1, "success": solved / (tasks - 1), "reward_mean": 0.5, "error_share": 1 / tasks}
    writer.evaluation(step, {**summary, "tokens_per_s": 400.0}, rows)
    end(writer, run_id, tasks)


async def results(folder: Path, names: Names) -> dict[str, str]:
    """{name: text of its golden file} of every call. The caller is the supervisor: nothing starts."""
    async with Client(server) as client:
        call = Calls(client, names)
        write_files(folder)
        await before_anything(call)
        fill_store(folder, names)
        await environments(call)
        await evaluations(call)
        await look_at_runs(call)
        await transcripts(call)
        await curated(call)
        await training(call, folder)
        await serving(call)
        await lists(call, folder)
    return call.results


async def before_anything(call: Calls) -> None:
    await call("status-empty", "status")
    await call("catalog-empty", "catalog", kind="environments")
    await call("chat-nothing-deployed", "chat", message="hello")


async def environments(call: Calls) -> None:
    await call("env_setup", "env_setup", folder="FOLDER/starter", template="sort_words")
    await call("env_setup-again", "env_setup", folder="FOLDER/starter")
    # The more seconds, the less the load of the machine decides how many tasks are played.
    await call("env_test", "env_test", folder="FOLDER/echo", time_s=600)
    await call("env_test-broken", "env_test", folder="FOLDER/broken")
    await call("env_push", "env_push", name="pushed", folder="FOLDER/echo")
    await call("env_push-again", "env_push", name="pushed", folder="FOLDER/echo")
    await call("env_push-fails", "env_push", name="pushed", folder="FOLDER/echo", environment_args={"fail": True})


async def evaluations(call: Calls) -> None:
    asked = {"environment": "echo", "idempotency_key": "base", "wait_s": 0}
    await call("evaluate-queued", "evaluate", gives={"run_id": "run-eval-base"}, **asked)
    play_evaluation(call.names.actual["run-eval-base"], 20)
    await call("evaluate", "evaluate", **asked)
    asked = {"model": "run-improved@20", "limit": 60, "wait_s": 0}
    await call("evaluate-checkpoint", "evaluate", gives={"run_id": "run-eval-trained"}, **asked)
    play_evaluation(call.names.actual["run-eval-trained"], 45)
    asked = {"model": "run-improved@20", "max_tokens": 64, "attempts": 1, "wait_s": 0}
    await call("evaluate-other-settings", "evaluate", gives={"run_id": "run-eval-short"}, **asked)
    play_evaluation(call.names.actual["run-eval-short"], 30)
    await call("status-evaluation", "status", run_id="run-eval-trained")
    await call("compare", "compare", base="run-eval-base", other="run-eval-trained")
    await call("compare-confounded", "compare", base="run-eval-base", other="run-eval-short", flips=0)
    await call("compare-before-and-after", "compare", base="run-improved", flips=1)
    await call("compare-underpowered", "compare", base="run-no-better", metric="reward", flips=0)


async def look_at_runs(call: Calls) -> None:
    await call("status-improved", "status", run_id="run-improved")
    await call("status-improved-detailed", "status", run_id="run-improved", detail="detailed")
    await call("status-no-better", "status", run_id="run-no-better", curve=True)
    await call("status-failed", "status", run_id="run-failed", detail="detailed")
    await call("status-cancelled", "status", run_id="run-cancelled")
    await call("status-running", "status", run_id="run-running")
    await call("status-until-news", "status", run_id="run-running", until="news", wait_s=0)
    await call("status-until-end", "status", run_id="run-no-better", until="end")
    await call("status-wait-for-ended", "status", run_id="run-sft", wait_s=30)
    await call("status-sft-detailed", "status", run_id="run-sft", detail="detailed")
    await call("checkpoints", "checkpoints", run_id="run-improved")
    await call("checkpoints-of-other-shape", "checkpoints", run_id="run-cancelled")
    await call("checkpoints-none", "checkpoints", run_id="run-running")
    await call.read("resource-metrics", "flash://runs/run-failed/metrics")
    await call.read("resource-rollouts", "flash://runs/run-failed/rollouts/3")
    await call.read("resource-log", "flash://runs/run-failed/log")


async def transcripts(call: Calls) -> None:
    await call("rollouts-worst", "rollouts", run_id="run-improved")
    await call("rollouts-one", "rollouts", run_id="run-improved", step=7, index=5)
    await call("rollouts-one-message", "rollouts", run_id="run-improved", step=7, index=5, from_message=2)
    await call("rollouts-failures", "rollouts", run_id="run-improved", split="eval", success=False, limit=1)
    await call("rollouts-evaluation", "rollouts", run_id="run-eval-trained", max_characters=500)
    await call("rollouts-no-such-step", "rollouts", run_id="run-improved", step=99)
    await call("rollouts-none", "rollouts", run_id="run-sft")


async def curated(call: Calls) -> None:
    runs = ["run-improved", "run-running"]
    asked = {"runs": runs, "filter": "best >= 0.5", "select": "shortest"}
    await call("curate", "curate", name="answers", holdout=0.5, **asked)
    await call("curate-bad-filter", "curate", runs=runs, filter="avg >", dry_run=True)


async def training(call: Calls, folder: Path) -> None:
    await call("train-validated", "train", environment="echo", steps=10, validate_only=True)
    await call("train-sft", "train", environment="echo", algorithm="sft", epochs=3, validate_only=True)
    await call("train-on-dataset", "train", environment="echo", algorithm="sft", dataset="answers", validate_only=True)
    asked = {"environment": "echo", "init_from_adapter": "run-improved@10", "idempotency_key": "warm"}
    await call("train", "train", gives={"run_id": "run-queued"}, steps=3, **asked)
    await call("train-again", "train", steps=3, **asked)
    await call("train-idempotency-conflict", "train", steps=4, **asked)
    await call("status-queued", "status", run_id="run-queued")
    await call("status-wait-queued", "status", run_id="run-queued", wait_s=0.3)
    await call("cancel-queued", "cancel", run_id="run-queued", reason="wrong data")
    await call("cancel-again", "cancel", run_id="run-queued")
    await call("cancel-running", "cancel", run_id="run-running", wait_s=0)
    await call("cancel-finished", "cancel", run_id="run-improved")
    call.names.give("run-waiting", queued_run(folder / "environment").id)


async def serving(call: Calls) -> None:
    asked = {"run_id": "run-improved", "wait_s": 0}
    await call("deploy", "deploy", gives={"deployment": "dep-newest"}, **asked)
    await call("deploy-named", "deploy", gives={"deployment": "dep-named"}, step=10, name="halfway", **asked)
    await call("chat-not-ready", "chat", deployment="halfway", message="hello")
    await call("chat-which", "chat", message="hello")
    await call("undeploy", "undeploy", deployment="halfway", wait_s=0)
    name = call.names.actual["dep-newest"]
    failure = FlashError("deployment_failed", "vLLM ended with exit code 1", log="CUDA error")
    open_store().update_deployment(name, state="failed", error=failure.to_dict())
    await call("undeploy-failed", "undeploy", deployment="dep-newest", wait_s=0)
    await call("catalog-deployments", "catalog", kind="deployments")


async def lists(call: Calls, folder: Path) -> None:
    push_echo(folder / "other", name="other")
    await call("catalog", "catalog", limit=3)
    await call("catalog-models", "catalog", kind="models")
    await call("catalog-environments", "catalog", kind="environments", contains="ECH")
    await call("catalog-datasets", "catalog", kind="datasets")
    await call("status-list", "status", limit=7)
    await call("status-list-page", "status", limit=2, cursor="run-running")
    await call("status-list-failed", "status", state="failed")
    await call("status-list-none", "status", state="starting")
