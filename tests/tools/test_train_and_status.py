import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from flash_mcp.cli.follow import progress_line
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.numbers import two_digits
from flash_mcp.protocol.paths import home
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.spec import RunSpec
from flash_mcp.state import queue, removal, retention
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.state.references import find_subject
from flash_mcp.state.serving import request
from flash_mcp.state.store import open_store
from flash_mcp.supervisor.launch.devices import Device
from flash_mcp.tools.rollouts import LEAST_PER_MESSAGE, share_out
from flash_mcp.tools.shared import waiting
from flash_mcp.tools.shared.truncation import to_text
from flash_mcp.tools.training import probe
from flash_mcp.tools.training.run_time import RunTime
from tests.calls import call, named_calls, refused
from tests.places import AGENT_CALCULATOR, TOOL_CALCULATOR
from tests.samples import (
    ENVIRONMENT,
    end,
    evaluate,
    finished_run,
    learn,
    push_echo,
    queued_run,
    read_in,
    rolled_out,
    sample_rollout,
    save_adapter,
    start,
    started_run,
)

pytestmark = pytest.mark.usefixtures("no_supervisor")


def is_file(*parts: str) -> bool:
    return Path(*parts).is_file()


def write_log(run: Run, text: str) -> None:
    Path(run.folder, f"log.{run.attempt}").write_text(text)


# -- train -----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_training_past_a_failed_gate_needs_a_word_and_is_kept_in_the_lineage(tmp_path: Path, html: Any):
    digest = push_echo(tmp_path).digest
    wanted = {"environment": "echo", "steps": 2}
    checked = await call("train", **wanted, validate_only=True)
    assert checked["gate"] == "never run" and any("was never run" in note for note in checked["notes"])
    first = await call("train", **wanted, idempotency_key="first")
    store = open_store()
    store.put_gate(digest, {}, ["junk", "order"])
    checked = await call("train", **wanted, validate_only=True)
    assert checked["gate"] == "failed: junk, order"
    error = await refused("train", **wanted)
    assert error.code == "gate_failed" and "env_test(environment='echo@" in error.fix
    assert "accept_failed_gate=true" in error.fix
    again = await call("train", **wanted, idempotency_key="first")
    assert again["run_id"] == first["run_id"], "it was started before"
    started = await call("train", **wanted, accept_failed_gate=True)
    shown = await call("status", run_id=started["run_id"], detail="detailed")
    assert shown["run"]["lineage"]["gate"] == "failed: junk, order"
    assert "failed: junk, order" in html(store, started["run_id"])
    store.put_gate(digest, {}, [], ["near_gold"])
    error = await refused("train", **wanted)
    assert (error.code, "unfinished: near_gold" in str(error)) == ("gate_failed", True)
    assert "time_s=" in error.fix
    store.put_gate(digest, {}, [], accepted=["near_gold"])
    checked = await call("train", **wanted, validate_only=True)
    assert checked["gate"] == "passed, accepted: near_gold"
    with acting_as(Caller("ann")):
        store.put_gate(digest, {}, ["junk"])
    assert (await call("train", **wanted, validate_only=True))["gate"] == "passed, accepted: near_gold"
    assert (await call("train", **wanted))["created"]


@pytest.mark.slow
async def test_each_rollout_of_an_agent_counts_the_same_unless_the_caller_says_otherwise(tmp_path: Path):
    push_echo(tmp_path)
    await call("env_push", name="agent", folder=str(AGENT_CALCULATOR.parent))
    asked = {"steps": 2, "validate_only": True}
    losses: list[str | None] = []
    for environment, fields in (("echo", {}), ("agent", {}), ("agent", {"loss_type": "dr_grpo"})):
        values = (await call("train", environment=environment, **asked, **fields))["values"]
        losses.append(values.get("loss_type"))  # none where it is the recipe's
    assert losses == [None, "rollout_mean", "dr_grpo"]
    first = await call("train", environment="agent", steps=2, idempotency_key="k")
    assert (await call("train", environment="agent", steps=2, idempotency_key="k"))["run_id"] == first["run_id"]


async def test_a_run_has_its_owners_name_and_note_and_a_repeat_changes_them(tmp_path: Path):
    push_echo(tmp_path)
    asked: dict[str, Any] = {"environment": "echo", "steps": 3, "idempotency_key": "k"}
    run_id = (await call("train", **asked, name="first\n try", note="<b>\x1b[2J"))["run_id"]
    view = (await call("status", run_id=run_id))["run"]
    assert (view["name"], view["note"]) == ("first try", "<b>␛[2J")
    assert queue.job(open_store().run(run_id))["lineage"]["name"] == "first try"
    assert (await call("train", **asked, name="second"))["created"] is False
    assert (await call("status"))["runs"][0]["name"] == "second"
    assert (await call("train", resume=run_id, note=""))["run_id"] == run_id
    view = (await call("status", run_id=run_id))["run"]
    assert view["name"] == "second" and "note" not in view


async def test_an_evaluation_that_was_measured_before_takes_the_name(tmp_path: Path):
    push_echo(tmp_path)
    first = await call("evaluate", environment="echo", name="base", wait_s=0)
    again = await call("evaluate", environment="echo", name="base model", wait_s=0)
    assert (again["run_id"], again["created"]) == (first["run_id"], False)
    assert [line["name"] for line in (await call("status"))["runs"]] == ["base model"]


