"""Engine and trainer are compared before the first step."""

import importlib.metadata
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import RunSpec, resolve
from tests.places import AGENT_VOWELS, VOWELS
from worker import handshake
from worker.adapter import save_adapter
from worker.engine.vllm import Sync, VllmEngine
from worker.handshake import agreeing_engine, check_effect, record_of
from worker.model import default_sync
from worker.model_files import ModelFiles
from worker.process import PROCESS_SETTINGS
from worker.training.policy import load_policy

LENGTH = 256


@pytest.fixture(scope="module")
def engines(fp32_model: Path) -> Iterator[dict[Sync, VllmEngine]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PROCESS_SETTINGS.items():
            patch.setenv(name, value)
        yield {
            way: VllmEngine(
                ModelFiles(fp32_model), max_length=LENGTH, max_num_seqs=4, lora_rank=8, sync=way, dtype="float32"
            )
            for way in ("merged", "adapter")
        }


@pytest.fixture
def policy(fp32_model: Path) -> Any:
    return load_policy(ModelFiles(fp32_model), rank=8, alpha=16, seed=0, dtype=torch.float32)


def shaken(engines, policy, model, record=lambda way: None) -> tuple[VllmEngine, list[tuple[str, str]]]:
    events: list[tuple[str, str]] = []
    engine = agreeing_engine(
        engines.__getitem__, ["merged", "adapter"], policy, ModelFiles(model), LENGTH,
        lambda kind, text: events.append((kind, text)), record,
    )  # fmt: skip
    return engine, events


def test_an_engine_that_computes_what_the_trainer_does_is_taken_and_the_policy_is_left_alone(
    engines: dict[Sync, VllmEngine], policy: Any, fp32_model: Path
) -> None:
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    attention = policy.get_base_model().config._attn_implementation
    engine, events = shaken(engines, policy, fp32_model)
    assert engine is engines["merged"]
    ((kind, text),) = events
    assert kind == "handshake" and text.startswith("engine and trainer agree, sync=merged")
    assert all(torch.equal(before[name], weight) for name, weight in policy.named_parameters())
    assert policy.get_base_model().config._attn_implementation == attention and policy.training


def refuse(policy: Any) -> None:
    raise ValueError("expected target modules in {'o_proj'}")


def test_what_was_measured_is_not_measured_again_until_something_that_decides_it_changes(
    engines: dict[Sync, VllmEngine], policy: Any, fp32_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "handshakes"
    folder.mkdir()
    (folder / "of another version").touch()
    os.utime(folder / "of another version", (0, 0))
    record = partial(record_of, folder, ModelFiles(fp32_model), policy, LENGTH)
    _, ((_, measured),) = shaken(engines, policy, fp32_model, record)
    kept = record("merged")
    assert list(folder.iterdir()) == [kept]
    with monkeypatch.context() as patch:
        patch.setattr(engines["merged"], "load_policy", refuse)
        engine, ((kind, told),) = shaken(engines, policy, fp32_model, record)
        assert engine is engines["merged"]
        assert kind == "handshake" and told.startswith(measured) and "measured on 20" in told
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_DIST_IDENT", "another process's")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "another process's")
        assert record("merged") == kept
    others = [record("adapter"), record_of(folder, ModelFiles(fp32_model), policy, LENGTH - 1, "merged")]
    wider = load_policy(ModelFiles(fp32_model), rank=4, alpha=16, seed=0, dtype=torch.float32)
    others.append(record_of(folder, ModelFiles(fp32_model), wider, LENGTH, "merged"))
    for target, name, value in (
        (os, "environ", {**os.environ, "VLLM_CPU_SGL_KERNEL": "1"}),
        (torch, "get_num_threads", lambda: 99),
        (importlib.metadata, "version", lambda package: "0"),
        (handshake, "PROCESSOR", ()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            others.append(record("merged"))
    os.utime(fp32_model / "config.json", ns=(0, 0))
    others.append(record("merged"))
    assert len({kept, *others}) == 1 + len(others)
    next(weight for name, weight in policy.named_parameters() if "lora_B" in name).data += 1
    assert record("merged") is None, "what an adapter learned is always tried"


def without(leaf: str, load: Any) -> Any:
    """`load_policy` that loses the adapters of some layers."""

    def load_policy(policy: Any) -> None:
        lost = [module.weight for name, module in policy.named_modules() if f"{leaf}.lora_B.d" in name]
        kept = [weight.clone() for weight in lost]
        for weight in lost:
            weight.zero_()
        load(policy)
        for weight, own in zip(lost, kept, strict=True):
            weight.copy_(own)

    return load_policy


def test_where_one_way_of_a_sync_loses_layers_the_other_is_taken(engines, policy, fp32_model, monkeypatch):
    merged = engines["merged"]
    monkeypatch.setattr(merged, "load_policy", without("down_proj", merged.load_policy))
    engine, events = shaken(engines, policy, fp32_model)
    assert engine is engines["adapter"] and [kind for kind, _ in events] == ["handshake", "warning"]
    assert "sync=merged" in events[1][1] and "adapters of down_proj differ" in events[1][1]


def test_where_both_are_wrong_the_refusal_names_the_layers_or_what_the_engine_said(
    engines: dict[Sync, VllmEngine], policy: Any, fp32_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = engines["merged"]
    monkeypatch.setattr(merged, "load_policy", without("v_proj", merged.load_policy))
    monkeypatch.setattr(engines["adapter"], "load_policy", refuse)
    with pytest.raises(FlashError, match=r"model_unsupported.*adapters of v_proj differ") as caught:
        shaken(engines, policy, fp32_model)
    assert "sync=adapter: ValueError: expected target modules" in caught.value.what


def test_an_adapter_whose_layers_have_other_names_is_refused_instead_of_ignored(engines, policy, fp32_model, tmp_path):
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=1e-5)  # less than any text shows
    save_adapter(policy, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(fp32_model)
    check_effect(engines["adapter"], tmp_path, tokenizer)
    path = tmp_path / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({name.replace("layers.", "blocks."): value for name, value in weights.items()}, path)
    with pytest.raises(FlashError, match="without effect"):
        check_effect(engines["adapter"], tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("environment", "tokens", "way"),
    [(VOWELS, 512, "merged"), (VOWELS, 511, "adapter"), (AGENT_VOWELS, 512, "adapter")],
)
def test_a_card_gets_merged_weights_where_turns_make_up_for_the_merge(environment, tokens, way, monkeypatch) -> None:
    """And no agent may ask the base model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = resolve(RunSpec.model_validate({"environment": "e", "max_tokens": tokens})).spec
    job = {"environment": {"path": str(environment)}}
    assert default_sync(torch.bfloat16, job, spec, trains=True) == way
    assert default_sync(torch.bfloat16, job, spec, trains=False) == "adapter"
    assert default_sync(torch.float32, job, spec, trains=True) == "merged"
