"""Several config files of one run, and the `.env` beside them."""

import json
import os
from pathlib import Path

import pytest

from flash_mcp.cli import main
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.owners import LOCAL_OWNER, Caller, acting_as
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import secrets
from flash_mcp.tools.shared.loading import secret_values
from flash_mcp.tools.shared.resolve import read_configs
from tests.calls import call, refused
from tests.folders import environment_folder
from tests.samples import push_echo, supervised

SECRET = "pl4nted-in-a-file"
KEYED = f"""
class Keyed(Addition):
    def __init__(self):
        assert os.environ["JUDGE_KEY"][::-1] == {SECRET[::-1]!r}
        super().__init__()
"""


def written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def holding(folder: Path, text: str) -> list[Path]:
    """The files below the folder that hold the text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


async def test_of_several_files_the_later_wins_and_an_argument_over_both(tmp_path: Path) -> None:
    push_echo(tmp_path / "environment")
    base = written(
        tmp_path / "base.toml", 'environment = "echo"\nsteps = 3\nseed = 5\nenvironment_args = {fail = false}\n'
    )
    more = written(tmp_path / "more.toml", "[train]\nsteps = 7\ntemperature = 0.5\n[environment_args]\nlevel = 2\n")
    assert read_configs([base, more]).fields["environment_args"] == {"fail": False, "level": 2}
    more = written(tmp_path / "more.toml", "[train]\nsteps = 7\ntemperature = 0.5\n")
    result = await call("train", config=[base, more], temperature=0.8, validate_only=True)
    assert (result["values"]["steps"], result["values"]["seed"], result["values"]["temperature"]) == (7, 5, 0.8)
    assert set(result["sources"]["file"]) == {"environment", "steps", "seed", "environment_args"}
    result = await call("train", config=base, validate_only=True)
    assert result["values"]["steps"] == 3


def test_tables_within_tables_are_joined_and_a_later_seed_takes_the_place_of_earlier_seeds(tmp_path: Path) -> None:
    base = written(tmp_path / "base.toml", "[mixture.sorting]\nratio = 2\nenvironment_args = {size = 3, fail = true}\n")
    more = written(tmp_path / "more.toml", "[mixture.sorting]\nenvironment_args = {fail = false}\n")
    mixture = {"sorting": {"ratio": 2, "environment_args": {"size": 3, "fail": False}}}
    assert read_configs([base, more]).fields == {"mixture": mixture}
    several, one = written(tmp_path / "several.toml", "seeds = [1, 2]\n"), written(tmp_path / "one.toml", "seed = 9\n")
    assert read_configs([several, one]).fields == {"seed": 9}
    assert read_configs([one, several]).fields == {"seed": 1, "seeds": [1, 2]}


async def test_a_wrong_key_and_a_wrong_value_name_their_file(tmp_path: Path) -> None:
    push_echo(tmp_path / "environment")
    base = written(tmp_path / "base.toml", 'environment = "echo"\nsteps = 0\n')
    wrong = written(tmp_path / "wrong.toml", "stepz = 3\n")
    error = await refused("train", config=[base, wrong])
    assert str(error.values["path"]) == wrong and "'stepz'; did you mean 'steps'?" in error.what
    error = await refused("train", config=[base])
    assert error.what.startswith("steps: ") and error.what.endswith(f"(got 0), in {base}")
    error = await refused("train", config=[base], steps=-1)
    assert error.what.endswith("(got -1)")


@pytest.mark.slow
def test_the_command_takes_more_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    push_echo(tmp_path / "environment")
    base = written(tmp_path / "base.toml", 'environment = "echo"\nsteps = 3\n')
    more = written(tmp_path / "more.toml", "steps = 7\n")
    options = ["--validate-only", "--json"]
    for words in ([base, "--config", more], ["--config", base, "--config", more]):
        with supervised():
            assert main.main(["train", *words, *options]) == 0
        assert json.loads(capsys.readouterr().out)["values"]["steps"] == 7
    with supervised():
        assert main.main(["train", more, "--config", base, *options]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["steps"] == 3


@pytest.mark.slow
async def test_secrets_come_from_the_file_beside_the_config_and_are_written_nowhere(tmp_path, flash_home, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    folder = environment_folder(tmp_path / "keyed", KEYED, returns="Keyed()")
    config = written(folder / "configs/rl.toml", 'environment = "keyed"\nsteps = 2\nsecrets = ["JUDGE_KEY"]\n')
    error = await refused("env_push", name="keyed", folder=str(folder), secrets=["JUDGE_KEY"])
    assert "JUDGE_KEY" in error.what and ".env" in error.fix
    env = written(folder / "configs/.env", f"# of the judge\nexport JUDGE_KEY='{SECRET}'\nOTHER_KEY=unnamed\n")
    with supervised():
        pushed = await call("env_push", name="keyed", folder=str(folder), secrets=["JUDGE_KEY"])
        with monkeypatch.context() as hurry:
            hurry.setattr(secrets, "TIMEOUT_S", 0.0)  # no supervisor takes them yet
            started = await call("train", config=config)
            arms = [{"model": f"{started['run_id']}@0", "top_p": mass} for mass in (0.5, 0.9)]
            played = await call("tournament", environment="keyed", arms=arms, wait_s=0)
        run = open_store().run(started["run_id"])
        assert run.env_files == [env] and run.spec.secrets == ["JUDGE_KEY"]
        vault = secrets.Vault(flash_home)
        vault.open()
        try:
            secrets.hand_over(flash_home, run)
            assert vault.values(run.id, ["JUDGE_KEY", "OTHER_KEY"]) == {"JUDGE_KEY": SECRET}
        finally:
            vault.close()
        shown = await call("status", run_id=run.id, detail="detailed")
        assert [open_store().run(arm["run_id"]).env_files for arm in played["arms"]] == [[env], [env]]
    assert holding(flash_home, "JUDGE_KEY") and not holding(flash_home, SECRET)
    assert SECRET not in json.dumps([pushed, started, shown]) and "JUDGE_KEY" not in os.environ


async def test_the_servers_own_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(tmp_path / "a/.env", "ONE=a\nTWO=a\nTHREE=a\n")
    later = written(tmp_path / "b/.env", "\ufeffTWO=b\r\nTHREE=b\nMONEY=$ONE\n")  # as editors of Windows save it
    monkeypatch.setenv("THREE", "server")
    values = secrets.variables([later, first, str(tmp_path / "none")])
    assert [values[name] for name in ("ONE", "TWO", "THREE", "MONEY")] == ["a", "b", "server", "$ONE"]
    (tmp_path / "a/.env").write_bytes(b"ONE=\xff\xfe\n")
    assert "ONE" not in secrets.variables([first])


async def test_a_caller_with_granted_secrets_gets_no_others_from_a_file(tmp_path: Path, monkeypatch):

    file = written(tmp_path / ".env", "GRANTED=1\nOTHER=2\n")
    with acting_as(Caller(LOCAL_OWNER, secrets=frozenset({"GRANTED"}))):
        assert secret_values(["GRANTED"], [file]) == {"GRANTED": "1"}
        with pytest.raises(FlashError, match="OTHER"):
            secret_values(["OTHER"], [file])
