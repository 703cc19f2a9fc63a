"""flash_mcp/environments.py: what a push takes, refuses and leaves behind."""

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import environments_dir
from flash_mcp.state import versions as pushes
from flash_mcp.state.versions import Version, check_name, digest_of, folder_files, inline_files, staged

SOURCE = "def load_environment(): ...\n"


def push(name: str, files: pushes.Files) -> Version:
    with staged(name, files) as stage:
        return stage.commit()


def project(folder: Path, **files: str) -> Path:
    """A folder with an environment.py and these files."""
    for name, text in {"environment.py": SOURCE, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_folder_becomes_a_version_under_its_digest(tmp_path: Path) -> None:
    version = push("sums", folder_files(project(tmp_path / "sums", **{"datasets/train.jsonl": "{}"})))
    assert version.path == environments_dir() / "sums" / version.digest
    assert names(version.path) == ["datasets/train.jsonl", "environment.py"]
    assert (version.files, version.size_bytes, version.created) == (2, len(SOURCE) + 2, True)
    assert digest_of(version.path) == version.digest
    assert stat.S_IMODE((version.path / "environment.py").stat().st_mode) == 0o444


def test_the_same_files_are_the_same_version_pushed_from_anywhere(tmp_path: Path) -> None:
    first = push("sums", folder_files(project(tmp_path / "a", **{"datasets/train.jsonl": "{}"})))
    again = push("sums", inline_files({"datasets/train.jsonl": "{}", "environment.py": SOURCE}))
    other_name = push("products", inline_files({"datasets/train.jsonl": "{}", "environment.py": SOURCE}))
    assert (again.digest, again.created, again.path) == (first.digest, False, first.path)
    assert (other_name.digest, other_name.created) == (first.digest, True)

    others = {"environment.py": f"{SOURCE} "}, {"environment.py": SOURCE, "a.txt": ""}
    for files in (*others, {"environment.py": SOURCE, "datasets/train.json": "l{}"}):
        assert push("sums", inline_files(files)).digest != first.digest, "any other byte or path is another version"


def test_caches_repositories_and_virtual_environments_stay_out(tmp_path: Path) -> None:
    folder = project(
        tmp_path / "sums",
        **{
            "__pycache__/x.pyc": "", ".git/config": "", ".venv/bin/python": "", "venv/.env": "",
            "node_modules/x.js": "", ".ipynb_checkpoints/x": "", "sums.egg-info/PKG-INFO": "", "helper.pyc": "",
            ".DS_Store": "", ".gitignore": "kept", "lib/helper.py": "kept",
        },
    )  # fmt: skip
    assert sorted(folder_files(folder)) == [".gitignore", "environment.py", "lib/helper.py"]


@pytest.mark.parametrize(
    "name", [".env.local", "deploy/.ENV", "server.pem", "id_ed25519", ".netrc", "credentials.json", "my.key"]
)
def test_what_looks_like_a_secret_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlashError, match=r"upload_invalid.*looks like a secret.*secrets="):
        folder_files(project(tmp_path / "sums", **{name: "API_KEY=1"}))
    with pytest.raises(FlashError, match="looks like a secret"):
        inline_files({"environment.py": SOURCE, name: "API_KEY=1"})
    assert inline_files({"environment.py": SOURCE, f"{name}.example": ""})


def test_a_file_of_secrets_beside_a_config_is_left_out_of_a_folder_and_refused_inline(tmp_path: Path) -> None:
    folder = project(tmp_path / "sums", **{".env": "API_KEY=1", "configs/.env": "API_KEY=1"})
    assert sorted(folder_files(folder)) == ["environment.py"]
    with pytest.raises(FlashError, match="looks like a secret"):
        inline_files({"environment.py": SOURCE, "configs/.env": "API_KEY=1"})


@pytest.mark.hostile("pushes")
def test_links_are_refused_wherever_they_point(tmp_path: Path) -> None:
    for target in ("environment.py", "/etc/hostname", "..", "missing"):
        folder = project(tmp_path / target.strip("/.").replace("/", "-") if target != ".." else tmp_path / "up")
        (folder / "link").symlink_to(target)
        with pytest.raises(FlashError, match=r"link' is a link; nothing was pushed"):
            folder_files(folder)