async def test_what_cannot_work_as_it_is_given_is_remarked_on_before_the_run(tmp_path: Path):
    push_echo(tmp_path)
    checked = await call("train", environment="echo", model="foo/not-in-the-catalog", validate_only=True)
    assert any(note.startswith("foo/not-in-the-catalog is not in the catalog") for note in checked["notes"])
    checked = await call("train", environment="echo", settings={"thinking": True}, validate_only=True)
    assert any(note.startswith("thinking=true has no effect") for note in checked["notes"])

    wanted = {"environment": "echo", "validate_only": True}
    checked = await call("train", **wanted, report_to=["tensorboard", "mlflow"])
    named = [note for note in checked["notes"] if "metrics" in note]
    assert named == ["not installed here, so it gets no metrics: mlflow"]

    asked = {"environment": "echo", "steps": 1, "batch_size": 4, "validate_only": True}
    (note,) = [note for note in (await call("train", **asked))["notes"] if "learning_rate x" in note]
    assert note.endswith("of this size: take 2 steps")
    slow = await call("train", **asked, learning_rate=1e-4)
    (note,) = [note for note in slow["notes"] if "learning_rate x" in note]
    assert note.endswith("take learning_rate=0.0002, or 4 steps")


def test_a_pace_has_two_digits_and_no_exponent():
    assert [two_digits(pace) for pace in (0.0141, 1.44, 144.0, 1440.0)] == ["0.014", "1.4", "140", "1400"]


async def test_tasks_that_open_slowly_are_no_reason_to_refuse_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "OPENINGS_S", 0.3)
    slow = "    def start_episode(self, example):\n        import time; time.sleep(1)\n"
    slow += "        return super().start_episode(example)\n"
    push_echo(tmp_path, ENVIRONMENT.replace("    def score_response", f"{slow}    def score_response"))
    checked = await call("train", environment="echo", validate_only=True)
    assert checked["estimate"]["prompt_tokens_about"] == 0
    assert any("no task opened within 0.3 s" in note for note in checked["notes"])


@pytest.mark.slow
async def test_one_task_that_cannot_be_opened_is_no_reason_to_refuse_a_run(tmp_path: Path):
    for broken, refuses in (("in ('train-0', 'train-2')", False), ("!= 'nothing'", True)):
        fails = "    def start_episode(self, example):\n"
        fails += f"        if str(self.dataset.index(example)) {broken}: raise ConnectionError\n"
        fails += "        return super().start_episode(example)\n"
        fails = fails.replace("('train-0', 'train-2')", "('0', '2')")
        push_echo(tmp_path, ENVIRONMENT.replace("    def score_response", f"{fails}    def score_response"))
        for algorithm in ("grpo", "sft"):
            arguments = {"environment": "echo", "algorithm": algorithm, "validate_only": True}
            if refuses:
                assert (await refused("train", **arguments)).code == "environment_error"
            else:
                assert (await call("train", **arguments))["estimate"]["prompt_tokens_about"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error_code"),
    [
        ("import nonexistent_module", "environment_invalid"),
        (ENVIRONMENT.replace("range(40)", "range(0)"), "dataset_invalid"),
        (ENVIRONMENT.replace('[{"role": "user", "content": example.input}]', "1 / 0"), "environment_error"),
        (ENVIRONMENT.replace("example.input}", "'word ' * 40000}"), "prompt_too_long"),
    ],
)
async def test_a_broken_environment_is_refused_when_the_run_is_asked_for(tmp_path: Path, code: str, error_code: str):
    push_echo(tmp_path, code)
    assert (await refused("train", environment="echo")).code == error_code
    assert open_store().runs() == []


async def test_an_evaluation_needs_an_eval_split(tmp_path: Path):
    push_echo(tmp_path, ENVIRONMENT.replace("range(60)", "range(0)"))
    assert (await refused("train", environment="echo", eval_before=True)).code == "dataset_invalid"
    assert (await call("train", environment="echo", validate_only=True))["estimate"]["eval_tasks"] == 0


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"!")


async def test_a_warm_start_takes_no_damaged_checkpoint(tmp_path: Path):
    earlier = finished_run(tmp_path)
    damage(Path(open_store().checkpoint(earlier.id, 20).path, "adapter_model.safetensors"))
    error = await refused("train", environment="echo", init_from_adapter=f"{earlier.id}@20")
    assert error.code == "checkpoint_corrupt" and "adapter_model.safetensors" in error.what
    started = await call("train", environment="echo", init_from_adapter=earlier.id)
    assert started["warm_start"] == f"{earlier.id}@10", "the newest whose files are whole"


def scaled_by_the_root_of_its_rank(adapter: Path) -> Path:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    return adapter


LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def write_weights(folder: Path, dtype: str, data: bytes, **others: bytes) -> str:
    """The folder, with `data` in lora_A and lora_B, and other tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, part in {LORA.format("A"): data, LORA.format("B"): data, **others}.items():
        offsets = [len(content), len(content) + len(part)]
        header[name] = {"dtype": dtype, "shape": [len(part)], "data_offsets": offsets}
        content += part
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    return str(folder)


NAN = {"F32": "0000c07f", "BF16": "c07f", "F16": "007e"}
LARGE = {"F32": "ffff7f7f", "BF16": "7f7f", "F16": "ff7b"}


@pytest.mark.parametrize("dtype", NAN)
async def test_only_whole_lora_matrices_of_another_programs_adapter_are_taken(tmp_path: Path, dtype: str):
    adapter = Path(open_store().checkpoint(finished_run(tmp_path).id, None).path)

    async def refusal(data: str, **others: bytes) -> str:
        folder = write_weights(adapter, dtype, bytes.fromhex(data), **others)
        error = await refused("train", environment="echo", init_from_adapter=folder)
        assert error.code == "adapter_mismatch"
        return error.what

    what = await refusal(LARGE[dtype], **{"base_model.model.model.embed_tokens.weight": b"00", "lm_head.weight": b"00"})
    assert what.endswith("more than lora_A and lora_B: base_model.model.model.embed_tokens.weight, lm_head.weight")
    assert f"NaN or infinity in {LORA.format('A')}" in await refusal(LARGE[dtype] * 5 + NAN[dtype])
    write_weights(adapter, dtype, bytes.fromhex(LARGE[dtype]) * 3)
    await call("train", environment="echo", init_from_adapter=str(adapter), validate_only=True)
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    error = await refused("train", environment="echo", init_from_adapter=str(adapter))
    assert "cannot be read as safetensors" in error.what


async def test_only_a_plain_adapter_is_a_warm_start_and_one_of_experts_trains_them_too(tmp_path: Path):
    adapter = Path(open_store().checkpoint(finished_run(tmp_path).id, None).path)
    write_weights(adapter, "F32", b"")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["layers.0.mlp.experts.down_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    started = await call("train", environment="echo", init_from_adapter=str(adapter))
    run = open_store().run(started["run_id"])
    assert (run.spec.experts, run.sources["experts"]) == (True, "adapter")
    error = await refused("train", environment="echo", init_from_adapter=str(adapter), experts=False)
    assert (error.code, "experts (the run: experts=False)" in error.what) == ("adapter_mismatch", True)

    folder = str(scaled_by_the_root_of_its_rank(adapter))
    error = await refused("train", environment="echo", init_from_adapter=folder)
    assert (error.code, error.what) == ("adapter_mismatch", "the adapter has use_rslora=True")


async def expected(**fields: Any) -> dict[str, Any]:
    wanted = {"environment": "echo", "steps": 10, "batch_size": 8, "validate_only": True}
    return (await call("train", **{**wanted, **fields}))["estimate"]["time"]


async def test_the_time_is_that_of_an_earlier_run_of_the_kind_or_a_guess_from_another_model(tmp_path: Path):
    earlier = finished_run(tmp_path)
    time = await expected()
    assert time["seconds"] == 40  # 2 s a step, twice the prompts
    assert earlier.id in time["basis"] and "another environment" not in time["basis"] and "low_s" not in time

    time = await expected(model="smollm2-360m-instruct")
    assert time["seconds"] == 108  # 2.69 times the parameters
    assert time["basis"].startswith("a guess, as no run of this model was measured: 2.7 times the parameters of smol")
    assert earlier.id in time["basis"] and "low_s" not in time

    wanted = {"environment": "echo", "validate_only": True, "batch_size": 8, "settings": {"regression": "off"}}
    notes = (await call("train", **wanted, steps=16_200))["notes"]
    assert [note for note in notes if "hours" in note] == [
        "it takes about 18 hours: about 900 steps take an hour and show whether it learns; "
        "max_hours or finish_by ends it in time"
    ]
    for fields in ({"steps": 900}, {"steps": 16_200, "max_hours": 20}):
        assert not any("in time" in note for note in (await call("train", **wanted, **fields))["notes"])

    (home() / "settings.toml").write_text("[cost]\nprice_per_hour = 90.0\n")
    assert (await expected())["cost"] == 1.0
    two = RunSpec(environment="echo", gpus=2)
    assert RunTime(seconds=40, basis="").priced(open_store(), two, None).cost == 2.0


@pytest.mark.parametrize(("load", "word"), [(2.9, ""), (9.0, "busy (load 9 on 2 processors): perhaps 4 times")])
async def test_the_time_says_that_the_machine_is_busy(tmp_path: Path, monkeypatch, load: float, word: str):
    finished_run(tmp_path)
    monkeypatch.setattr("psutil.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    basis = (await expected())["basis"]
    assert word in basis and basis.count("the machine is busy") == bool(word)


@pytest.mark.slow
async def test_the_band_of_the_time_is_what_earlier_runs_in_the_environment_took(tmp_path: Path):
    runs = [finished_run(tmp_path / str(number)) for number in range(3)]
    for run, step_s in zip(runs, (1.0, 8.0, 2.0), strict=True):
        sql = "UPDATE metrics SET metrics = json_set(metrics, '$.\"time/step_s\"', ?) WHERE run_id = ?"
        open_store().execute(sql, [step_s, run.id])
    time = await expected()
    assert (time["seconds"], time["low_s"], time["high_s"]) == (40, 20, 160)
    assert "slowest of 3 such runs" in time["basis"]
    push_echo(tmp_path / "other", name="other")
    other = await expected(environment="other")
    assert other["seconds"] == 40 and "low_s" not in other and "another environment (echo)" in other["basis"]


async def test_the_time_of_the_first_fine_tuning_is_a_guess_from_its_operations(tmp_path: Path):
    push_echo(tmp_path / "echo")
    steps = {"environment": "echo", "algorithm": "sft", "validate_only": True, "regression": "off"}
    seconds: list[int] = []
    for count in (100, 400):
        time = (await call("train", **steps, steps=count))["estimate"]["time"]
        assert "a guess, as nothing was run here" in time["basis"] and "135 million parameters" in time["basis"]
        seconds.append(time["seconds"])
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=0.1) and seconds[0] > 1
    assert "time" not in (await call("train", **steps | {"algorithm": "grpo"}, steps=20))["estimate"]


def machine_of(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", "a processor", gib, gib / 2, cores=2)
    monkeypatch.setattr("flash_mcp.tools.train.processor", lambda: device)
    for module in ("flash_mcp.tools.train", "flash_mcp.tools.shared.placing"):
        monkeypatch.setattr(f"{module}.gpus", list[Device])


async def test_a_model_that_cannot_fit_the_machine_is_refused_with_the_estimate(tmp_path: Path, monkeypatch):
    push_echo(tmp_path)
    machine_of(15.0, monkeypatch)
    wanted = {"environment": "echo", "validate_only": True}
    error = await refused("train", **wanted, model="Qwen/Qwen2.5-32B-Instruct")
    assert error.code == "out_of_memory" and "32 billion parameters, by its name, need 178.8 GiB" in error.what
    assert "15 GiB of a processor" in error.what and "catalog" in error.fix
    assert (await refused("train", **wanted, model="qwen2.5-7b-instruct")).code == "out_of_memory"
    notes = (await call("train", **wanted, model="qwen2.5-1.5b-instruct"))["notes"]
    assert any("memory may run out" in note for note in notes)
    notes = (await call("train", **wanted))["notes"]
    assert not any("memory" in note for note in notes)


async def test_an_architecture_that_needs_a_gpu_is_refused_by_a_machine_without_one(tmp_path: Path, monkeypatch):
    push_echo(tmp_path)
    machine_of(15.0, monkeypatch)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "lfm2"}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": numpy.zeros(2)}, folder / "model.safetensors")
    for tool, more in (("train", {"validate_only": True}), ("evaluate", {})):
        error = await refused(tool, environment="echo", model=str(folder), **more)
        assert error.code == "model_unsupported"
    assert "lfm2 does not run without a GPU" in error.what and "docs/models.md" in error.fix


async def test_more_gpus_than_environments_may_run_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    push_echo(tmp_path)
    monkeypatch.setattr("flash_mcp.tools.shared.placing.find_gpus", lambda: list("0123"))
    wanted = {"environment": "echo", "validate_only": True}
    assert await call("train", **wanted, gpus=4)
    (home() / "settings.toml").write_text("[environments]\nat_once = 3\n")
    error = await refused("train", **wanted, gpus=4)
    assert error.code == "environments_busy" and "use gpus=3" in error.fix
    assert (await refused("train", **wanted, gpus=5)).code == "invalid_argument"
    assert await call("train", **wanted, gpus=3)


async def test_tokens_are_bounded_by_the_length_of_a_conversation(tmp_path: Path):
    push_echo(tmp_path)
    wanted = {"environment": "echo", "steps": 1, "validate_only": True}
    checked = await call("train", **wanted, max_length=100)
    assert checked["estimate"]["tokens_at_most"] == 32 * (100 - checked["estimate"]["prompt_tokens_about"])
    error = await refused("train", **wanted, max_tokens=6000)
    assert "max_length=4096" in error.what and "8192" in error.fix
    checked = await call("train", **wanted, max_tokens=6000, max_length=8000)
    assert checked["estimate"]["tokens_at_most"] == 32 * 6000

    for algorithm in ("grpo", "sft"):
        values = (await call("train", environment="echo", algorithm=algorithm, max_length=256, validate_only=True))[
            "values"
        ]
        assert values["max_tokens"] == values["max_length"] == 256


async def test_a_run_that_was_measured_at_its_end_alone_is_compared_with_its_start(tmp_path: Path):
    run, writer = started_run(tmp_path / "environment", eval_after=True)
    learn(writer, range(1, 21))
    save_adapter(writer, 20, tmp_path)
    evaluate(writer, 20, 90)
    said = (await call("status", run_id=end(writer, run.id, 20).id))["next"]
    assert f"evaluate(model='{run.id}@0', limit=100) measures the start alike" in said
    assert f"compare(base=its run_id, other='{run.id}')" in said


async def test_a_run_that_learnt_nothing_is_not_offered_for_deployment(tmp_path: Path):
    run, writer = started_run(tmp_path, steps=5)
    learn(writer, range(1, 6), grad_norm=0.0, **{"groups/uniform_share": 1.0})
    save_adapter(writer, 5, tmp_path / "saved")
    body = await call("status", run_id=end(writer, run.id, 5).id)
    assert body["run"]["outlook"].startswith("no: ") and "deploy" not in body["next"]
    assert body["next"].endswith("train again with its remedy")


# -- status ----------------------------------------------------------------------------------------


async def test_a_trend_counts_steps_however_long_the_run(tmp_path: Path):
    run, _ = started_run(tmp_path)
    with open_store().transaction():
        for step in range(1, 2001):
            metrics = {"reward/mean": 0.9 if step == 777 else step / 1e4}
            open_store().put_metrics(run.id, {"step": step, "epoch": 1, "time": 1.0, "metrics": metrics})
    trend = (await call("status", run_id=run.id))["run"]["reward"]
    assert (trend["best"], trend["over_steps"], trend["first"], trend["last"]) == (0.9, 10, 0.0005, 0.1996)


async def test_a_failed_run_shows_its_error_and_the_end_of_its_log(tmp_path: Path, html: Any):
    run, writer = started_run(tmp_path)
    write_log(run, "loading\n" * 500 + "KeyError: 'answer'\n")
    values = {"run_id": run.id, "task": "the 7th", "step": 3, "phase": None}
    error = FlashError("environment_error", "70 % of the rollouts failed", fix="mend the scorer", **values)
    writer.commit_result("failed", 3, error)
    queue.finish(open_store(), run.id, 1, "failed", step=3, error=error.to_dict())
    failure = (await call("status", run_id=run.id))["run"]["error"]
    assert (failure["code"], failure["fix"]) == ("environment_error", "mend the scorer")
    assert failure["values"] == "task='the 7th' step=3"
    assert "[environment_error task=&#39;the 7th&#39; step=3]" in html(open_store(), run.id)
    assert failure["log_tail"].endswith("KeyError: 'answer'") and len(failure["log_tail"]) < 2000


async def test_waiting_ends_when_a_step_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, writer = started_run(tmp_path)
    found: list[dict[str, Any]] = []
    looked, fingerprint = threading.Event(), waiting.fingerprint

    def look(*arguments: Any) -> Any:
        seen = fingerprint(*arguments)
        looked.set()
        return seen

    monkeypatch.setattr(waiting, "fingerprint", look)

    async def wait() -> None:
        found.append(await call("status", run_id=run.id, wait_s=30))

    started = time.monotonic()
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        assert await anyio.to_thread.run_sync(looked.wait, 20)
        learn(writer, [1])
        read_in(open_store(), run.id)
    assert found[0]["changed"] is True and found[0]["run"]["step"] == 1
    assert time.monotonic() - started < 20


async def test_a_list_of_long_lines_goes_on_on_the_next_page(tmp_path: Path):
    for _ in range(40):
        queue.label(open_store(), queued_run(tmp_path), queue.Label("n" * 60))
    first = await call("status", limit=40)
    assert first["has_more"] and "cut" not in first
    lines = [*first["runs"], *(await call("status", limit=40, cursor=first["cursor"]))["runs"]]
    assert len({line["run_id"] for line in lines}) == len(lines) == 40


async def test_a_cost_is_shown_and_limited_only_where_there_is_a_price(tmp_path: Path, flash_home: Path, html: Any):
    run, _ = started_run(tmp_path)
    open_store().execute("UPDATE main.runs SET used_s = 5400")
    view = (await call("status", run_id=run.id))["run"]
    assert view["hours"] == 1.5 and "cost" not in view
    assert (await call("catalog", kind="devices"))["spent"] == "1.50 h"
    (flash_home / "settings.toml").write_text('[cost]\nprice_per_hour = 0.5\ncurrency = "EUR"\n')
    view = (await call("status", run_id=run.id))["run"]
    assert view["cost"] == "0.75 EUR" and "1.5 h, 0.75 EUR" in progress_line(view)
    assert (await call("catalog", kind="devices"))["spent"] == "1.50 h, 0.75 EUR"
    page = html(open_store(), run.id)
    assert "<b>1.5</b> hours of work" in page and "<b>0.75 EUR</b> cost" in page
    assert (await call("train", environment="echo", max_cost=3, validate_only=True))["values"]["max_cost"] == 3


# -- rollouts --------------------------------------------------------------------------------------


async def test_pages_cover_each_rollout_and_checkpoint_once(tmp_path: Path):
    run = finished_run(tmp_path)
    for which in ("worst", "best", "random", "index"):
        seen: list[int] = []
        cursor = None
        while True:
            body = await call("rollouts", run_id=run.id, step=5, which=which, limit=3, cursor=cursor)
            seen += [row["index"] for row in body["rollouts"]]
            if not body["has_more"]:
                break
            cursor = body["cursor"]
        assert sorted(seen) == list(range(8)), which

    first = await call("checkpoints", run_id=run.id, limit=1)
    second = await call("checkpoints", run_id=run.id, limit=1, cursor=first["cursor"])
    assert [body["checkpoints"][0]["step"] for body in (first, second)] == [20, 10]
    assert (first["has_more"], second["has_more"]) == (True, False)

    body = await call("rollouts", run_id=run.id, contains="what is 7 * 3")
    assert [(row["step"], row["index"]) for row in body["rollouts"]] == [(7, 3)]
    assert (await call("rollouts", run_id=body["run_id"], contains="nowhere"))["rollouts"] == []


async def test_tool_calls_and_branches_are_searched_too(tmp_path: Path):
    rows = [sample_rollout(1, index, 0.5) for index in range(3)]
    call_of_tool = {"function": {"name": "look", "arguments": '{"at": "Moon"}'}}
    rows[1]["messages"][-1] = {"role": "assistant", "content": None, "tool_calls": [call_of_tool]}
    said = {"role": "assistant", "content": "I ask the moon."}
    rows[2]["branches"] = [{"of": 0, "after": 1, "turns": 1, "messages": [said]}]
    run = rolled_out(tmp_path, rows)
    for text, indices in (('look({"at": "moon', [1]), ("moon", [1, 2]), ("the moon", [2])):
        body = await call("rollouts", run_id=run.id, contains=text, which="index")
        assert [row["index"] for row in body["rollouts"]] == indices, text


async def test_long_transcripts_are_cut_in_the_middle_and_the_match_is_kept(tmp_path: Path):
    long = "start " + "blah " * 4000 + "NEEDLE " + "blah " * 4000 + "end"
    run = rolled_out(tmp_path, [sample_rollout(1, index, 0.5, long) for index in range(8)])
    body = await call("rollouts", run_id=run.id, limit=10, max_characters=7000)
    answers = [row["messages"][-1]["content"] for row in body["rollouts"]]
    assert len(answers) == 8
    assert all(text.startswith("start") and text.endswith("end") and "characters cut" in text for text in answers)
    assert "index=0" in body["next"] and body["cut"]
    found = await call("rollouts", run_id=run.id, contains="needle", limit=2)
    assert all("NEEDLE" in row["messages"][-1]["content"] for row in found["rollouts"])
    one = await call("rollouts", run_id=run.id, step=1, index=3, max_characters=7000)
    assert one["rollouts"][0]["index"] == 3 and len(one["rollouts"][0]["messages"][-1]["content"]) > 5000


async def test_a_conversation_of_very_many_turns_fits_and_can_be_paged_through(tmp_path: Path):
    row = sample_rollout(1, 0, 0.5)
    row["messages"] = [{"role": "assistant", "content": f"turn {number} " + "x" * 300} for number in range(120)]
    run = rolled_out(tmp_path, [row])
    seen: list[str] = []
    while len(seen) < 120:
        body = await call("rollouts", run_id=run.id, step=1, index=0, from_message=len(seen))
        shown = body["rollouts"][0]["messages"]
        assert shown
        seen += [message["content"].split(" x")[0] for message in shown]
        assert ("from_message" in body["next"]) == (len(seen) < 120)
    assert seen == [f"turn {number}" for number in range(120)]


async def test_the_calls_of_an_agent_are_shown_in_order_with_their_token_ids(tmp_path: Path):
    names = ("number", "parent", "role", "trained", "prompt_tokens", "last")
    rows = [(0, None, "", True, 3, 4), (1, 0, "judge", False, 6, 7), (2, 0, "", True, 6, 10)]
    common = {"conversation": 0, "finish": "stop", "completion_tokens": 2}
    calls = [{**common, **dict(zip(names, row, strict=True))} for row in rows]
    tokens = {"ids": [*range(11)], "forks": [[8, 5]]}
    run = rolled_out(tmp_path, [{**sample_rollout(1, 0, 0.5), "calls": calls, "tokens": tokens}])
    asked = {"run_id": run.id, "step": 1, "index": 0}
    (shown,) = (await call("rollouts", **asked))["rollouts"]
    seen = [(row["number"], row.get("role"), row["trained"], row["finish"]) for row in shown["calls"]]
    assert seen == [(0, None, True, "stop"), (1, "judge", False, "stop"), (2, None, True, "stop")]
    assert "prompt_ids" not in shown["calls"][0]
    (shown,) = (await call("rollouts", **asked, tokens=True))["rollouts"]
    assert [row["answer_ids"] for row in shown["calls"]] == [[3, 4], [6, 7], [9, 10]]
    assert shown["calls"][2]["prompt_ids"] == [0, 1, 2, 3, 4, 8]
    (listed,) = (await call("rollouts", run_id=run.id))["rollouts"]
    assert "calls" not in listed


async def test_many_calls_of_long_prompts_fit_into_the_answer(tmp_path: Path):
    call_of = {"conversation": 0, "finish": "stop", "role": "r" * 64, "trained": True, "parent": None}
    call_of |= {"prompt_tokens": 500, "completion_tokens": 8}
    calls = [{**call_of, "number": number, "last": 508 * number + 507} for number in range(60)]
    tokens = {"ids": [100_000] * 508 * 60, "forks": [[508 * number, 0] for number in range(1, 60)]}
    run = rolled_out(tmp_path, [{**sample_rollout(1, 0, 0.5), "calls": calls, "tokens": tokens}])
    body = await call("rollouts", run_id=run.id, step=1, index=0, tokens=True, max_characters=7000)
    shown = body["rollouts"][0]["calls"]
    assert len(shown) == 24 and "answer_ids" in shown[0] and "answer_ids" not in shown[-1]
    assert "later calls" in body["cut"]


async def test_the_models_own_turn_is_never_part_of_the_opening(tmp_path: Path):
    rows = [{**sample_rollout(1, 0, 0.5), "index": index} for index in range(3)]
    run = rolled_out(tmp_path, rows)
    body = await call("rollouts", run_id=run.id)
    assert [len(row["messages"]) for row in body["rollouts"]] == [1, 1, 1]
    assert [message["role"] for message in body["opening"]] == ["system", "user"]


async def test_failed_rollouts_show_what_failed(tmp_path: Path):
    row = {
        **sample_rollout(1, 0, 0.0),
        "error": {"code": "environment_error", "what": "ZeroDivisionError"},
        "finish": "error",
    }
    run = rolled_out(tmp_path, [row])
    shown = (await call("rollouts", run_id=run.id))["rollouts"][0]
    assert shown["error"] == "[environment_error] ZeroDivisionError"


@pytest.mark.parametrize(
    ("arguments", "said"), [({}, "wait_s=40) waits for the first"), ({"split": "eval"}, "no evaluation was made: ")]
)
async def test_a_run_that_has_no_rollouts_yet_says_what_to_do(tmp_path: Path, arguments: dict[str, Any], said: str):
    run, _ = started_run(tmp_path)
    body = await call("rollouts", run_id=run.id, **arguments)
    assert body["rollouts"] == [] and said in body["next"]


async def test_a_run_that_is_told_to_end_before_its_first_step_says_when_it_ends(tmp_path: Path):
    run, _ = started_run(tmp_path)
    body = await call("cancel", run_id=run.id, wait_s=0)
    assert body["state"] == "running" and "it ends before its first step" in body["next"]


@given(st.integers(0, 5000), st.lists(st.integers(0, 3000), max_size=30))
def test_room_is_shared_fairly(total: int, wanted: list[int]):
    shares = share_out(total, wanted)
    assert all(0 <= share <= wish for share, wish in zip(shares, wanted, strict=True))
    assert sum(shares) <= max(total, 0) + LEAST_PER_MESSAGE * len(wanted)
    if sum(wanted) <= total:
        assert shares == wanted


# -- checkpoints and the catalog -------------------------------------------------------------------


async def test_a_full_page_of_checkpoints_fits(tmp_path: Path):
    run, writer = started_run(tmp_path / "environment")
    for step in range(1, 31):
        save_adapter(writer, step, tmp_path)
    evaluate(writer, 0, 10)
    read_in(open_store(), run.id)
    assert (await call("checkpoints", run_id=run.id, limit=30))["checkpoints"][0]["step"] == 30


async def test_the_catalog_can_be_narrowed_and_paged():
    everything = (await call("catalog", kind="models", contains="-"))["models"]
    assert [model["name"] for model in (await call("catalog", kind="models", contains="QWEN3"))["models"]] == [
        model["name"] for model in everything if "qwen3" in model["name"]
    ]
    first = await call("catalog", kind="models", contains="-", limit=2)
    second = await call("catalog", kind="models", contains="-", limit=30, cursor=first["cursor"])
    assert first["models"] + second["models"] == everything and json.loads(to_text(first))["has_more"] is True
    assert "no cursor of catalog" in str(await refused("catalog", kind="models", cursor="newest"))


async def test_no_deployment_stands_in_a_base_models_place(tmp_path: Path):
    run, model = finished_run(tmp_path / "trained"), "smollm2-135m-instruct"
    values = {"owner": "alice", "name": model, "model": model, "run_id": run.id, "step": 20, "state": "ready"}
    open_store().add_deployment({"id": "dep-1", **values})
    assert find_subject(open_store(), model).run is None
    for name in (model, model.upper()):
        with pytest.raises(FlashError, match="base model"):
            request(open_store(), run.id, name=name)
    open_store().update_deployment("dep-1", name="mine")
    assert find_subject(open_store(), "mine").deployment == "dep-1"
    open_store().update_deployment("dep-1", state="stopped")
    with pytest.raises(FlashError, match=r"^\[unknown_model"):
        find_subject(open_store(), "mine")


# -- what is said next -----------------------------------------------------------------------------


async def test_rare_fields_come_in_settings_and_errors_name_them(tmp_path: Path):
    push_echo(tmp_path)
    fields = {"environment": "echo", "validate_only": True}
    checked = await call("train", **fields, settings={"kl_penalty_coef": 0.1, "save_every": 5})
    assert (checked["values"]["kl_penalty_coef"], checked["values"]["save_every"]) == (0.1, 5)
    error = await refused("train", **fields, settings={"beta": 0.1})
    assert error.code == "unknown_argument"
    assert "'beta'; nothing was done; did you mean 'kl_penalty_coef'?" in error.what
    error = await refused("train", **fields, settings={"top_p": 3})
    assert error.what.startswith("top_p: ")
    error = await refused("train", **fields, steps=3, settings={"steps": 4})
    assert error.what == "steps is given twice, as an argument and in settings"
    assert (await call("train", **fields, top_p=0.9))["values"]["top_p"] == 0.9


@pytest.mark.parametrize(("algorithm", "name"), [("grpo", "steps"), ("grpo", "group_size"), ("sft", "epochs")])
async def test_a_null_in_settings_is_as_if_left_out(tmp_path: Path, algorithm: str, name: str):
    push_echo(tmp_path)
    fields = {"environment": "echo", "algorithm": algorithm, "validate_only": True}
    plain = await call("train", **fields)
    checked = await call("train", **fields, settings={name: None})
    for body in (plain, checked):
        body["estimate"].pop("disk", None)  # what is free changes
    assert checked == plain


@pytest.mark.slow
async def test_a_run_with_the_same_values_that_is_alive_is_named(tmp_path: Path):
    push_echo(tmp_path)
    first = await call("train", environment="echo", steps=3)
    assert not any("same values" in note for note in first["notes"])
    other = await call("train", environment="echo", steps=4)
    assert other["notes"][0] == f"{first['run_id']}, queued, differs only in steps (3 there, 4 here)"
    again = await call("train", environment="echo", steps=3, validate_only=True)
    assert again["notes"][0].startswith(f"{first['run_id']} is queued with the same values")
    await call("cancel", run_id=first["run_id"])
    again = await call("train", environment="echo", steps=3)
    assert again["notes"][0].startswith(f"{first['run_id']} cancelled before with the same values")


@pytest.mark.slow
async def test_the_run_that_differs_least_is_named_and_one_that_differs_in_more_is_not(tmp_path: Path):
    push_echo(tmp_path)
    fields = {"environment": "echo", "validate_only": True}
    run = await call("train", environment="echo", steps=3, seed=1, name="first try")
    await call("train", environment="echo", steps=9, seed=7, learning_rate=1e-6)
    near = await call("train", **fields, steps=3, seed=2, temperature=0.5)
    about = "differs only in temperature (1.0 there, 0.5 here) and seed (1 there, 2 here)"
    assert near["notes"][0] == f"{run['run_id']} (first try), queued, {about}"
    far = await call("train", **fields, steps=5, seed=2, temperature=0.5)
    assert not any("differs only" in note for note in far["notes"])
    push_echo(tmp_path / "other", name="other")
    other = await call("train", environment="other", steps=3, seed=1, validate_only=True)
    assert not any(run["run_id"] in note for note in other["notes"])


@pytest.mark.slow
async def test_several_seeds_start_a_run_for_each_all_or_none(tmp_path: Path):
    push_echo(tmp_path / "environment")
    fields: dict[str, Any] = {"environment": "echo", "steps": 20, "name": "spread", "idempotency_key": "k"}
    started = await call("train", **fields, seeds=[3, 1, 2])
    runs = open_store().seed_runs(open_store().run(started["run_id"]))
    assert [run.training.seed for run in runs] == [1, 2, 3] and {run.name for run in runs} == {"spread"}
    assert started["run_id"] == runs[2].id and all(run.id in started["notes"][0] for run in runs)
    again = await call("train", **fields, seeds=[3, 1, 2])
    assert (again["created"], again["notes"][0]) == (False, started["notes"][0])
    assert (await refused("train", **fields, seeds=[3, 4])).code == "idempotency_conflict"
    assert (await refused("train", resume=started["run_id"], seeds=[3, 4])).code == "invalid_argument"
    assert len(open_store().runs()) == 3
    config = tmp_path / "rl.toml"
    config.write_text('environment = "echo"\nseeds = [5, 6]\n')
    assert "(seed 5)" in (await call("train", config=str(config)))["notes"][0]
    config.write_text('environment = "echo"\nseeds = [5, -6]\n')
    assert "-6" in (await refused("train", config=str(config))).what
    one = await call("train", config=str(config), seed=9)
    assert open_store().run(one["run_id"]).seed_group is None


async def test_status_and_compare_report_how_far_seeds_spread(tmp_path: Path, html: Any):
    push_echo(tmp_path / "environment")
    ids: list[str] = []
    first = (await call("train", environment="echo", steps=20, seeds=[1, 2, 3]))["run_id"]
    assert "Seeds: 3 seeds, none with a held-out success yet" in html(open_store(), first)
    for run, solved in zip(reversed(open_store().runs()), (60, 90, 75), strict=True):
        ids.append(run.id)
        view = (await call("status", run_id=run.id))["run"]
        assert view["seeds"].startswith(("3 seeds, none", "held-out success of"))
        writer = start(run.id)
        evaluate(writer, 0, 20)
        learn(writer, range(1, 21))
        evaluate(writer, 20, solved)
        end(writer, run.id, 20)
    said = (await call("status", run_id=ids[0]))["run"]["seeds"]
    spread = "held-out success of 3 of 3 seeds: mean 0.750, 95 % interval over seeds, on these tasks, 0.377 to 1.000: "
    assert said.startswith(spread) and f"{ids[1]} (seed 2) succeeded, 0.900, improved" in said
    assert said in (await call("compare", base=ids[0], other=ids[1]))["notes"]


async def test_what_is_said_next_of_an_evaluation_leads_to_its_own_transcripts(tmp_path: Path):
    run, writer = started_run(tmp_path)
    learn(writer, [1])
    rollouts = [sample_rollout(1, index, 0.0, "held out " * 2000) for index in range(3)]
    writer.evaluation(1, {"n": 3, "success": 0.0, "reward_mean": 0.0, "error_share": 0.0}, rollouts)
    read_in(open_store(), run.id)
    said = (await call("rollouts", run_id=run.id, split="eval"))["next"]
    assert f"rollouts(run_id={run.id!r}, split='eval', step=1, index=0)" in said
    longer = await call("rollouts", run_id=run.id, split="eval", step=1, index=0)
    assert f"flash://runs/{run.id}/evaluations/1" in longer["next"]
    beyond = await call("rollouts", run_id=run.id, split="eval", step=1, index=99)
    assert beyond["next"] == "this step has 3 eval rollouts: index is 0 to 2"


async def test_a_fine_tuned_run_is_not_sent_for_transcripts_that_it_does_not_have(tmp_path: Path):
    run, writer = started_run(tmp_path, algorithm="sft")
    evaluate(writer, 20, 30)
    save_adapter(writer, 20, tmp_path)
    read_in(open_store(), run.id)
    queue.finish(open_store(), run.id, 1, "succeeded", step=20)
    assert f"evaluate(model={run.id!r})" in (await call("status", run_id=run.id))["next"]
    assert "split='eval' has the others" in (await call("rollouts", run_id=run.id))["next"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, ""),
        ({"lora_rank": 8, "lora_alpha": 8}, ""),
        ({"environment_args": {"fail": False}}, ", environment_args={'fail': False}"),
        ({"algorithm": "sft"}, ", algorithm='sft'"),
        ({"max_tokens": 16}, ", max_tokens=16"),
    ],
)
async def test_going_on_from_a_run_is_a_call_that_works(tmp_path: Path, fields: dict[str, Any], more: str):
    run, writer = started_run(tmp_path, **fields)
    save_adapter(writer, 5, tmp_path / "saved", rank=fields.get("lora_rank", 32), alpha=fields.get("lora_alpha", 64))
    read_in(open_store(), run.id)
    said = (await call("checkpoints", run_id=run.id))["next"]
    assert f"train(environment='echo', init_from_adapter='{run.id}@5'{more})" in said
    checked = await call("train", **named_calls(said)[-1][1], validate_only=True)
    assert checked["warm_start"] == f"{run.id}@5"
    assert {name: checked["values"][name] for name in fields} == fields


async def test_a_long_run_keeps_its_held_out_losses(tmp_path: Path):
    run, _ = started_run(tmp_path, algorithm="sft", steps=810)
    with open_store().transaction():
        for step in range(1, 811):
            held_out = {"eval_loss": 1.0 + step / 1000} if step % 50 == 0 else {}
            metrics = {"loss": 2.0 - step / 1000, **held_out}
            open_store().put_metrics(run.id, {"step": step, "epoch": 1, "time": 1.0, "metrics": metrics})
    view = (await call("status", run_id=run.id, detail="detailed"))["run"]
    assert [flag["name"] for flag in view["flags"]] == ["overfitting"] and "eval_loss" in view["metrics"]


async def test_a_long_run_is_judged_on_all_of_it(tmp_path: Path):
    run, _ = started_run(tmp_path, steps=1000)
    with open_store().transaction():
        for step in range(1, 1001):  # it learns, and has come to rest for the newest 600 steps
            share = min(0.75, 0.1 + step / 600)
            metrics = {"reward/mean": share, "success/rate": share, "entropy": 1.0}
            open_store().put_metrics(run.id, {"step": step, "epoch": 1, "time": 1.0, "metrics": metrics})
    view = (await call("status", run_id=run.id))["run"]
    assert "flags" not in view and view["outlook"].startswith("yes: reward went from 0.1")
    assert "over steps 1 to 1000" in view["outlook"]


@pytest.mark.slow
async def test_a_model_that_can_show_no_tools_is_refused_for_tasks_with_tools(tmp_path: Path, tiny_model: Path):
    await call("env_push", name="tooled", folder=str(TOOL_CALCULATOR))
    given = {"environment": "tooled", "steps": 2, "validate_only": True}
    assert await call("train", **given, model=str(tiny_model))
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    error = await refused("train", **given, model=str(folder))
    assert (error.code, error.values["model"]) == ("tools_unsupported", str(folder))


async def test_a_distillation_pins_its_teacher_and_keeps_it_from_removal(tmp_path: Path):
    earlier = finished_run(tmp_path)
    fields = {"environment": "echo", "algorithm": "distill", "lora_rank": 4, "lora_alpha": 8}
    started = await call("train", **fields, teacher=f"{earlier.id}@10", batch_size=2)
    assert started["estimate"]["rollouts"] == 50 * 2
    store = open_store()
    teacher = queue.job(store.run(started["run_id"]))["teacher"]
    assert (teacher["run_id"], teacher["step"]) == (earlier.id, 10)
    assert is_file(teacher["path"], "adapter_config.json")
    assert earlier.id in {referred for referred, _ in retention.referred(store)}
    with pytest.raises(FlashError, match="needs its adapter"):
        removal.remove(store, earlier.id)
    larger = await call("train", **fields, teacher="qwen3-4b", model="qwen3-0.6b", validate_only=True)
    assert larger["values"]["teacher"] == "qwen3-4b"


async def test_a_caller_elsewhere_does_not_learn_whether_a_teacher_s_folder_exists(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "adapter_config.json").touch()
    open_store()
    with acting_as(Caller("alice")):
        push_echo(tmp_path / "echo")
        for name in ("there", "nowhere"):
            fields = {"algorithm": "distill", "teacher": str(tmp_path / name)}
            assert (await refused("train", environment="echo", **fields)).code == "local_only"
