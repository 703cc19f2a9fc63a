import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_mcp.cli import main, tool_commands
from flash_mcp.cli.doctor import examine
from flash_mcp.cli.main import COMMANDS
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state import queue
from flash_mcp.state.store import Store, open_store
from flash_mcp.supervisor.process import is_supervised
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared import machine
from tests.places import ROOT
from tests.samples import (
    ENVIRONMENT,
    finished_run,
    learn,
    push_echo,
    queued_run,
    read_in,
    sample_rollout,
    started_run,
    supervised,
)
from tests.waiting import WAIT_S

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], flash_home: Path):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main.main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    with supervised():
        yield call


@pytest.mark.parametrize(("word", "value"), [("42", ["42"]), ("a,b", ["a", "b"]), ('["a,b"]', ["a,b"])])
def test_a_list_is_one_value_or_several(word: str, value: list[str]):
    words = ["env-test", "--answers", word]
    assert main.parser_for(words).parse_args(words).answers == value


def test_every_tool_is_a_command_with_all_its_arguments(capsys: pytest.CaptureFixture[str]):
    for tool in TOOLS.values():
        with pytest.raises(SystemExit) as ended:
            main.main([tool.name.replace("_", "-"), "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        for name in tool.signature.parameters:
            assert f"--{name.replace('_', '-')}" in text or name.upper() in text


def test_a_config_file_and_settings_start_a_run(run: Run, tmp_path: Path):
    push_echo(tmp_path / "environment")
    config = tmp_path / "rl.toml"
    config.write_text('environment = "echo"\n[train]\nsteps = 5\n')
    code, out, err = run(
        "train", str(config), "--set", "steps=3", "--set", "train.temperature=0.8", "--group-size", "4", "--json"
    )
    assert (code, err) == (0, "")
    spec = open_store().run(json.loads(out)["run_id"]).spec
    assert (spec.steps, spec.temperature, spec.group_size) == (3, 0.8, 4)


def test_set_reaches_into_fields_that_are_tables():
    texts = ["train.seed=1", "environment_args.seed=5", "environment_args.max_terms=3", "mixture.sort_words.ratio=2"]
    assert tool_commands._assigned({}, [*texts, "slurm.partition=long"]) == {
        "seed": 1,
        "environment_args": {"seed": 5, "max_terms": 3},
        "mixture": {"sort_words": {"ratio": 2}},
        "slurm": {"partition": "long"},
    }


def test_set_and_options_keep_what_else_a_table_has(run: Run, tmp_path: Path):
    push_echo(tmp_path / "environment", ENVIRONMENT.replace("fail=False", "fail=False, rows=None, size=0"))
    config = tmp_path / "rl.toml"
    config.write_text('environment = "echo"\n[environment_args]\nfail = true\nrows = {long = 1, short = 2}\n')
    words = ["--environment-args", '{"fail": false, "size": 3}', "--set", "environment_args.rows.long=5"]
    code, out, err = run("train", str(config), *words, "--json")
    assert (code, err) == (0, "")
    arguments = open_store().run(json.loads(out)["run_id"]).spec.environment_args
    assert arguments == {"fail": False, "rows": {"long": 5, "short": 2}, "size": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["train", "--step", "3"], 2, "did you mean '--steps'?"),
        (["doctor", "--jsn"], 2, "there is no --jsn; did you mean '--json'?"),
        (["doctor", "--frob"], 2, "there is no --frob. Fix: see flash-mcp doctor --help"),
        (["train", "--environment", "echo", "--steps", "0"], 2, "steps"),
        (["train", "--environment", "echo", "--set", "stepz=3"], 2, "did you mean 'steps'?"),
        (["train", "--environment", "echo", "--set", "steps"], 2, "no '='"),
        (["train", "none.toml"], 2, "none.toml"),
        (["train", "--environment", "echo", "--eval-before", "true"], 2, "a flag has no value"),
        (["env-push", "a", "b"], 2, "'b' is a word too many: env-push takes one FOLDER; the name is --name"),
        (["curate", "a", "b"], 2, "'b' is a word too many: curate takes one RUNS"),
        (["catalog", "b"], 2, "catalog takes options only"),
        (["train", "--environment", "none"], 1, "unknown_environment"),
        (["status", "run-none"], 1, "unknown_run"),
        (["status", "--follow"], 2, "no one run"),
        (["report", "run-none"], 1, "unknown_run"),
        (["serve", "--http", "--host", "0.0.0.0"], 2, "--unauthenticated"),
        (["token", "create", "ci", "--expires-days", "0"], 2, "Fix: "),
        (["install", "zed", "--skill"], 2, "Fix: "),
        ([], 2, "train"),
    ],
)
def test_errors_go_to_stderr_with_an_exit_code(run: Run, words: list[str], code: int, named: str):
    found, out, err = run(*words)
    assert (found, out) == (code, "")
    assert named in err and (err.startswith("[") or not words) and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["stats"], "there is no command 'stats'; did you mean 'status'"),
        (["wait"], "required: RUN_ID. Fix: see flash-mcp wait --help"),
        (["token"], "required: ACTION. Fix: see flash-mcp token --help"),
        (["serve", "--port", "many"], "invalid int value: 'many'"),
        (["install", "emacs"], "invalid choice: 'emacs'"),
        (["target", "add", "lab", "--env", "A=\udcff"], r"'A=\udcff' is not UTF-8. Fix: write it in UTF-8"),
    ],
)
def test_wrong_usage_is_one_line_with_a_code(words: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("[") and err.count("\n") == 1 and named in err


EXAMPLE = re.compile(r"^  flash-mcp (.*)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, *(name.replace("_", "-") for name in TOOLS)])
def test_every_help_has_an_example_that_the_command_takes(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main.main([name, "--help"])
    text = capsys.readouterr().out
    examples = [shlex.split(words) for words in EXAMPLE.findall(text)]
    assert examples
    for words in examples:
        arguments, rest = main.parser_for(words).parse_known_args(words)
        assert (words[0], rest) == (name, [])
        assert callable(arguments.run)


@pytest.mark.parametrize("below", [".", "folder"])
def test_a_state_directory_that_cannot_be_used_is_one_line(run: Run, tmp_path: Path, monkeypatch, below: str):
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setenv("FLASH_HOME", str(path / below))
    for words in (["catalog"], ["status"], ["wait", "run-1"], ["remove", "run-1"]):
        code, printed, told = run(*words)
        assert (code, printed, told.count("\n")) == (2, "", 1)
        assert told.startswith("[invalid_argument FLASH_HOME=") and "set FLASH_HOME to" in told


@pytest.mark.needs("pages")
@pytest.mark.parametrize("left", ["all", "database"])
def test_a_state_directory_that_cannot_be_written_can_be_read(left: str, flash_home, tmp_path, monkeypatch, capsys):
    run = finished_run(tmp_path)
    open_store().shrink()
    shutil.copytree(flash_home, tmp_path / "copy")
    if left == "database":  # as its last writer leaves it
        (tmp_path / "copy" / "flash.db-wal").unlink()
        (tmp_path / "copy" / "flash.db-shm").unlink()
    monkeypatch.setenv("FLASH_HOME", str(tmp_path / "copy"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("*.db")}
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    for words in (["status"], ["status", run.id], ["catalog"], ["report", run.id, "--to", str(tmp_path / "r.html")]):
        assert main.main(words) == 0
    assert run.id in capsys.readouterr().out and run.id in (tmp_path / "r.html").read_text()
    assert main.main(["cancel", run.id]) == 2
    assert "cannot be used: Read-only file system" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("*.db")}


def test_texts_and_paths_are_utf8_whatever_the_locale(tmp_path: Path):
    environment = tmp_path / "höhe"
    environment.mkdir()
    (environment / "environment.py").write_text(f"# ümlaut\n{ENVIRONMENT}")
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "FLASH_HOME": str(tmp_path / "größe")}
    command = [sys.executable, "-m", "flash_mcp.cli"]
    for name, code in (("echo", 0), ("größe", 2)):
        words = [*command, "env-push", "--folder", environment, "--name", name]
        done = subprocess.run(words, env=variables, capture_output=True, check=False)
        assert done.returncode == code, done.stderr
    assert "größe" in done.stderr.decode()


def test_the_best_and_the_worst_rollouts_are_a_word_away_and_so_is_the_curve(run: Run, tmp_path: Path):
    finished = finished_run(tmp_path)
    found = [run("rollouts", finished.id, f"--{which}", "2", "--json")[1] for which in ("best", "worst")]
    best, worst = (json.loads(text)["rollouts"] for text in found)
    assert [rollout["index"] for rollout in best] == [7, 6]
    assert [rollout["index"] for rollout in worst] == [0, 1]

    assert "held-out success" in run("status", finished.id, "--curve")[1]
    assert json.loads(run("status", finished.id, "--curve", "--json")[1])["run"]["run_id"] == finished.id


def test_no_control_character_of_others_reaches_the_terminal(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r"
    started, writer = started_run(tmp_path)
    writer.rollouts(1, [sample_rollout(1, 0, 0.0, f"{hostile}said\n\tand more")])
    writer.event("warning", hostile)
    read_in(open_store(), started.id)
    environment = tmp_path / "environment"
    environment.mkdir(exist_ok=True)
    (environment / "environment.py").write_text(f"raise RuntimeError({hostile!r})")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    rollouts, status = run("rollouts", started.id), run("status", started.id)
    push = run("env-push", str(environment), "--name", "e")
    assert "said\n" in rollouts[1] and " and more\n" in rollouts[1]
    assert "␛]0;owned␇␛[2J\ufffd31m␡" in rollouts[1] and "owned" in status[1] and "owned" in push[2]
    own = ("\r\033[K", "\n", "\t")  # what the command line itself draws with
    for text in (*rollouts[1:], *status[1:], *push[1:]):
        rest = "".join(text.split(own[0]))
        assert not [sign for sign in rest if unicodedata.category(sign) == "Cc" and sign not in own]
    _, out, _ = run("rollouts", started.id, "--json")
    assert "\x9b" not in out and "\x7f" not in out
    shown = "␛]0;owned␇␛[2J\ufffd31m␡␍said\n\tand more"
    assert json.loads(out)["rollouts"][0]["messages"][-1]["content"] == shown


@pytest.mark.slow
@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("cancelled", 4)])
def test_following_ends_with_the_runs_own_exit_code(run: Run, tmp_path: Path, state: str, code: int):
    if state == "succeeded":
        run_id = finished_run(tmp_path).id
    else:
        run_id = queued_run(tmp_path).id
        run("cancel", run_id)
    found, out, err = run("status", run_id, "--follow")
    assert found == code
    assert f"{state}, " in out and state in err


@pytest.mark.slow
def test_a_list_may_be_given_by_its_flag_or_left_out(run: Run, tmp_path: Path):
    finished = finished_run(tmp_path)
    for words in (["--runs", finished.id], [finished.id]):
        assert json.loads(run("curate", *words, "--dry-run", "--json")[1])["counts"]
    code, _, said = run("curate", "--dry-run")
    assert code == 2 and "SUPPRESS" not in said


def test_a_text_may_come_from_a_file_or_begin_with_an_at_sign(run: Run, tmp_path: Path):
    queued = queued_run(tmp_path / "environment")
    (tmp_path / "reason.txt").write_text("wrong data")
    assert run("cancel", queued.id, "--reason", f"@{tmp_path / 'reason.txt'}")[0] == 0
    assert open_store().run(queued.id).cancel_reason == "wrong data"

    queued = queued_run(tmp_path)
    assert run("cancel", queued.id, "--reason", "@@bob: wrong @@data")[0] == 0
    assert open_store().run(queued.id).cancel_reason == "@bob: wrong @@data"


@pytest.mark.parametrize("words", [["chat", "@bob"], ["status", "@/"], ["status", "@\0"], ["status", "--help"]])
def test_how_a_text_with_an_at_sign_is_written_is_told(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == (0 if "--help" in words else 2)
    assert "a text that begins with @ is written @@" in out + err and "Traceback" not in err


@pytest.mark.long
def test_a_starter_is_written_tested_and_published(run: Run, tmp_path: Path):
    folder = tmp_path / "sums"
    assert run("env-setup", str(folder))[0] == 0
    code, out, _ = run("env_test", "--folder", str(folder), "--time-s", "600", "--json")
    assert (code, json.loads(out)["passed"]) == (0, True)
    assert run("env-push", str(folder), "--name", "sums")[0] == 0
    assert run("train", str(folder / "configs" / "rl.toml"), "--validate-only")[0] == 0
    (folder / "environment.py").write_text("raise ValueError\n")
    code, out, _ = run("env_test", "--folder", str(folder), "--json")
    assert (code, json.loads(out)["passed"]) == (1, False)
    assert run("env_test", "--folder", str(ROOT / "environments/examples/sort_words"), "--time-s", "0.1")[0] == 1


def test_a_port_that_is_taken_is_refused(run: Run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = run("serve", "--http", "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "port_taken" in err


@pytest.mark.needs("pages")
@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_number_that_no_port_has_is_refused(run: Run, port: str):
    for command in ("serve --http", "ui --no-browser"):
        code, _, err = run(*command.split(), "--port", port)
        assert code == 2
        assert err == f"[invalid_argument port={port}] there is no such port. Fix: choose a port from 1 to 65535\n"


def test_the_doctor_examines_this_machine(run: Run):
    names = {finding.name for finding in examine()}
    assert {"python", "state directory", "disk", "memory", "gpu", "training packages", "sqlite"} <= names
    code, out, _ = run("doctor", "--json")
    findings = json.loads(out)
    assert all(finding["fix"] for finding in findings if finding["level"] != "ok")
    assert code == int(any(finding["level"] == "problem" for finding in findings))


@pytest.mark.slow
def test_the_doctor_names_a_program_that_keeps_the_database_locked(run: Run, flash_home: Path):
    assert found_by_doctor("database")[::2] == ("ok", "")
    with Store(flash_home).transaction():
        level, _, fix = found_by_doctor("database")
    assert level == "problem" and "fuser -v" in fix


def found_by_doctor(name: str) -> tuple[str, str, str]:
    (finding,) = [finding for finding in examine() if finding.name == name]
    return finding.level, finding.detail, finding.fix


def test_the_doctor_says_what_takes_the_disk_and_how_to_take_less(run: Run, flash_home: Path, monkeypatch):
    sizes = {
        "runs/run-1/checkpoints/10/1-1/optimizer.pt": 4_000_000,
        "runs/run-1/log.1": 1_000_000,
        "interpreters/0123/venv/lib.so": 3_000_000,
        "environments/calc/0123/data.jsonl": 1_500_000,
        "datasets/tiny/0123/train.jsonl": 1_000,
        "exports/run-1-10-merged/model.safetensors": 2_000_000,
    }
    for name, size in sizes.items():
        path = flash_home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    monkeypatch.setenv("FLASH_MODELS", str(flash_home / "models"))
    taken = "runs 5.0 MB, checkpoints 4.0 MB, interpreters 3.0 MB, exports 2.0 MB, environments 1.5 MB"
    level, detail, fix = found_by_doctor("disk")
    assert (level, fix) == ("ok", "") and detail.endswith(f"taken: {taken}")
    monkeypatch.setattr("flash_mcp.tools.shared.machine.FREE_DISK_GIB", 1e9)
    level, detail, fix = found_by_doctor("disk")
    assert level == "problem" and "remove --older-than" in fix and "keep_checkpoints" in fix


def test_the_doctor_notices_run_folders_that_the_database_lost(run: Run, tmp_path: Path):
    known = started_run(tmp_path / "environment")[0]
    assert found_by_doctor("state directory")[0] == "ok"
    open_store().execute("DELETE FROM runs WHERE id = ?", [known.id])
    level, detail, fix = found_by_doctor("state directory")
    assert level == "warning" and "1 run folders" in detail and "flash-mcp recover" in fix


def test_the_doctor_names_a_damaged_page_of_the_database(run: Run, tmp_path: Path):
    known, writer = started_run(tmp_path / "environment")
    learn(writer, range(1, 21))
    store = open_store()
    read_in(store, known.id)
    assert found_by_doctor("database")[0] == "ok"
    store.query("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    with store.path.open("r+b") as stream:
        stream.seek(store.path.stat().st_size - 4096)
        stream.write(b"\xff" * 4096)
    level, detail, fix = found_by_doctor("database")
    assert level == "problem" and "state_corrupt" in detail and "flash-mcp recover" in fix


def test_the_doctor_names_what_holds_runs_up_and_their_damaged_files(run: Run, tmp_path: Path):
    waiting = queued_run(tmp_path / "environment")
    assert found_by_doctor("waiting runs")[0] == "ok"
    assert queue.claim(open_store())
    full = FlashError("disk_full", "the disk is full", needed_bytes=10**15)
    assert queue.requeue(open_store(), waiting.id, 1, full, counts_as="nothing")
    message = "beat.json is damaged and counts as absent: it is no regular file"
    row = {"time": time.time(), "epoch": 1, "kind": "warning", "message": message}
    open_store().put_event(waiting.id, "damaged-1", row)
    level, detail, fix = found_by_doctor("waiting runs")
    assert level == "warning" and fix
    assert f"{waiting.id}: [disk_full" in detail and message in detail


def test_the_doctor_names_deployments_that_failed_or_start_again(run: Run):
    store = open_store()
    error = FlashError("unresponsive", "its server stopped answering", fix="call deploy")
    store.add_deployment({**{"id": "dep-1", "owner": "local", "name": "one", "model": "toy"}, "state": "ready"})
    assert found_by_doctor("deployments") == ("ok", "1 ready", "")
    store.update_deployment("dep-1", state="starting", error=error.to_dict())
    told = "dep-1 is starting: [unresponsive] its server stopped answering"
    assert found_by_doctor("deployments") == ("warning", told, "call deploy")


def test_the_doctor_names_an_open_state_directory_and_files_of_another_user(
    run: Run, flash_home: Path, monkeypatch: pytest.MonkeyPatch
):
    assert found_by_doctor("ownership")[0] == "ok"
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    level, detail, fix = found_by_doctor("ownership")
    assert level == "problem" and "flash.db" in detail
    assert fix == f"sudo chown -R 54321 {flash_home}"

    flash_home.chmod(0o755)
    assert [finding.level for finding in examine() if finding.name == "privacy"] == ["warning"]


@pytest.mark.parametrize("variable", ["FLASH_MODELS", "TMPDIR"])
def test_the_doctor_names_another_disk_that_is_full(run: Run, monkeypatch: pytest.MonkeyPatch, variable: str):
    full = machine.models_dir() if variable == "FLASH_MODELS" else Path(tempfile.gettempdir())
    monkeypatch.setattr(machine, "has_space", lambda paths, _: full not in paths)
    level, detail, fix = found_by_doctor("disk")
    assert level == "warning" and f"free in {full}" in detail and variable in fix


@pytest.mark.slow
def test_supervise_leaves_when_idle_and_is_alone(flash_home: Path):
    flash_home.mkdir(parents=True)
    assert main.main(["supervise", "--idle-exit-s", "0.1"]) == 0 and not is_supervised(flash_home)
    with supervised():
        assert main.main(["supervise", "--idle-exit-s", "0.1"]) == 1


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_failure(tmp_path: Path):
    command = [sys.executable, "-m", "flash_mcp.cli", "rollouts", finished_run(tmp_path).id]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(WAIT_S)) == ("", 0)