@pytest.mark.hostile("pushes")
def test_pipes_and_sockets_are_refused(tmp_path: Path) -> None:
    os.mkfifo(project(tmp_path / "a") / "pipe")
    with pytest.raises(FlashError, match="is no regular file"):
        folder_files(tmp_path / "a")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(project(tmp_path / "b") / "socket"))
        with pytest.raises(FlashError, match="is no regular file"):
            folder_files(tmp_path / "b")


PATHS = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "",
    ".",
    "a\\b",
    "a\nb",
    "a\x00b",
    "x" * 241,
    "é" * 121,
]


@pytest.mark.hostile("pushes")
@pytest.mark.parametrize("path", [*PATHS, "é" * 121])
def test_paths_that_leave_the_folder_or_are_no_names_are_refused(path: str) -> None:
    with pytest.raises(FlashError, match=r"upload_invalid.*nothing was pushed"):
        inline_files({"environment.py": SOURCE, path: "x"})
    with pytest.raises(FlashError, match="is given both as a file and as a folder"):
        inline_files({"environment.py": SOURCE, "a": "", "a/b": ""})


def test_a_push_without_entry_point_or_folder_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("")
    with pytest.raises(FlashError, match=r"no environment.py among the files: main.py.*env_setup writes one"):
        folder_files(tmp_path)
    with pytest.raises(FlashError, match="there is no folder"):
        folder_files(tmp_path / "missing")
    with pytest.raises(FlashError, match="among the files: nothing"):
        inline_files({})


def test_count_and_size_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path / "sums", **{f"rows/{number}": "x" * 10 for number in range(20)})
    monkeypatch.setattr(pushes, "MAX_FILES", 20)
    with pytest.raises(FlashError, match="there are more than 20 files"):
        folder_files(folder)
    monkeypatch.setattr(pushes, "MAX_FILES", 21)
    assert len(folder_files(folder)) == 21
    monkeypatch.setattr(pushes, "MAX_FILE_BYTES", 20)
    with pytest.raises(FlashError, match=r"too large.*of which environment.py 28"):
        folder_files(folder)
    monkeypatch.setattr(pushes, "MAX_FILE_BYTES", 28)
    monkeypatch.setattr(pushes, "MAX_TOTAL_BYTES", 200)
    with pytest.raises(FlashError, match="too large: 228 bytes"):
        folder_files(folder)


def test_plain_names_are_names_and_what_nearly_fits_is_suggested() -> None:
    for name in ("a", "calculator", "my-env_2", "0", "x" * 64):
        assert check_name(name) == name
    for name in ("", "-a", "_a", "My Env", "a/b", "..", "a@b", "a.b", "é", "x" * 65, "a\n"):
        with pytest.raises(FlashError, match="invalid_argument"):
            check_name(name)
    with pytest.raises(FlashError, match="'my-env' would do"):
        check_name("My Env!")


def test_what_was_not_committed_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="given up"),
        staged("sums", inline_files({"environment.py": SOURCE})) as stage,
    ):
        assert stage.folder.is_dir()
        raise RuntimeError("given up")
    assert not (environments_dir() / "sums").exists()
    with pytest.raises(FlashError), staged("Bad Name", {}):
        pass
    assert not any(environments_dir().glob("*"))


def test_many_pushes_of_the_same_files_at_once_make_one_version() -> None:
    files = inline_files({"environment.py": SOURCE, **{f"rows/{number}": "x" for number in range(50)}})
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda _: push("sums", files), range(16)))
    assert [version.created for version in versions].count(True) == 1
    assert len({version.path for version in versions}) == 1
    assert [path.name for path in (environments_dir() / "sums").iterdir()] == [versions[0].digest]


def test_a_stored_version_that_was_tampered_with_is_noticed() -> None:
    files = inline_files({"environment.py": SOURCE})
    stored = push("sums", files).path / "environment.py"
    stored.chmod(0o644)
    stored.write_text("tampered")
    with pytest.raises(FlashError, match="were changed since"):
        push("sums", files)
