"""A checkpoint taken home: the files are read back by the libraries that others use."""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import anyio
import gguf
import pytest
import torch
from mcp import Client
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import worker.extensions.export.program
from flash_mcp.cli import main
from flash_mcp.extensions.export import files
from flash_mcp.protocol.base_models import with_tools
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.result_model import ExportJob
from flash_mcp.server.mcp_server import server
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from tests.forked import ForkedOutput, run_forked
from tests.model_rows import make_model
from tests.samples import end, evaluate, learn, read_in, save_adapter, started_run
from tests.test_extending import lab
from tests.tiny import CHATML
from tests.waiting import WAIT_S
from worker.extensions.export import gguf_file
from worker.model_files import ModelFiles

__all__ = ["lab"]
pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, flash_home: Path, tiny_model: Path, tiny_adapter: Path) -> Run:
    """A finished run of the tiny model whose newest checkpoint is the tiny adapter."""
    run, writer = started_run(tmp_path / "environment", model=str(tiny_model), lora_rank=4, lora_alpha=8)
    evaluate(writer, 0, 20)
    learn(writer, range(1, 21))
    writer.commit_checkpoint(20, tiny_adapter, {"reward/mean": 0.5})
    evaluate(writer, 20, 90)
    return end(writer, run.id, 20)


