import json
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from flash_mcp.protocol import storage
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import datasets_dir
from flash_mcp.protocol.recordings import Recording, RecordingLimits
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import resolve, validate
from flash_mcp.server import mcp_server as server_module
from flash_mcp.server.mcp_server import server
from flash_mcp.state import datasets, queue
from flash_mcp.state.store import open_store
from tests import near_environments
from tests.attempts import Attempt
from tests.calls import named_calls
from tests.samples import push_echo, supervised
from tests.server.test_mcp_server import body_of, code_of, text_of

ENVIRONMENT = '''
from environments.base import EnvironmentSingleTurn, RewardResult, TaskExample

EXAMPLE = [{"role": "user", "content": "Say 0"}, {"role": "assistant", "content": "0"}]


class Numbers(EnvironmentSingleTurn):
    """Its train tasks t40 and t41 are planted: they are two of its eval tasks, spelt another way."""

    def __init__(self, low=0):
        self.dataset = [TaskExample({}, f"Say {n}", id=f"t{n}", output=f"{n}!") for n in range(low, 40)]
        self.dataset += [TaskExample({}, "SAY  100 ", id="t40"), TaskExample({}, "hidden", id="t41")]
        self.eval_dataset = [TaskExample({}, f"Say {n}", id=f"e{n}") for n in range(100, 120)]

    def build_prompt_messages(self, example):
        text = "Say 101" if example.input == "hidden" else example.input
        return [*EXAMPLE, {"role": "user", "content": text}]

    def score_response(self, example, response_text):
        return RewardResult(score=float(response_text == example.output))


def load_environment(**kwargs):
    return Numbers(**kwargs)
'''


@pytest.fixture
def numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """The environment is published, and queued runs stay queued: this test is the supervisor. It needs no process."""
    ours = "class Numbers(EnvironmentSingleTurn)"
    monkeypatch.setattr(near_environments, "is_sample", lambda folder: ours in (folder / "environment.py").read_text())
    push_echo(tmp_path / "numbers", ENVIRONMENT, "numbers")
    with supervised():
        yield


@pytest.fixture
async def client(numbers: None) -> AsyncGenerator[Client]:
    async with Client(server) as connected:
        yield connected


def answered(index: int, task: str, said: str, *, right: bool = True, asked: str | None = None, **values: Any) -> Any:
    """A rollout as the worker writes it, after an example in the prompt."""
    number = task.lstrip("te")
    texts = ("Say 0", "0", asked or f"Say {number}", said)
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return {
        "step": 1, "index": index, "group": 0, "task_id": task, "messages": messages, "reward": float(right),
        "success": right, "advantage": 0.0, "metrics": {}, "reason": None, "error": None, "turns": 1,
        "prompt_tokens": 9, "completion_tokens": 3, "env_tokens": 0, "truncated": False, "finish": "done",
        "seconds": 0.1, **values,
    }  # fmt: skip


def recorded(
    rollouts: Sequence[Any] = (), evaluation: Sequence[Any] = (), *, environment: str = "numbers", **fields: Any
) -> Run:
    """A run whose worker left these rollouts of step 1 and this evaluation of step 0."""
    store = open_store()
    resolved = resolve(validate({"environment": environment, "steps": 1, **fields}))
    run, _ = queue.enqueue(store, resolved, store.environment(environment))
    assert queue.claim(store) is not None
    folder = RunFolder(run.folder)
    folder.create(queue.job(run))
    writer = RunWriter(folder, 1)
    if rollouts:
        writer.rollouts(1, rollouts)
    if evaluation:
        writer.evaluation(0, {"n": len(evaluation), "success": 0.5}, evaluation)
    writer.commit_result("succeeded", 1)
    queue.finish(store, run.id, 1, "succeeded", step=1)
    return store.run(run.id)


def solved(count: int = 8) -> list[Any]:
    """One right and one wrong attempt at each of the first tasks."""
    return [
        answered(2 * n + wrong, f"t{n}", f"{n}?" if wrong else f"{n}!", right=not wrong)
        for n in range(count)
        for wrong in (0, 1)
    ]


async def curated(client: Client, **arguments: Any) -> dict[str, Any]:
    return body_of(await client.call_tool("curate", arguments))


