"""targets.toml, and the commands that write it."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.cli.main import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.targets import (
    FILE,
    Cards,
    TargetSettings,
    find_target,
    new_target,
    note_cards,
    remove_target,
    targets,
    write_target,
)

SLURM: dict[str, Any] = {"engine": "slurm", "storage": "/shared/flash"}


def test_without_a_file_there_are_no_targets(tmp_path: Path) -> None:
    assert targets(tmp_path) == {}
    with pytest.raises(FlashError, match="no target 'lab'") as caught:
        find_target(tmp_path, "lab")
    assert caught.value.code == "unknown_target"


def test_what_was_added_is_read_back_and_what_is_removed_leaves_the_rest(tmp_path: Path) -> None:
    values = {
        **SLURM,
        "options": ["--gres=gpu:1", '--comment="two words"'],
        "env": {"A": "x y", "B": "="},
        "slots": 3,
        "price_per_hour": 1.5,
    }
    first = new_target(tmp_path, "lab", values)
    assert targets(tmp_path) == {}
    write_target(tmp_path, "lab", first)
    elsewhere = {**SLURM, "storage": "s3://bucket/flash/"}
    write_target(tmp_path, "other", new_target(tmp_path, "other", elsewhere))
    (tmp_path / FILE).write_text(f"# by hand\n{(tmp_path / FILE).read_text()}")
    assert find_target(tmp_path, "lab") == first == TargetSettings(**values)
    assert find_target(tmp_path, "other").folder_of("run-1") == "s3://bucket/flash/run-folders/run-1"
    remove_target(tmp_path, "lab")
    assert list(targets(tmp_path)) == ["other"]
    assert (tmp_path / FILE).read_text().startswith("# by hand\n")


def test_any_name_and_text_of_a_target_is_read_back(tmp_path: Path) -> None:
    resources = {"accelerator_type:A100": 0.01, "a.b": 1.0}
    fields = {
        "engine": "ray",
        "storage": "/s",
        "address": "http://head",
        "resources": resources,
        "env": {"NOTE": "🚀 ü"},
    }
    added = new_target(tmp_path, "lab", fields)
    write_target(tmp_path, "lab", added)
    assert find_target(tmp_path, "lab") == added


def test_a_number_that_toml_writes_otherwise_is_refused(tmp_path: Path) -> None:
    fields = {"engine": "ray", "storage": "/s", "address": "http://head", "resources": {"GPU": float("inf")}}
    with pytest.raises(FlashError, match="a finite number"):
        new_target(tmp_path, "lab", fields)


RAY = "[lab]\nengine = 'ray'\nstorage = '/s'\naddress = 'http://head'\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[lab]\nengine = 'pbs'\nstorage = '/s'", "engine: no installed package brings 'pbs'"),
        ("[lab]\nengine = 'ray'\nstorage = '/s'", "Ray needs an address"),
        ("[lab]\nengine = 'sky'\nstorage = '/s'", "SkyPilot needs an address"),
        (f"{RAY}resources = {{ GPU = 'a' }}", "Ray takes numbers, and GPU is 'a'"),
        ("[lab]\nengine = 'slurm'\nstorage = 'here'", "storage: name a URL"),
        ("[lab]\nengine = 'slurm'", "storage: Field required"),
        ("[lab]\nengine = 'slurm'\nstorage = '/s'\ncolour = 1", "colour: Extra inputs"),
        ("[local]\nengine = 'slurm'\nstorage = '/s'", "'local' cannot be a target's name"),
        ("[lab]\nengine = 'slurm'\nstorage = '/s'\nenv = {'a b' = '1'}", "'a b' is no name"),
        (
            "[lab]\nengine = 'slurm'\nstorage = '/s'\ncards = {name = 'a', memory_gib = 0}",
            "cards.memory_gib: Input should be greater than 0",
        ),
        (f"{RAY}setup = 'uv'\npython = '/opt/my python/bin/python3'", "no command: quote a path that has spaces"),
        (f'{RAY}python = "\'/opt/python"', "python: No closing quotation"),
        ("lab = 1", "lab is no table"),
        ("[lab", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong_in_it(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FlashError) as caught:
        targets(tmp_path)
    assert caught.value.code == "targets_invalid"
    assert says in str(caught.value)


def test_what_the_nodes_have_is_noted_in_the_table_and_all_else_stays(tmp_path: Path) -> None:
    for name in ("lab", "other"):
        write_target(tmp_path, name, new_target(tmp_path, name, SLURM))
    path = tmp_path / FILE
    path.write_text(path.read_text().replace("[lab]", "[lab]  # ours"))
    cards = Cards(name='an "A100"', memory_gib=80.0, count=8)
    note_cards(tmp_path, "lab", cards)
    assert find_target(tmp_path, "lab") == TargetSettings(**SLURM, cards=cards)
    assert find_target(tmp_path, "other") == TargetSettings(**SLURM)
    assert path.read_text().startswith("[lab]  # ours\ncards = ")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_the_nodes_have_is_noted_in_no_table_below_that_of_a_target(tmp_path: Path, order: Sequence[int]) -> None:
    tables = ('[lab]\nengine = "slurm"\nstorage = "/shared/flash"\n', '[lab.env]\nNAME = "value"\n')
    (tmp_path / FILE).write_text("".join(tables[number] for number in order))
    cards = Cards(name="A100", memory_gib=80.0)
    note_cards(tmp_path, "lab", cards)
    lab = find_target(tmp_path, "lab")
    assert (lab.cards, lab.env) == (cards, {"NAME": "value"})


def test_the_commands_add_list_and_remove(flash_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add = ["target", "add", "lab", "--engine", "slurm", "--storage", "/shared/flash"]
    more = ["--option=--gres=gpu:1", "--option", "-p gpu", "--env", "A=b", "--unproved"]
    assert main([*add, *more]) == 0
    written = tomllib.loads((flash_home / FILE).read_text())
    assert written == {"lab": {**SLURM, "options": ["--gres=gpu:1", "-p", "gpu"], "env": {"A": "b"}}}
    capsys.readouterr()
    assert main([*add, "--unproved"]) != 0
    assert "there is a target 'lab' already" in capsys.readouterr().err
    assert main(["target", "list"]) == 0
    assert capsys.readouterr().out == "lab  slurm  /shared/flash\n"
    assert main(["target", "remove", "lab"]) == 0
    assert targets(flash_home) == {}


def test_a_target_that_fails_its_proof_is_not_added(flash_home: Path, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no sbatch
    storage = str(tmp_path / "storage")
    assert main(["target", "add", "lab", "--engine", "slurm", "--storage", storage]) != 0
    assert "there is no squeue here" in capsys.readouterr().err
    assert targets(flash_home) == {}
    assert not list((tmp_path / "storage" / "run-folders").iterdir())
