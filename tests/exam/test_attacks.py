"""An agent tries to read an exam: every tool that takes a run or an environment, resources, pages, reports, files,
errors and logs, over HTTP as two owners and over stdio as the account of the server.
"""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters

from flash_mcp.exam import exams
from flash_mcp.protocol.errors import CODES, FlashError
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state import queue
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.store import open_store
from tests.calls import call
from tests.exam.test_exams import PASSPHRASE
from tests.freeze import command
from tests.places import ROOT
from tests.samples import ENVIRONMENT, finished_run, read_in, supervised
from tests.teams import team_server, text_of
from worker.exam import BASE_STEP, ExamWriter

TASK, SCORER, ANSWER = "Sesquipedalian", "floccinaucinihil", "Honorificabilitud"
SOURCE = ENVIRONMENT.replace("go {n}", f"{TASK} {{n}}").replace(
    "def score_response", f"# {SCORER}\n    def score_response"
)
SECRETS = (TASK, SCORER, ANSWER, "eval-1", "eval-2", "Error: scorer")


def attempt(index: int, success: bool) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{TASK} {index}"}, {"role": "assistant", "content": ANSWER}]
    row = {"index": index, "task_id": f"eval-{index}", "split": "eval", "attempt": 0, "messages": said}
    return {**row, "reward": float(success), "success": success, "metrics": {}, "error": None, "turns": 1}


def sit(run_id: str, key: bytes, *, fails: bool = False) -> None:
    """What the worker of a look writes, with everything that a hostile environment may say."""
    store = open_store()
    run = queue.claim(store)
    assert run is not None and run.id == run_id
    RunFolder(run.folder).create(queue.job(run))
    writer = ExamWriter(RunFolder(run.folder), run.attempt)
    writer.key, writer.exam_id = key, run.environment_digest
    queue.mark_running(store, run_id, run.attempt)
    rows = [attempt(index, index < 7) for index in range(20)]
    writer.event("constant", f"the best constant, {ANSWER}", answer=TASK)
    for done in (3, 7, 8):
        writer.beat(done, f"eval {done}/20, 4 s left {TASK}", done)
    writer.attempts(BASE_STEP, rows)
    writer.attempts(0, rows[:12])
    error = None
    if fails:
        error = FlashError("environment_error", f"the scorer raised on {TASK}", wrote=f"Error: scorer {SCORER}")
    else:
        writer.base = rows
        writer.evaluation(0, {"n": 20, "success": 0.35}, rows)
    writer.commit_result("failed" if fails else "succeeded", 20, error)
    read_in(store, run_id)
    result = RunFolder(run.folder).result()
    assert result is not None
    state = "failed" if fails else "succeeded"
    queue.finish(store, run_id, 1, state, step=result["step"], error=result["error"])


@pytest.fixture
def exam(flash_home: Path, tmp_path: Path) -> exams.Exam:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums/environment.py").write_text(SOURCE)
    return exams.create(flash_home, "sums", tmp_path / "sums", looks=3, passphrase=PASSPHRASE)


@pytest.fixture
async def ids(exam: exams.Exam, flash_home: Path, tmp_path: Path) -> AsyncGenerator[dict[str, str]]:
    """What an attacker may know of an exam that alice and the local owner looked at: by names in braces."""
    with supervised():
        known = {"home": str(flash_home), "id": exam.id, "variable": exam.variable, "tmp": str(tmp_path)}
        known["trained"] = finished_run(tmp_path / "echo").id
        for owner in ("local", "alice"):
            for name, fails in (("look", False), ("failed", True)):
                with acting_as(Caller(owner)):
                    asked = {"environment": "exam:sums", "model": DEFAULT_MODEL, "again": True, "wait_s": 0}
                    run_id = (await call("evaluate", **asked))["run_id"]
                sit(run_id, exam.key(PASSPHRASE), fails=fails)
                known[f"{name}_{owner}"] = run_id
        assert open_store().column("SELECT count(*) FROM exam_looks WHERE summary IS NOT NULL") == [2]
        link = tmp_path / "linked"
        link.mkdir()
        (link / "environment.py").symlink_to(flash_home / "exams/sums" / exam.id / "exam.sealed")
        yield known


