"""Exams as their operator makes them: sealed at rest, and known to others by name alone."""

import io
from pathlib import Path

import pytest

from flash_mcp.exam import exams
from flash_mcp.protocol import exams as sealing
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.owners import Caller, acting_as
from flash_mcp.supervisor import secrets
from flash_mcp.tools.registry import TOOLS
from tests.freeze import command
from tests.samples import ENVIRONMENT, supervised

PASSPHRASE = "correct horse battery"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "sums"
    path.mkdir()
    (path / "environment.py").write_text(ENVIRONMENT)
    return path


def test_the_operator_creates_lists_unlocks_and_removes_exams(folder: Path, flash_home: Path, monkeypatch):
    key = folder.parent / "sums.exam-key"
    code, text = command("exam", "create", "sums", str(folder), "--looks", "5", "--key-file", str(key))
    assert code == 0 and "tasks: 60" in text and key.stat().st_mode & 0o777 == 0o600

    def typed(text: str, *words: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n"))
        return command("exam", *words)[0]

    assert typed("short", "create", "typed", str(folder)) == 2
    assert typed(PASSPHRASE, "create", "typed", str(folder), "--looks", "2", "--owner", "alice") == 0
    assert "alice" in command("exam", "list")[1]
    variable = exams.find_exam(flash_home, "typed").variable
    with supervised():
        assert [typed(PASSPHRASE, "unlock", "typed"), typed("another one", "unlock", "typed")] == [0, 1]
        assert secrets.lacking(flash_home, "run-any", [variable]) == []
        assert command("exam", "lock", "typed")[0] == 0
        assert secrets.lacking(flash_home, "run-any", [variable]) == [variable]
    assert command("exam", "remove", "typed")[0] == 0 and "typed" not in command("exam", "list")[1]
    assert not any("exam" in name for name in TOOLS), "no tool of an agent makes or opens one"


def test_nothing_of_an_exam_lies_open_in_the_state_directory(folder: Path, flash_home: Path) -> None:
    exam = exams.create(flash_home, "sums", folder, looks=3, passphrase=PASSPHRASE)
    files = [path for path in flash_home.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {sealing.SEALED, sealing.PROMPTS, exams.FILE}
    for path in files:
        content = path.read_bytes()
        assert not any(word in content for word in (b"go 1", b"eval-1", b"score_response", PASSPHRASE.encode())), path
        assert not path.is_relative_to(exams.folder_of(flash_home, "sums")) or not path.stat().st_mode & 0o077
    places = [place for number in (1, 2, 3) for place in exam.slice(number)]
    assert sorted(places) == list(range(60)), "no task is in two looks"
    sealed = (flash_home / "exams/sums" / exam.id / sealing.SEALED).read_bytes()
    key = exam.key(PASSPHRASE)
    sealing.unpack(sealing.unseal(key, sealed, exam.id), folder.parent / "opened")
    assert (folder.parent / "opened/environment.py").read_text() == ENVIRONMENT
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:20], b""):
        with pytest.raises(FlashError, match=r"^\[exam_locked"):
            sealing.unseal(key, wrong, exam.id)


def test_what_cannot_be_an_exam_is_refused_and_leaves_nothing(folder: Path, flash_home: Path) -> None:
    def refused(name: str = "sums", looks: int = 2, **options: object) -> str:
        with pytest.raises(FlashError) as error:
            exams.create(flash_home, name, folder, looks=looks, **{"passphrase": PASSPHRASE, **options})  # pyright: ignore
        assert not (flash_home / "exams").exists() or not list((flash_home / "exams").iterdir())
        return str(error.value)

    assert "--looks 6 or fewer" in refused(looks=7) and "invalid_argument" in refused(looks=0)
    assert "cannot be a name" in refused("../sums") and "fewer than 12" in refused(passphrase="short")
    assert "would be overwritten" in refused(key_file=folder / "environment.py", passphrase=None)
    (folder / "rows.jsonl").symlink_to("/etc/passwd")
    assert "is a link" in refused()
    (folder / "rows.jsonl").unlink()
    (folder / "environment.py").write_text("raise RuntimeError('no')")
    assert "environment_invalid" in refused()


def test_an_owner_knows_only_exams_that_they_may_take(folder: Path, flash_home: Path) -> None:
    exams.create(flash_home, "hers", folder, looks=2, owners=["alice"], passphrase=PASSPHRASE)
    exams.create(flash_home, "any", folder, looks=2, passphrase=PASSPHRASE)
    seen = {}
    for owner in ("local", "alice", "bob"):
        with acting_as(Caller(owner)):
            seen[owner] = [exam.name for exam in exams.exams(flash_home)]
    assert seen == {"local": ["any", "hers"], "alice": ["any", "hers"], "bob": ["any"]}
    with acting_as(Caller("bob")), pytest.raises(FlashError) as error:
        exams.find_exam(flash_home, "hers")
    assert error.value.code == "unknown_exam" and "alice" not in str(error.value)