async def refused(client: Client, tool: str = "curate", **arguments: Any) -> tuple[str, str]:
    result = await client.call_tool(tool, arguments)
    assert "Fix: " in text_of(result)
    return code_of(result), text_of(result)


async def follow(client: Client, text: str, tool: str) -> dict[str, Any]:
    """The result of the one call that `next` names, as it stands."""
    [(name, arguments)] = named_calls(text)
    assert name == tool
    return body_of(await client.call_tool(name, arguments))


@pytest.mark.slow
async def test_a_dry_run_writes_nothing_and_a_dataset_is_kept_under_its_content_with_where_it_came_from(client: Client):
    run = recorded(solved())
    body = await curated(client, runs=[run.id], filter="solved and pass@2 > 0", dry_run=True)
    counts = body["counts"]
    assert (counts["attempts"], counts["tasks"], counts["sometimes_solved"], counts["train_rows"]) == (16, 8, 8, 8)
    assert body["examples"][0]["question"].startswith("Say ")
    assert re.fullmatch(r"\d!", body["examples"][0]["answer"]) and "dataset" not in body
    assert not datasets_dir().exists()

    arguments = {"runs": [run.id], "name": "right", "filter": "pass@1 < 1", "holdout": 0.4}
    body = await curated(client, **arguments)
    kept = datasets.find(body["dataset"])
    assert body["created"] is True and body["dataset"] in body["next"]
    rows, held_back = kept.rows(), kept.rows(datasets.HOLDOUT)
    assert (len(rows), len(held_back)) == (body["counts"]["train_rows"], body["counts"]["holdout_rows"])
    assert rows and held_back and len(rows) + len(held_back) == 8
    assert all(row["prompt_messages"] == 3 and row["provenance"]["run_id"] == run.id for row in rows)
    manifest = kept.manifest
    assert manifest["environment"] == {"name": "numbers", "digest": "0123456789abcdef", "args": {}}
    assert (manifest["filter"], manifest["select"], manifest["holdout"]) == ("pass@1 < 1", "correct", 0.4)
    assert [(each["run_id"], each["model"], each["rows"]) for each in manifest["runs"]] == [(run.id, run.model, 8)]
    assert manifest["counts"] == body["counts"]
    again = await curated(client, **arguments)
    assert (again["dataset"], again["created"]) == (body["dataset"], False)
    listed = body_of(await client.call_tool("catalog", {"kind": "datasets"}))["datasets"]
    expected = (body["dataset"], len(rows), len(held_back), "numbers@0123456789abcdef")
    assert [(entry["name"], entry["rows"], entry["holdout"], entry["environment"]) for entry in listed] == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secrets", "carried"),
    [
        ([["KEY", "ID"], [], ["ID", "KEY"]], ", secrets=['ID', 'KEY'], environment_args={\"low\": 1})"),
        ([["KEY"], ["ID"]], ', environment_args={"low": 1})'),
    ],
)
async def test_training_is_given_what_the_runs_had(client: Client, monkeypatch, secrets: list[list[str]], carried: str):
    for name in ("KEY", "ID"):
        monkeypatch.setenv(name, "planted-secret-value")
    runs = [recorded(solved(), environment_args={"low": 1}, secrets=names).id for names in secrets]
    body = await curated(client, runs=runs, name="right")
    assert body["next"].endswith(f"dataset={body['dataset']!r}, validate_only=true{carried}")


@pytest.mark.slow
async def test_runs_and_evaluations_are_pooled_and_no_attempt_counts_twice(client: Client):
    first = recorded(solved(), [answered(0, "t0", "0!!", split="train", attempt=0)])
    second = recorded([answered(n, "t0", f"0! {n}") for n in range(2)])
    body = await curated(client, runs=[first.id, second.id, first.id], filter="n == 5", dry_run=True)
    counts = body["counts"]
    assert (counts["attempts"], counts["repeated"], counts["train_rows"], counts["filtered"]) == (19, 0, 4, 7)
    only = await curated(client, runs=[first.id], source="evaluations", dry_run=True)
    assert only["counts"]["attempts"] == 1