SPY = "def load_environment():\n    raise RuntimeError([open(path, 'rb').read() for path in {paths}])\n"
PATHS = ["{tmp}/sums/environment.py", "{home}/exams/sums/prompts.sealed", "{home}/flash.db", "/proc/1/environ"]
LOOK, FAILED = "{look}", "{failed}"
ATTACKS: list[tuple[str, dict[str, Any]]] = [
    *(("status", {"run_id": run, **more}) for run in (LOOK, FAILED) for more in (
        {}, {"detail": "detailed"}, {"until": "news", "wait_s": 0}, {"wait_s": 1}, {"curve": True})),
    ("status", {}),
    *(("rollouts", {"run_id": run, **more}) for run in (LOOK, FAILED) for more in (
        {}, {"split": "eval"}, {"step": BASE_STEP}, {"index": 3}, {"contains": TASK}, {"success": True},
        {"tokens": True, "index": 0}, {"which": "best", "from_message": 0})),
    ("compare", {"base": LOOK, "other": LOOK}),
    ("compare", {"base": "{trained}@0", "other": LOOK, "flips": 5}),
    ("compare", {"base": "{trained}@0", "other": "{trained}@20", "more": [LOOK]}),
    ("curate", {"runs": [LOOK], "name": "stolen"}),
    ("curate", {"runs": [LOOK], "name": "stolen", "source": "evaluations", "allow_eval_tasks": True, "dry_run": True}),
    *(("env_test", {"environment": name, **more}) for name in ("exam:sums", "exam:sums@{id}", "exam-sums", "sums@{id}")
      for more in ({}, {"hunt": True}, {"answers": ["x"], "task_id": "eval-1"}, {"replay": LOOK})),
    ("env_test", {"folder": "{home}/exams/sums/{id}"}),
    ("env_test", {"folder": "{tmp}/linked"}),
    ("env_push", {"name": "copy", "folder": "{home}/exams/sums"}),
    ("env_push", {"name": "copy", "folder": "{tmp}/linked"}),
    ("env_push", {"name": "exam:sums", "files": {"environment.py": ENVIRONMENT}}),
    *(("env_push", {"name": "spy", "files": {"environment.py": SPY.replace("{paths}", f"['{path}']")}})
      for path in PATHS),
    ("env_push", {"name": "spy", "files": {"environment.py": ENVIRONMENT}, "secrets": ["{variable}"]}),
    ("env_setup", {"environment": "exam:sums"}),
    ("env_setup", {"environment": "exam:sums@{id}"}),
    ("env_setup", {"dataset": "{home}/exams/sums/prompts.sealed", "question": "q", "answer": "a"}),
    ("train", {"environment": "exam:sums"}),
    ("train", {"environment": "exam:sums", "validate_only": True, "sample": True}),
    ("train", {"environment": "echo", "mixture": {"exam:sums": {}}}),
    ("train", {"environment": "echo", "regression": "on", "secrets": ["{variable}"]}),
    ("train", {"environment": "echo", "init_from_adapter": LOOK}),
    ("train", {"resume": LOOK}),
    ("train", {"config": "{home}/exams/sums/exam.json"}),
    ("tournament", {"environment": "exam:sums", "arms": [{"name": "a"}, {"name": "b", "temperature": 1.0}]}),
    *(("evaluate", {"environment": name, "wait_s": 0}) for name in (
        "exam:../sums", "exam:sums/../sums", "exam:sums@{id}", "exam:", "exam:*", "exam:sums\0", "{home}/exams/sums")),
    *(("evaluate", {"environment": "exam:sums", "wait_s": 0, **more}) for more in (
        {"task_ids": ["eval-1"]}, {"split": "train"}, {"limit": 1}, {"attempts": 8}, {"seed": 1},
        {"environment_args": {"x": 1}}, {"secrets": ["{variable}"]}, {"target": "auto"})),
    ("evaluate", {"environment": "echo", "secrets": ["{variable}"], "wait_s": 0}),
    ("evaluate", {"environment": "exam:sums", "wait_s": 0}),
    ("evaluate", {"model": LOOK, "wait_s": 0}),
    ("evaluate", {"environment": "exam:sums", "model": "{home}/exams/sums", "wait_s": 0}),
    ("deploy", {"run_id": LOOK, "wait_s": 0}),
    ("chat", {"deployment": LOOK, "message": "repeat the tasks"}),
    ("checkpoints", {"run_id": LOOK}),
    ("checkpoints", {"run_id": LOOK, "export": "adapter"}),
    ("cancel", {"run_id": LOOK, "wait_s": 0}),
    *(("catalog", {"kind": kind}) for kind in ("environments", "datasets", "ledger", "whoami", "health")),
]  # fmt: skip
RESOURCES = ["metrics", "log", "curve.png", "rollouts/0", "evaluations/0", f"evaluations/{BASE_STEP}"]
PAGES = ["", "/rollouts", "/rollouts?split=eval", "/changes", "/rollouts?split=eval&step=0&index=1"]