@pytest.fixture(autouse=True)
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start exports and llama.cpp with their packages imported."""
    monkeypatch.setattr(gguf_file, "subprocess", SimpleNamespace(run=run_forked))
    monkeypatch.setattr(files, "subprocess", SimpleNamespace(Popen=ForkedOutput, PIPE=PIPE))


def export(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main.main(["export", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main.main(["export", *map(str, words)]) != 0
    return capsys.readouterr().err.splitlines()[-1]


def test_the_merged_model_is_the_one_that_was_trained(run: Run, tmp_path, tiny_model: Path, tiny_adapter: Path, capsys):
    folder = tmp_path / "merged"
    written = export(capsys, run.id, "--to", folder)
    assert written["folder"] == str(folder)
    assert written["agreement"]["tokens"] == written["agreement"]["equal"] > 0
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        untrained = base(ids).logits
        trained = PeftModel.from_pretrained(base, tiny_adapter)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    assert (merged - trained).abs().max() < 0.1 * (trained - untrained).abs().max()
    assert AutoTokenizer.from_pretrained(folder).chat_template == with_tools(CHATML)


def test_the_model_card_has_lineage_and_held_out_figures_with_intervals(run: Run, tmp_path: Path, capsys):
    queue.label(open_store(), run, queue.Label("a | name", "# no heading\n\n<b>"))
    written = export(capsys, f"{run.id}@20", "--format", "adapter", "--to", tmp_path / "adapter")
    page = (tmp_path / "adapter" / "README.md").read_text()
    assert "| 0 (before training) | 100 | 0.200 | 0.133 to 0.289 |" in page
    assert "| 20 | 100 | 0.900 | 0.826 to 0.945 |" in page and run.environment_reference in page
    assert open_store().checkpoint(run.id).digest in page and written["base_digest"] in page
    assert "\n    a | name\n    # no heading\n\n    <b>\n" in page


@pytest.mark.parametrize(
    ("name", "kind"), [("f16", gguf.GGMLQuantizationType.F16), ("q8_0", gguf.GGMLQuantizationType.Q8_0)]
)
def test_a_gguf_file_has_weights_tokenizer_and_template(
    run: Run, tmp_path: Path, tiny_model: Path, capsys, name: str, kind: gguf.GGMLQuantizationType
) -> None:
    folder = tmp_path / "gguf"
    written = export(capsys, run.id, "--format", f"gguf-{name}", "--to", folder)
    agreement = written["agreement"]
    assert agreement["equal"] > 0.8 * agreement["tokens"] > 0
    if name == "f16":
        assert agreement["equal"] == agreement["tokens"]
    path = folder / f"{run.id}-20-{name}.gguf"
    reader = gguf.GGUFReader(path)
    assert {tensor.tensor_type for tensor in reader.tensors} == {kind, gguf.GGMLQuantizationType.F32}
    assert reader.fields["tokenizer.chat_template"].contents() == with_tools(CHATML)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokens == tokenizer.convert_ids_to_tokens(range(len(tokens)))
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "granite"])
def test_llama_cpp_computes_the_same_from_a_file_of_another_family(name: str, tmp_path: Path) -> None:
    base = make_model(name, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    gguf_file.check(ModelFiles(base))
    path = tmp_path / "tiny.gguf"
    gguf_file.write(base, path, "f16")
    prompt = list(range(40))
    answer = gguf_file.answers(path, [prompt], 16)[0]
    assert len(answer) == 16
    with torch.no_grad():
        logps_LV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen_L1 = logps_LV.gather(1, torch.tensor(answer)[:, None])
    assert (logps_LV.max(1, keepdim=True).values - chosen_L1).max() < 0.02


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("config.json", {"architectures": ["NobodysForCausalLM"]}, "Nobodys.* is not supported"),
        ("config.json", {"sliding_window": 32}, "no sliding window for llama"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "WhitespaceSplit"}}, "a way of its own"),
    ],
)
def test_what_llama_cpp_does_not_know_is_refused_before_weights_are_read(file, fields, reason, tmp_path, monkeypatch):
    base = make_model("llama", tmp_path / "base")
    path = base / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    job = ExportJob(kind="gguf-f16", name="tiny", model=str(base), folder=tmp_path, prompts=[])
    with pytest.raises(FlashError, match=reason) as caught:
        worker.extensions.export.program.export(job)
    assert caught.value.code == "export_unsupported" and caught.value.fix == "export it as merged or adapter"


def test_a_file_that_holds_another_model_is_refused(tmp_path: Path) -> None:
    base = make_model("smollm3", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["no_rope_layers"] = [0, 1, 1, 1]  # llama.cpp leaves positions out of each fourth layer
    (base / "config.json").write_text(json.dumps(config))
    (tmp_path / "files").mkdir()
    prompts = [[{"role": "user", "content": "What is 3 + 4?"}]]
    job = ExportJob(kind="gguf-f16", name="tiny", model=str(base), folder=tmp_path / "files", prompts=prompts)
    with pytest.raises(FlashError, match=r"^\[export_unsupported.*another model"):
        worker.extensions.export.program.export(job)
    with pytest.raises(FlashError, match="there is no adapter to write"):
        worker.extensions.export.program.export(job.model_copy(update={"kind": "adapter"}))


def test_an_adapter_names_the_models_hub_and_says_that_its_weights_differ(tmp_path: Path, flash_home: Path, capsys):
    run, writer = started_run(tmp_path / "environment")
    learn(writer, range(1, 3))
    save_adapter(writer, 2, tmp_path)
    read_in(open_store(), run.id)
    written = export(capsys, run.id, "--format", "adapter", "--to", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "are not those of HuggingFaceTB/SmolLM2-135M-Instruct" in written["warnings"][0]
    assert written["warnings"][0] in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(run: Run, tmp_path: Path, tiny_model: Path, capsys):
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine").touch()
    assert "[invalid_argument" in refusal(capsys, run.id, "--to", here)
    assert "[invalid_argument" in refusal(capsys, str(tiny_model), "--to", tmp_path / "no")
    assert "[unknown_checkpoint" in refusal(capsys, f"{run.id}@7", "--to", tmp_path / "no")
    config = tiny_model / "config.json"
    kept = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(kept), "sliding_window": 32}))
        refused = refusal(capsys, run.id, "--format", "gguf-f16", "--to", tmp_path / "no")
    finally:
        config.write_text(kept)
    assert "llama.cpp has no sliding window for llama" in refused
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".export-*"))
    shutil.rmtree(here)


def test_only_the_files_of_this_export_are_pushed_again(run: Run, tmp_path: Path, capsys, monkeypatch):
    pushed: list[Path] = []
    monkeypatch.setattr(files, "push", lambda folder, name: pushed.append(folder) or name)
    folder = tmp_path / "files"
    words = ("--to", folder, "--push-to", "me/dates")
    for _ in range(2):
        export(capsys, run.id, "--format", "adapter", *words)
    assert pushed == [folder, folder]
    assert "something is there already" in refusal(capsys, run.id, "--format", "merged", *words)
    (folder / "README.md").write_text(f"# Another project\n\nIt uses {run.id}-20.\n")
    assert "something is there already" in refusal(capsys, run.id, "--format", "adapter", *words)
    assert len(pushed) == 2


def test_a_format_of_another_package_gets_the_merged_model(lab: Any, run: Run, tmp_path: Path, tiny_adapter: Path):
    written = tmp_path / "out"
    written.mkdir()
    job = ExportJob(kind="shapes", name="tiny", model=run.model, adapter=tiny_adapter, folder=written, prompts=[])
    assert worker.extensions.export.program.export(job).agreement is None
    shapes = json.loads((written / "shapes.json").read_text())
    assert len(shapes) > 5 and not any("lora" in name for name in shapes)


async def exported(run: Run, *, kind: str = "adapter", **arguments: Any) -> dict[str, Any]:
    """The result of the tool, once the export is ready."""
    with anyio.fail_after(WAIT_S):
        async with Client(server) as client:
            while True:
                given = {"run_id": run.id, "export": kind, **arguments}
                result = await client.call_tool("checkpoints", given)
                assert not result.is_error, result.content[0].text
                if result.structured_content["export"]["state"] == "ready":
                    return result.structured_content


async def test_a_tool_call_starts_an_export_and_the_same_call_finds_it(run: Run) -> None:
    body = await exported(run)
    written = contents(body)
    assert {"README.md", "adapter_model.safetensors"} <= {*written}
    assert [row["step"] for row in body["checkpoints"]] == [20]
    assert (await exported(run))["export"] == body["export"] and contents(body) == written
    assert "unknown_argument" in (await refused(run.id, export="gguf-f16", step=3))
    assert "[unknown_checkpoint" in await refused(f"{run.id}@3", export="merged")


def contents(body: dict[str, Any]) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in Path(body["export"]["folder"]).iterdir()}


async def refused(run_id: str, **arguments: Any) -> str:
    """The error of the tool, at once or of an export that has failed."""
    given = {"run_id": run_id, **arguments}
    with anyio.fail_after(WAIT_S):
        async with Client(server) as client:
            while True:
                result = await client.call_tool("checkpoints", given)
                if result.is_error:
                    return result.content[0].text
                assert result.structured_content["export"]["state"] == "running"


@pytest.mark.long
async def test_an_export_is_pushed_to_a_private_model_at_the_hub(run: Run, hub: dict[str, Any]) -> None:
    body = await exported(run, push_to="me/dates")
    assert body["export"]["pushed"] == f"{hub['address']}/me/dates"
    made = hub["made"]
    assert (made["organization"], made["name"]) == ("me", "dates")
    assert made.get("private") is True or made.get("visibility") == "private"
    assert hub["files"] == contents(body)
    error = await refused(run.id, export="adapter", push_to="me/other")
    assert error.startswith("[hub_unreachable") and "is written" in error and "HF_TOKEN" in error


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The hub's side of an upload: what was made there, and the files of the commit."""
    seen: dict[str, Any] = {"files": {}}

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            if b"other" in text or "other" in self.path:
                self.send_error(403)
            elif self.path == "/api/repos/create":
                made = json.loads(text)
                seen["made"] = made
                self.answer({"url": f"{seen['address']}/me/dates"})
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                wanted = json.loads(text)["files"]
                modes = [{"path": each["path"], "uploadMode": "regular"} for each in wanted]
                self.answer({"files": [{**each, "shouldIgnore": False} for each in modes]})
            elif "/commit/" in self.path:
                for line in map(json.loads, text.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        seen["files"][line["value"]["path"]] = content
                self.answer({"commitUrl": f"{seen['address']}/me/dates/commit/1", "commitOid": "1"})
            else:
                self.send_error(404)

        def do_GET(self) -> None:
            self.answer({"id": "me/dates", "sha": "0", "siblings": []})

        def answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as listening:
        seen["address"] = f"http://127.0.0.1:{listening.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", seen["address"])
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield seen
        listening.shutdown()
        thread.join()