@pytest.mark.slow
async def test_tasks_of_the_eval_split_are_kept_out_however_they_are_named(client: Client):
    planted = [answered(20, "t40", "100!", asked="SAY  100 "), answered(21, "t41", "101!", asked="Say 101")]
    run = recorded([*solved(), *planted], [answered(0, "e102", "102!", split="eval", attempt=0)])
    body = await curated(client, runs=[run.id], name="clean")
    counts = body["counts"]
    assert (counts["eval_tasks"], counts["eval_attempts"], counts["train_rows"]) == (3, 3, 8)
    assert "3 tasks of the eval split were left out" in body["notes"][0]
    learnt = {row["provenance"]["task_id"] for row in datasets.find(body["dataset"]).rows()}
    assert learnt == {f"t{n}" for n in range(8)}

    spoilt = await curated(client, runs=[run.id], name="spoilt", allow_eval_tasks=True)
    assert spoilt["counts"]["train_rows"] == 11 and "no longer tell" in spoilt["notes"][0]
    sft = {"environment": "numbers", "algorithm": "sft", "dataset": spoilt["dataset"], "validate_only": True}
    checked = body_of(await client.call_tool("train", sft))
    assert any("may be memory" in note for note in checked["notes"])


async def test_an_evaluation_of_the_eval_split_alone_gives_no_dataset(client: Client):
    run = recorded(evaluation=[answered(n, f"e{100 + n}", "!") for n in range(5)])
    code, text = await refused(client, runs=[run.id], name="x")
    assert code == "dataset_invalid"
    assert "eval_attempts 5" in text and "train tasks" in text
    assert not datasets_dir().exists()
    assert (await curated(client, runs=[run.id], dry_run=True))["counts"]["train_rows"] == 0


@pytest.mark.parametrize("other", ["version", "arguments"])
async def test_attempts_in_different_environments_are_not_pooled(client: Client, tmp_path: Path, other: str):
    first = recorded(solved())
    if other == "version":
        open_store().add_environment(name="numbers", digest="fedcba9876543210", path=str(tmp_path), size_bytes=1)
        second = recorded(solved())
    else:
        second = recorded(solved(), environment_args={"low": 1})
    code, text = await refused(client, runs=[first.id, second.id], name="x")
    assert code == "invalid_argument"
    assert f"{second.id}: numbers@" in text


@pytest.mark.slow
async def test_a_run_is_pinned_to_its_dataset_and_one_that_does_not_fit_is_refused(client: Client, tmp_path: Path):
    kept = (await curated(client, runs=[recorded(solved()).id], name="right"))["dataset"]
    fields = {"environment": "numbers", "algorithm": "sft", "dataset": "right", "batch_size": 2, "epochs": 3}
    started = body_of(await client.call_tool("train", fields))
    assert (started["estimate"]["dataset_rows"], started["estimate"]["steps"]) == (8, 12)
    assert started["values"]["dataset"] == kept
    row = open_store().run(started["run_id"])
    job = queue.job(row)
    assert row.spec.dataset == kept and job["dataset"] == datasets.find(kept).pinned()
    assert f"{job['dataset']['name']}@{job['dataset']['digest']}" == kept

    body = body_of(await client.call_tool("train", {"algorithm": "sft", "dataset": kept, "validate_only": True}))
    assert body["environment"].startswith("numbers@")

    sft = {"environment": "numbers", "algorithm": "sft"}
    code, text = await refused(client, "train", **sft, dataset="right@ffffff")
    assert (code, kept in text) == ("unknown_dataset", True)

    later = ENVIRONMENT.replace("range(100, 120)", "range(3, 9)")  # another version holds back what was learnt
    push_echo(tmp_path / "later", later, "later")
    code, text = await refused(client, "train", environment="later", algorithm="sft", dataset=kept)
    assert (code, "5 rows show prompts of the eval split" in text) == ("dataset_invalid", True), text

    path = datasets.find(kept).path / datasets.TRAIN
    path.chmod(0o644)
    path.write_text(path.read_text().replace("3!", "4!"))
    code, text = await refused(client, "train", **sft, dataset=kept)
    assert (code, "changed" in text) == ("dataset_invalid", True)


# -- the dataset as the worker learns it -----------------------------------------------------------