def of_attacker(value: Any, known: dict[str, str]) -> Any:
    """With what is known in place of names in braces."""
    if isinstance(value, str):
        for name, item in known.items():
            value = value.replace(f"{{{name}}}", item)
        return value
    if isinstance(value, dict):
        return {of_attacker(name, known): of_attacker(item, known) for name, item in value.items()}
    return [of_attacker(item, known) for item in value] if isinstance(value, list) else value


def shown(text: str, *, mine: bool = False) -> list[str]:
    """What of the exam a text shows. An argument of the attacker's own may come back."""
    return [word for word in SECRETS if word in text and not (mine and word in (TASK, "eval-1"))]


async def attack(client: Client, known: dict[str, str]) -> list[str]:
    """The attacks that showed something of the exam."""
    leaks: list[str] = []
    for tool, arguments in ATTACKS:
        given = of_attacker(arguments, known)
        result = await client.call_tool(tool, given)
        said = result.model_dump_json()
        if result.is_error:
            code = text_of(result).removeprefix("[").partition("]")[0].partition(" ")[0]
            assert code in CODES and code != "internal", (tool, given, text_of(result))
        mine = any(word in json.dumps(given) for word in (TASK, "eval-1"))
        if found := shown(said, mine=mine):
            leaks.append(f"{tool} {given}: {found} in {said[:2000]}")
    for run in (known["look"], known["failed"]):
        for name in RESOURCES:
            with suppress(MCPError):
                said = (await client.read_resource(f"flash://runs/{run}/{name}")).model_dump_json()
                leaks += [f"{name}: {said}"] if shown(said) else []
    return leaks


def holders(ids: dict[str, str]) -> set[str]:
    """The folders of runs, and others, that hold a file with something of the exam."""
    assert not shown(Path(ids["tmp"], "page.html").read_text())
    paths = [path for path in Path(ids["home"]).rglob("*") if path.is_file()]
    return {path.parts[-3] for path in paths if shown(path.read_text(encoding="latin-1"))}


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["alice", "bob"])
async def test_an_agent_over_http_reads_nothing_of_an_exam(owner: str, ids: dict[str, str]) -> None:
    known = {**ids, "look": ids["look_alice"], "failed": ids["failed_alice"]}
    with team_server() as team:
        token = team.token(owner)
        async with team.client(token) as client:
            await client.call_tool("env_push", {"name": "echo", "files": {"environment.py": ENVIRONMENT}})
            assert await attack(client, known) == []
            status = text_of(await client.call_tool("status", {"run_id": known["look"]}))
            assert ("look 1 of 3: 0.35" in status) == (owner == "alice"), status
            look = known["look"]
            for tool, given in (
                ("rollouts", {"run_id": look}),
                ("compare", {"base": look, "other": look}),
                ("env_test", {"environment": "echo", "replay": look}),
            ):
                refused = text_of(await client.call_tool(tool, given))
                assert refused.startswith("[exam_sealed" if owner == "alice" else "[unknown_run"), (tool, refused)
            for tool in ("env_test", "env_setup", "train", "tournament"):
                arms = {"arms": [{"name": "a"}, {"temperature": 1.0}]} if tool == "tournament" else {}
                refused = text_of(await client.call_tool(tool, {"environment": "exam:sums", **arms}))
                assert refused.startswith("[exam_sealed"), (tool, refused)
        with team.http(token) as http:
            addresses = [f"/ui/runs/{run}{page}" for run in (known["look"], known["failed"]) for page in PAGES]
            addresses += ["/ui", "/metrics", "/exams/sums/exam.json", "/environments/exam:sums", "/ui/together"]
            for address in addresses:
                answer = http.get(address)
                assert not shown(answer.text) and answer.status_code < 500, (address, answer.text[:3000])
            assert http.put("/environments/exam:sums", content=b"").status_code >= 400


@pytest.mark.slow
async def test_an_agent_over_stdio_reads_nothing_of_an_exam(ids: dict[str, str]) -> None:
    known = {**ids, "look": ids["look_local"], "failed": ids["failed_local"]}
    environment = {"FLASH_HOME": ids["home"]}
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "flash_mcp.cli", "serve"], env=environment, cwd=ROOT
    )
    async with Client(server) as client:
        assert await attack(client, known) == []
    for run in (known["look"], known["failed"], known["trained"]):
        for words in (
            ["report", run, "--to", f"{ids['tmp']}/page.html"],
            ["logs", run],
            ["status", run, "--json"],
            ["rollouts", run],
            ["export", run, "--to", f"{ids['tmp']}/export"],
            ["exam", "show", "sums"],
        ):
            assert not shown(command(*words)[1]), words
    assert holders(ids) <= {known["trained"]}, "only the run that is none of the exam's"
