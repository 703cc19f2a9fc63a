import re
from pathlib import Path

import pytest

from flash_mcp.cli import main, views
from flash_mcp.state.disk import in_words
from tests.samples import finished_run, queued_run, rolled_out, sample_rollout, supervised

COLOUR = re.compile(r"\033\[\d+m")


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with supervised():
        assert main.main(words) == code
    return capsys.readouterr().out


def as_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize("words", [("status", "RUN"), ("status",), ("rollouts", "RUN"), ("checkpoints", "RUN")])
def test_what_is_laid_out_fits_a_terminal(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = finished_run(tmp_path)
    queued_run(tmp_path, model="a-model-whose-name-is-so-long-that-no-list-has-room-for-it-in-80-columns")
    text = printed(capsys, *[run.id if word == "RUN" else word for word in words])
    # Commands and folders are not folded, so that they can be copied.
    folded = [line for line in text.splitlines() if not line.startswith(("Next: ", "The first is in"))]
    assert max(map(len, folded)) <= views.WIDTH


@pytest.mark.slow
def test_the_checks_of_an_environment_are_lines_with_the_fix_under_what_failed(tmp_path: Path, capsys):
    folder = tmp_path / "sort"
    assert main.main(["env-setup", str(folder), "--template", "sort_words"]) == 0
    source = (folder / "environment.py").read_text()
    (folder / "environment.py").write_text(source.replace("success=", "success=True or "))
    capsys.readouterr()
    text = printed(capsys, "env-test", str(folder), code=1)
    lines = text.splitlines()
    assert lines[0].startswith("failed: ")
    assert re.search(r"\n✓ loads +in .*\n", text)
    assert re.search(r"\n✗ junk +train\[0\]: (.*\n)+?  fix +\S", text)
    assert lines[-1].startswith("Next: correct what junk says")
    assert max(map(len, [line for line in lines if str(folder) not in line])) <= views.WIDTH


def test_colours_are_for_terminals_only(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    run = finished_run(tmp_path)
    plain = printed(capsys, "status", run.id)
    as_terminal(monkeypatch)
    coloured = printed(capsys, "status", run.id)
    assert not COLOUR.search(plain)
    assert coloured.startswith("\033[32m20 % ") and COLOUR.sub("", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(capsys, "status", run.id) == plain


def test_a_foreign_text_can_colour_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    run = rolled_out(tmp_path, [sample_rollout(1, 0, 0.0, "\033[31mred\033[0m\nand more")])
    as_terminal(monkeypatch)
    text = printed(capsys, "rollouts", run.id)
    assert "␛[31mred␛[0m" in text and "           and more" in text.splitlines()


def test_a_run_that_waits_is_followed_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = queued_run(tmp_path)
    lines = printed(capsys, "status", run.id).splitlines()
    assert lines[0] == "Training: queued"
    assert lines[-1] == f"Next: `flash-mcp status {run.id} --follow` draws the curve as it grows"


def test_numbers_are_as_people_write_them():
    numbers = [views.number(value) for value in (0.83684, 12345.6, 999.6, 500.0, None)]
    assert numbers == ["0.837", "12,346", "1,000", "500", ""]
    shares = [views.percent(share) for share in (0.5, 1.0, 0.0, 0.996, 1999 / 2000, 1 / 40_000)]
    assert shares == ["50 %", "100 %", "0 %", "99.6 %", "99.95 %", "0.003 %"]
    times = [views.duration(seconds) for seconds in (4.6, 125, 3 * 3600 + 720, 50 * 3600)]
    assert times == ["5 s", "2 min 5 s", "3 h 12 min", "2 d 2 h"]
    assert [in_words(count) for count in (86, 437_600, 3_700_000, 2.5e9)] == ["86 B", "438 kB", "3.7 MB", "2.5 GB"]


def test_the_calls_of_an_agent_follow_its_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    common = {"conversation": 0, "finish": "stop", "parent": None, "prompt_tokens": 3, "completion_tokens": 2}
    calls = [
        {**common, "number": 0, "role": "planner", "trained": True, "last": 4},
        {**common, "number": 1, "role": "", "trained": False, "last": 9},
    ]
    run = rolled_out(tmp_path, [{**sample_rollout(1, 0, 0.5), "calls": calls}])
    shown = printed(capsys, "rollouts", run.id, "--step", "1", "--index", "0")
    assert "call 0     planner, stop, 3 tokens read, 2 written" in shown
    assert "call 1     not trained, stop, 3 tokens read, 2 written" in shown
    assert "call 0" not in printed(capsys, "rollouts", run.id)