@pytest.mark.slow
async def test_every_token_of_the_models_own_answers_is_learnt_and_no_other(numbers: None, tmp_path: Path):
    from tests.tiny import make_tokenizer  # noqa: PLC0415  seconds of imports that the other tests do not need
    from worker.rollouts.gold import IGNORED, dataset_rows  # noqa: PLC0415
    from worker.rollouts.transcript import ChatTemplate  # noqa: PLC0415

    turns = answered(0, "t1", "first", turns=2)
    turns["messages"] += [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "second\u2028é"}]
    run = recorded([turns, answered(1, "t2", "2!")])
    async with Client(server) as client:
        kept = datasets.find((await curated(client, runs=[run.id], name="turns"))["dataset"])
    template = ChatTemplate(make_tokenizer())
    decode = template.tokenizer.decode
    rows = [row for (row,) in dataset_rows(kept.pinned(), template)["train"]]
    learnt = [decode([label for label in row["labels"] if label != IGNORED]) for row in rows]
    assert learnt == ["first<|im_end|>second\u2028é<|im_end|>", "2!<|im_end|>"]  # and not the example's answer, 0
    for row, line in zip(rows, kept.rows(), strict=True):
        whole = template.tokenizer.apply_chat_template(line["messages"], tokenize=False)
        assert decode(row["input_ids"]) + "\n" == whole
        assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))

    path = kept.path / datasets.TRAIN
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"2!", b"3!"))
    with pytest.raises(FlashError, match="changed since"):
        dataset_rows(kept.pinned(), template)


