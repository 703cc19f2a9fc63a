"""PUT /environments/NAME: large environments arrive whole, and hostile archives leave nothing."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flash_mcp.protocol.paths import environments_dir
from flash_mcp.server import uploads
from flash_mcp.state.store import open_store
from flash_mcp.state.versions import digest_of
from tests.samples import ENVIRONMENT
from tests.teams import Team, code_of

Pack = Callable[[tarfile.TarFile], None]


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(content))


def archive_of(*packs: Pack) -> bytes:
    """A tar.gz with a good environment, and what the packs add."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        add(tar, "environment.py", ENVIRONMENT.encode())
        for pack in packs:
            pack(tar)
    return buffer.getvalue()


def left_behind() -> list[str]:
    root = environments_dir()
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink()]


@pytest.mark.slow
def test_a_large_environment_arrives_as_it_was_packed(team: Team, tmp_path: Path):
    folder = tmp_path / "large"
    (folder / "datasets").mkdir(parents=True)
    (folder / "environment.py").write_text(ENVIRONMENT)
    (folder / "datasets" / "noise.bin").write_bytes(os.urandom(6 << 20))
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"left out")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, ".")
    body = buffer.getvalue()
    with team.http(team.token("alice")) as http:
        answer = http.put("/environments/large", content=iter_of(body))
        again = http.put("/environments/large", content=body)
    assert (answer.status_code, again.status_code) == (201, 200), answer.text
    pushed = answer.json()
    assert (pushed["train_tasks"], pushed["eval_tasks"], pushed["files"]) == (40, 60, 2)
    row = open_store().environment(pushed["environment"])
    assert row.owner == "alice" and digest_of(Path(row.path)) == row.digest
    assert (Path(row.path) / "datasets" / "noise.bin").stat().st_size == 6 << 20
    assert len(left_behind()) == 2


def test_an_error_that_has_no_utf_8_form_is_answered_all_the_same(team: Team):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        add(tar, "environment.py", b'raise RuntimeError("bad \\udc80 text")')
    with team.http(team.token("alice")) as http:
        answer = http.put("/environments/e", content=buffer.getvalue())
    assert (answer.status_code, code_of(answer.json()["error"]["message"])) == (400, "environment_invalid")
    assert "RuntimeError: bad \\udc80 text" in answer.json()["error"]["message"]
    assert left_behind() == []


def iter_of(body: bytes) -> Iterator[bytes]:
    """Without a declared length."""
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]


def many(tar: tarfile.TarFile) -> None:
    for number in range(uploads.MAX_MEMBERS):
        add(tar, f"d{number}", type=tarfile.DIRTYPE)


def bomb(tar: tarfile.TarFile) -> None:
    for number in range(7):
        add(tar, f"zeros-{number}", bytes(40 << 20))


def long_header(tar: tarfile.TarFile) -> None:
    add(tar, "x" * (uploads.MAX_HEADER_BYTES + 1), b"")


ATTACKS: dict[str, Pack] = {
    "absolute path": lambda tar: add(tar, "/tmp/flash-escape", b"x"),
    "parent": lambda tar: add(tar, "../escape", b"x"),
    "parent within": lambda tar: add(tar, "a/../../escape", b"x"),
    "backslash": lambda tar: add(tar, "..\\escape", b"x"),
    "control character": lambda tar: add(tar, "a\nb", b"x"),
    "empty name": lambda tar: add(tar, "./", b"x", type=tarfile.REGTYPE),
    "symbolic link": lambda tar: add(tar, "link", type=tarfile.SYMTYPE, linkname="/etc"),
    "through a link": lambda tar: (add(tar, "d", type=tarfile.SYMTYPE, linkname="/tmp"), add(tar, "d/x", b"x"))[0],
    "hard link": lambda tar: add(tar, "link", type=tarfile.LNKTYPE, linkname="environment.py"),
    "fifo": lambda tar: add(tar, "pipe", type=tarfile.FIFOTYPE),
    "device": lambda tar: add(tar, "null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "sparse": lambda tar: add(tar, "holes", type=tarfile.GNUTYPE_SPARSE),
    "unknown kind": lambda tar: add(tar, "odd", type=b"Z"),
    "twice": lambda tar: add(tar, "environment.py", b"import os"),
    "file as folder": lambda tar: add(tar, "environment.py/x", b"x"),
    "secret": lambda tar: add(tar, "server.pem", b"KEY=1"),
    "many members": many,
    "long header": long_header,
    "bomb": bomb,
    "large file": lambda tar: add(tar, "zeros", bytes((64 << 20) + 1)),
}


@pytest.mark.hostile("uploads")
@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_archive_is_refused_and_leaves_nothing(team: Team, attack: str):
    with team.http(team.token("alice")) as http:
        answer = http.put("/environments/evil", content=archive_of(ATTACKS[attack]))
    assert answer.status_code == 400, answer.text
    assert code_of(answer.json()["error"]["message"]) == "upload_invalid"
    assert left_behind() == []
    assert open_store().environments() == []
    assert not Path("/tmp/flash-escape").exists()


@pytest.mark.hostile("uploads")
@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [b"", b"not an archive", gzip.compress(b"no tar"), archive_of()[:-12], archive_of()[:200], gzip.compress(b"")],
    ids=["empty", "text", "no tar", "without its end", "cut short", "empty gzip"],
)
def test_what_is_no_whole_archive_is_refused(team: Team, body: bytes):
    with team.http(team.token("alice")) as http:
        answer = http.put("/environments/e", content=body)
    assert answer.status_code == 400 and code_of(answer.json()["error"]["message"]) == "upload_invalid"
    assert left_behind() == []


@pytest.mark.hostile("uploads")
def test_an_upload_without_end_is_cut_off(team: Team, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uploads, "MAX_ARCHIVE_BYTES", 1 << 20)
    with team.http(team.token("alice")) as http:
        answer = http.put("/environments/e", content=(b"x" * (1 << 16) for _ in range(17)))
    assert answer.status_code == 413
    assert left_behind() == []


def test_a_broken_environment_is_refused_unless_it_is_not_to_be_loaded(team: Team):
    body = archive_of(lambda tar: add(tar, "datasets/x.jsonl", b""))
    broken = gzip.compress(gzip.decompress(body).replace(b"class Echo(", b"class Echo[["))
    with team.http(team.token("alice")) as http:
        refused = http.put("/environments/e", content=broken)
        assert code_of(refused.json()["error"]["message"]) == "environment_invalid"
        assert left_behind() == []
        assert http.put("/environments/e?load=false", content=broken).status_code == 201
        assert http.put("/environments/e?load=maybe", content=broken).status_code == 400
        assert http.put("/environments/No%20Name", content=broken).status_code == 400
