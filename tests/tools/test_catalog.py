"""Which model a name stands for, without loading it."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from flash_mcp.protocol.base_models import MODELS, find, with_tools
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.supervisor.launch.devices import Device
from flash_mcp.tools.catalog import ModelView, catalog
from flash_mcp.tools.shared.truncation import RESULT_CHARACTERS, to_text
from tests.samples import finished_run


def test_every_card_says_what_a_user_has_to_know() -> None:
    assert DEFAULT_MODEL in MODELS
    for card in MODELS.values():
        assert card.scheme in ("pypi", "hub") and card.address
        assert card.parameters and card.context and card.tools and card.licence
        assert card.name == card.name.lower() and (card.active or 0) < card.parameters
        if card.unchecked:
            assert set(card.unchecked.split(", ")) <= set(ModelView.model_fields)


def test_the_catalog_shows_each_model_and_what_of_it_was_not_checked_within_one_result() -> None:
    result = catalog(kind="models", contains="-")
    assert not result.has_more and len(to_text(result.model_dump())) < RESULT_CHARACTERS
    models = {model.name: model for model in result.models or []}
    assert list(models) == list(MODELS)
    mixture = models["gpt-oss-20b"]
    assert (mixture.source, mixture.active, mixture.thinking) == ("hub:openai/gpt-oss-20b", "3.6B", True)
    assert mixture.unchecked == "active, context" and "deployments only" in (mixture.notes or "")
    assert models["qwen3-4b"].unchecked is None


def on_a_machine_of(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", "a processor", gib, gib, cores=2)
    monkeypatch.setattr("flash_mcp.tools.shared.placing.processor", lambda: device)
    monkeypatch.setattr("flash_mcp.tools.shared.placing.gpus", list[Device])


@pytest.mark.needs("engines")
def test_each_model_says_whether_it_fits_here_and_elsewhere(flash_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_of(23.5, monkeypatch)
    flash_home.mkdir()
    (flash_home / "targets.toml").write_text(
        f'[lab]\nengine = "slurm"\nstorage = "{flash_home}/lab"\n'
        'cards = {kind = "gpu", name = "H100", memory_gib = 80}\n'
    )
    shown = catalog(kind="models")
    assert shown.not_fitting == {"too large": ["gpt-oss-20b"]} and len(shown.models or []) == len(MODELS) - 1
    fits = {model.name: model.fits for model in catalog(kind="models", contains="-").models or []}
    assert fits["smollm2-1.7b-instruct"] == "yes; lab: yes"
    assert fits["qwen3-4b"] == "no: 22.5 GiB of weights exceed 85% of 23.5 GiB of a processor; lab: yes"
    assert fits["lfm2.5-1.2b-instruct"] == "no: it needs a GPU; lab: yes"
    assert fits["gpt-oss-20b"] == "no: 117.3 GiB of weights exceed 85% of 23.5 GiB of a processor"
    (flash_home / "targets.toml").unlink()
    assert (catalog(kind="models").not_fitting or {})["it needs a GPU"] == ["lfm2.5-1.2b-instruct"]


def test_a_model_that_the_catalog_does_not_name_is_shown_by_its_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_of(23.5, monkeypatch)
    (model,) = catalog(kind="models", contains="allenai/OLMo-2-7B").models or []
    assert (model.source, model.parameters, model.unchecked) == ("hub:allenai/OLMo-2-7B", "7B", "parameters")
    assert model.fits.startswith("no: 39.1 GiB") and model.step is None
    (model,) = catalog(kind="models", contains="someone/some-model").models or []
    assert model.fits.startswith("not known")
    nothing = catalog(kind="models", contains="no/such/model")
    assert nothing.models == [] and "leave contains out" in nothing.next
    (model,) = catalog(kind="models", contains="Qwen/Qwen3-0.6B").models or []
    assert model.name == "qwen3-0.6b"


def test_a_caller_elsewhere_sees_no_model_folder_of_the_server(tiny_model: Path) -> None:
    (model,) = catalog(kind="models", contains=str(tiny_model)).models or []
    assert model.source == f"folder:{tiny_model}"
    with acting_as(Caller("alice")):
        assert catalog(kind="models", contains=str(tiny_model)).models == []


def test_steps_that_a_run_measured_stand_beside_its_model_and_its_machine(tmp_path: Path, flash_home: Path) -> None:
    run = finished_run(tmp_path)
    (flash_home / "settings.toml").write_text('[cost]\nprice_per_hour = 1.8\ncurrency = "EUR"\n')
    models = {model.name: model for model in catalog(kind="models").models or []}
    text = f"2 s for 32 conversations (grpo, {run.id}), 100 steps 0.10 EUR"
    assert models[DEFAULT_MODEL].step == f"local: {text}" and models["qwen3-0.6b"].step is None
    devices = catalog(kind="devices").devices or []
    assert devices[-1].kind == "cpu"
    for device in devices:
        assert (device.price_per_hour, device.step) == (1.8, f"{DEFAULT_MODEL}: {text}")


def test_callers_learn_who_they_are_and_what_they_may(tmp_path: Path) -> None:
    (who,) = catalog(kind="whoami").whoami or []
    assert (who.name, who.access, who.secrets, who.targets, who.quotas) == ("local", "write", None, ["local"], None)
    with acting_as(Caller("alice", access="read", secrets=frozenset({"JUDGE_KEY"}))):
        (who,) = catalog(kind="whoami").whoami or []
    assert (who.name, who.access, who.secrets) == ("alice", "read", ["JUDGE_KEY"])
    assert who.quotas and who.quotas == {
        "queued_runs": "0 of 20", "environments": "0 B of 2.1 GB", "requests_per_minute": "240",
        "deployments": "0 of 8",
    }  # fmt: skip


def test_a_hub_id_stands_for_itself_or_for_the_card_that_names_it() -> None:
    assert find(" SmolLM2-135M-Instruct ") is MODELS["smollm2-135m-instruct"]
    assert find("someone/some-model.v2").source == "hub:someone/some-model.v2"
    commit = "c0ffee" + "0" * 34
    card = find(f"Qwen/Qwen3-0.6B@{commit}")
    expected = (f"qwen3-0.6b@{commit}", "Qwen/Qwen3-0.6B", commit, True)
    assert (card.name, card.address, card.commit, card.thinking) == expected and find(card.name) == card
    for no_commit in (f"smollm2-135m-instruct@{commit}", "someone/some-model@main"):
        with pytest.raises(FlashError, match="unknown_model"):
            find(no_commit)
    assert find("Qwen/Qwen3-0.6B") is MODELS["qwen3-0.6b"]


@pytest.mark.parametrize("name", ["smollm-135m", "qwen3", "a/b/c", "", "no such model"])
def test_an_unknown_name_is_told_with_its_neighbours_and_the_alternatives(name: str) -> None:
    with pytest.raises(FlashError) as caught:
        find(name)
    assert caught.value.code == "unknown_model"
    assert "smollm2-135m-instruct" in caught.value.fix and "hub id" in caught.value.fix
    if name == "smollm-135m":
        assert "did you mean 'smollm2-135m-instruct'" in caught.value.what


def test_a_folder_is_described_from_its_files(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  seconds that only this test needs

    card = find(str(tiny_model))
    assert card.name == str(tiny_model) and card.scheme == "folder"
    assert (card.context, card.tools, card.thinking) == (4096, "ours", False)
    assert card.parameters == AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()


def test_a_relative_folder_is_named_absolutely(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_model.parent)
    assert find(f"./{tiny_model.name}").name == find(tiny_model.name).name == str(tiny_model)


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def without_places(folder: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: shutil.rmtree(folder), "there is no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "its config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "its config.json is no JSON object"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights"),
        (without_template, "no chat template"),
        (cut_short, "model.safetensors is cut short"),
        (overwrite, "model.safetensors is not a safetensors file"),
        (without_places, "model.safetensors is not a safetensors file"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_name(tiny_model: Path, tmp_path: Path, damage, why: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    with pytest.raises(FlashError, match=why) as caught:
        find(str(folder))
    assert caught.value.code == "unknown_model" and caught.value.values["folder"] == str(folder)


def test_a_template_within_the_tokenizer_s_config_counts(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    template = (folder / "chat_template.jinja").read_text()
    without_template(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template + "{{ enable_thinking }}"}))
    assert find(str(folder)).thinking


def test_a_card_says_whose_template_shows_tools(tiny_model: Path, tmp_path: Path) -> None:
    assert find("smollm2-135m-instruct").tools == find(str(tiny_model)).tools == "ours"
    assert find("qwen3-0.6b").tools == "own"
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    template = folder / "chat_template.jinja"
    template.write_text(with_tools(template.read_text()))
    assert find(str(folder)).tools == "own"
    template.write_text("{{ messages }}")
    assert find(str(folder)).tools is None
    without_template(folder)
    path = folder / "tokenizer_config.json"
    named = [{"name": "other", "template": ""}, {"name": "default", "template": "<|im_start|>"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    assert find(str(folder)).tools == "ours"