def hold_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make whoever reads the file wait, until what is returned is called."""
    released = threading.Event()
    read_local = storage.read_local

    def wait(file: Path, max_bytes: int, *, root: str = "") -> bytes:
        if file == path:
            released.wait()
        return read_local(file, max_bytes, root=root)

    monkeypatch.setattr(storage, "read_local", wait)
    return released.set


@pytest.mark.slow
async def test_a_call_whose_reading_takes_too_long_is_left(numbers: None, monkeypatch: pytest.MonkeyPatch):
    run = recorded(solved())
    release = hold_up(Path(run.folder, "rollouts", "1.1.jsonl"), monkeypatch)
    late = threading.Timer(120, release)
    late.start()
    monkeypatch.setattr(server_module, "CALL_TIMEOUT_S", 3.0)
    started = time.monotonic()
    async with Client(server) as client:
        code, _ = await refused(client, runs=[run.id], dry_run=True)
    assert code == "not_ready" and time.monotonic() - started < 60
    late.cancel()
    release()


@pytest.mark.slow
async def test_a_model_is_fine_tuned_on_a_curated_dataset(numbers: None, tiny_model: Path):
    run = recorded([answered(n, f"t{n}", f"{n}!") for n in range(40)])
    store = open_store()
    async with Client(server) as client:
        body = await curated(client, runs=[run.id], name="right", holdout=0.2)
        fields = {
            "environment": "numbers", "algorithm": "sft", "dataset": body["dataset"], "model": str(tiny_model),
            "steps": 6, "save_every": 4, "learning_rate": 0.01, "lora_rank": 8, "lora_alpha": 16,
        }  # fmt: skip
        started = body_of(await client.call_tool("train", fields))
    row = queue.claim(store)
    assert row is not None and row.id == started["run_id"]
    folder = RunFolder(row.folder)
    folder.create(queue.job(row))
    result = Attempt(folder).ended()
    assert result is not None
    assert result["state"] == "succeeded", json.dumps(result)
    metrics = [folder.metrics(step)["metrics"] for step in range(1, 7)]  # pyright: ignore[reportOptionalSubscript]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5
    held_back = {step: each["eval_loss"] for step, each in enumerate(metrics, start=1) if "eval_loss" in each}
    assert set(held_back) == {4, 6}  # with every checkpoint
    assert held_back[6] < metrics[0]["loss"]
    assert folder.job()["dataset"]["digest"] == datasets.find(body["dataset"]).digest


def served(run: Run, **values: Any) -> Recording:
    """A deployment of the run that records."""
    row = {"name": "d", "model": run.model, "run_id": run.id, "step": 1, "state": "ready"}
    store = open_store()
    store.add_deployment({"id": "dep-1", **row, **values})
    recording = Recording(store.base, "dep-1")
    recording.start(RecordingLimits(1 << 20, 30.0))
    return recording


def request_of(asked: str, said: str, finish: str = "stop") -> dict[str, Any]:
    """A line as the model server writes it."""
    example = [{"role": "user", "content": "Say 0"}, {"role": "assistant", "content": "0"}]
    return {
        "messages": [*example, {"role": "user", "content": asked}], "tools": [],
        "answer": {"role": "assistant", "content": said}, "finish": finish, "prompt_token_ids": [1],
        "token_ids": [2, 3], "seconds": 0.5,
    }  # fmt: skip


async def test_a_run_without_success_is_never_to_be_learnt_whole(client: Client) -> None:
    run = recorded([answered(n, f"t{n}", "?", right=False) for n in range(4)])
    body = await curated(client, runs=[run.id], dry_run=True)
    for said in (body["next"], (await refused(client, runs=[run.id], name="none"))[1]):
        assert "train(algorithm='sft', ...) learns from the tasks' gold answers" in said and "select=" not in said


@pytest.mark.slow
async def test_what_a_deployment_recorded_is_shown_and_learnt_but_for_eval_tasks(client: Client):
    recording = served(recorded(solved()))
    body = body_of(await client.call_tool("rollouts", {"run_id": "dep-1"}))
    assert body["rollouts"] == [] and "base_url" in body["next"]
    for line in (
        request_of("Say hi", "hi!"),
        request_of("Say 104", "104!"),
        request_of("Say bye", "bye bye bye", "length"),
    ):
        recording.append(line)
    shown = body_of(await client.call_tool("rollouts", {"run_id": "dep-1", "limit": 2}))
    newest = shown["rollouts"][0]
    assert (shown["total"], newest["index"], newest["finish"]) == (3, 2, "length")
    assert newest["messages"][-1]["content"] == "bye bye bye"
    assert shown["opening"][-1]["content"] == "0"
    assert not {"reward", "success", "failure"} & newest.keys()
    found = {"run_id": "dep-1", "contains": "SAY 104"}
    assert body_of(await client.call_tool("rollouts", found))["rollouts"][0]["index"] == 1
    second = {"run_id": "dep-1", "limit": 2, "cursor": shown["cursor"]}
    assert body_of(await client.call_tool("rollouts", second))["rollouts"][0]["index"] == 0
    body = await curated(client, runs=["dep-1"], since_step=1, dry_run=True)
    await follow(client, body["next"], "rollouts")
    kept = await curated(client, runs=["dep-1"], select="all", name="asked")
    counts = kept["counts"]
    assert (counts["attempts"], counts["eval_tasks"], counts["train_rows"]) == (3, 1, 1)
    row = json.loads((Path(kept["path"]) / "train.jsonl").read_text())
    assert [message["content"] for message in row["messages"][2:]] == ["Say hi", "hi!"]
    assert (row["provenance"]["run_id"], row["provenance"]["source"]) == ("dep-1", "recordings")
    manifest = json.loads((Path(kept["path"]) / "manifest.json").read_text())
    assert [(each["run_id"], each["rows"]) for each in manifest["runs"]] == [("dep-1", 1)]
    code, _ = await refused(client, runs=["dep-1"], source="rollouts", name="asked")
    assert code == "dataset_invalid"
    code, _ = await refused(client, "rollouts", run_id="dep-2")
    assert code == "unknown_deployment"


# -- rows of a file --------------------------------------------------------------------------------


async def test_rows_of_a_file_are_conversations_to_learn(client: Client, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    turns += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q2"}]
    turns += [{"role": "assistant", "content": "a2"}]
    rows = [{"messages": turns}, {"messages": turns}, {"messages": turns[1:3]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    body = body_of(await client.call_tool("curate", {"runs": [str(tmp_path / "chats.jsonl")], "name": "chats"}))
    assert (body["counts"]["attempts"], body["counts"]["duplicates"], body["counts"]["train_rows"]) == (3, 1, 2)
    kept = sorted(datasets.find(body["dataset"]).rows(), key=lambda row: len(row["messages"]))
    assert [(row["messages"], row["prompt_messages"]) for row in kept] == [(turns[1:3], 1), (turns, 2)]

    (tmp_path / "pairs.csv").write_text("question,answer\n" + "".join(f"q{n},a{n}\n" for n in range(40)))
    body = body_of(
        await client.call_tool("curate", {"runs": [str(tmp_path / "pairs.csv")], "name": "pairs", "holdout": 0.3})
    )
    assert body["counts"]["train_rows"] + body["counts"]["holdout_rows"] == 40
    assert 0 < len(datasets.find(body["dataset"]).rows("holdout.jsonl")) < 30

    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}')
    code, text = await refused(client, "curate", runs=[str(tmp_path / "bad.jsonl")], name="bad")
    assert code == "invalid_argument" and "row 1: no message of the assistant follows" in text


async def test_a_dry_run_on_a_file_counts_its_rows_and_what_selects_attempts_is_refused(
    client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("question,answer\n" + "".join(f"q{n % 40},a{n % 40}\n" for n in range(50)))
    for name in ({}, {"name": "pairs"}):
        body = await curated(client, runs=[str(path)], holdout=0.3, dry_run=True, **name)
        counts = body["counts"]
        assert (counts["attempts"], counts["duplicates"]) == (50, 10)
        assert counts["train_rows"] + counts["holdout_rows"] == 40
        assert "dataset" not in body and "without dry_run" in body["next"]
        assert not datasets_dir().exists()
    code, text = await refused(client, runs=[str(path), str(path)], dry_run=True)
    assert code == "invalid_argument" and "curated alone" in text

    selecting: dict[str, Any] = {"filter": "avg < 1", "select": "best", "max_per_task": 2, "success_threshold": 0.5}
    selecting |= {"source": "rollouts", "since_step": 1, "deduplicate": False, "allow_eval_tasks": True}
    for name, value in selecting.items():
        code, text = await refused(client, runs=[str(path)], name="pairs", **{name: value})
        assert code == "invalid_argument" and f"] {name} apply to attempts" in text
    code, text = await refused(client, runs=[str(path)], dry_run=True, **selecting)
    assert code == "invalid_argument" and all(name in text for name in selecting)
    assert not datasets_dir().exists()


@pytest.mark.parametrize("form", ["pairs", "messages"])
async def test_rows_without_a_question_or_an_answer_are_dropped_and_counted(client: Client, tmp_path: Path, form: str):
    path = tmp_path / "rows.jsonl"
    pairs: list[Any] = [(f"q{n}", f"a{n}") for n in range(10)] + [("", "a"), ("q", ""), ("q", " \n")]
    rows: list[Any] = [{"question": question, "answer": answer} for question, answer in [*pairs, ("q", None)]]
    if form == "messages":
        turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
        turns += [[*turns[0], *turns[-1]]]
        rows = [{"messages": row} for row in turns]
    path.write_text("\n".join(map(json.dumps, [*rows, *rows[:2]])))
    body = await curated(client, runs=[str(path)], name="rows")
    counts = body["counts"]
    assert (counts["attempts"], counts["truncated"], counts["duplicates"]) == (16, 4, 2)
    assert counts["train_rows"] == len(datasets.find(body["dataset"]).rows()) == 10
    call = {"algorithm": "sft", "dataset": str(path), "validate_only": True}
    body = body_of(await client.call_tool("train", call))
    assert "4 rows without a question or an answer were left out" in body["notes"]
    assert "2 rows that repeat another were left out" in body["notes"]
    path.write_text("\n".join(map(json.dumps, rows[10:])))
    code, text = await refused(client, runs=[str(path)], name="none")
    assert code == "invalid_argument" and "all of its 4 rows are empty" in text


@pytest.mark.slow
async def test_sft_on_rows_needs_no_environment(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [[{"from": "human", "value": f"Say {n}"}, {"from": "gpt", "value": f"{n}!"}] for n in range(60)]
    path.write_text("\n".join(json.dumps({"conversations": row}) for row in turns))
    call = {"algorithm": "sft", "dataset": str(path), "validate_only": True}
    body = body_of(await client.call_tool("train", call))
    assert body["environment"].startswith("regression@")
    estimate = body["estimate"]
    assert estimate["dataset_rows"] < 60 and estimate["held_out_examples"] > 0
    assert not any("env_test" in note for note in body.get("notes", ()))
    body = await follow(client, (await curated(client, runs=[str(path)], name="chats"))["next"], "train")
    assert body["environment"].startswith("regression@") and body["estimate"]["dataset_rows"] == 60
    code, text = await refused(client, "train", algorithm="grpo", dataset=str(path))
    assert (code, "environment: missing" in text) == ("invalid_argument", True)
