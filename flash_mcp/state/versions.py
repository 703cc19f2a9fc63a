"""Pushed environments: a folder's files under environments_dir()/NAME/DIGEST, never changed once
they are there.

Those of another than the local owner lie under environments_dir()/@OWNER/NAME/DIGEST.

    with staged("calculator", folder_files(Path("calculator"))) as stage:
        ...                        # look at stage.folder, load it
        version = stage.commit()   # atomic; left out, nothing remains

DIGEST is made from the paths and contents, so that the same files are the same version wherever
they are pushed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from environments import task_cache
from flash_mcp.protocol.errors import FlashError, disk_error, expanded
from flash_mcp.protocol.paths import environments_dir
from flash_mcp.state.owners import caller

Files = Mapping[str, Path | bytes]
"""{relative posix path: file to read, or content}"""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
NAME_RULE = "up to 64 lowercase letters, digits, - and _, beginning with a letter or a digit"
ENTRY_POINT = "environment.py"
DIGEST_LENGTH = 16
MAX_FILES = 1000
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 256 << 20
MAX_PATH_BYTES = 240
IGNORED_FOLDERS = re.compile(
    r"__pycache__|\.kept|\.git|\.hg|\.svn|\.?venv|node_modules|\.(mypy|pytest|ruff|hypothesis|ipynb)_?(cache|checkpoints)?|"
    r"\.(idea|vscode|tox|nox)|.+\.egg-info"
)
PLAYBOOK = ("TRAINING.md", b"# Train a model with flash-mcp")
"""How the playbook that a starter has is called, and begins: it is for the reader of the folder."""
IGNORED_FILES = re.compile(r".+\.py[co]|\.env|\.DS_Store|Thumbs\.db|.+~|\..+\.swp")
SECRET_FILES = re.compile(
    r"\.env(\..+)?|\.envrc|.+\.(pem|key|p12|pfx|jks|kdbx)|id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.npmrc|\.pypirc|"
    r"\.git-credentials|\.htpasswd|(aws_)?credentials(\.json)?|client_secret.*\.json|service_account.*\.json",
    re.IGNORECASE,
)
SECRET_EXAMPLES = re.compile(r".+\.(example|sample|template|dist)", re.IGNORECASE)


@dataclass(frozen=True)
class Version:
    """A pushed environment; `created` is False if that name had the same files before."""

    name: str
    digest: str
    path: Path
    files: int
    size_bytes: int
    created: bool


DOCUMENT = re.compile(r"(?:changelog|license|notice|readme)(?:\.(?:md|rst|txt))?", re.IGNORECASE)
"""Files of a version that decide neither what is asked nor what it earns."""


def check_name(name: str) -> str:
    """The name itself; FlashError(invalid_argument) for one that breaks NAME_RULE."""
    if not NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:64]
        fix = f"a name is {NAME_RULE}" + (f"; {near!r} would do" if NAME.fullmatch(near) else "")
        raise FlashError("invalid_argument", f"{name!r:.100} cannot be a name", fix=fix)
    return name


def folder_files(folder: Path) -> Files:
    """What a push of `folder` consists of: all of it but caches, repositories, virtual
    environments, and the playbook of a starter.

    FlashError(upload_invalid) for links, devices, files that look like secrets, and where a limit
    is passed."""
    folder = expanded(folder)
    if not folder.is_dir():
        what = f"there is no folder {str(folder)!r} on the server"
        starter = "env_setup writes one to start from"
        fix = f"pass the folder that holds environment.py as an absolute path; {starter}"
        raise FlashError("upload_invalid", what, fix=fix)
    # One more than may be: a push of the wrong folder ends before all of it was looked at.
    result = itertools.islice(_walk(folder), MAX_FILES + 1)
    files: Files = {path.relative_to(folder).as_posix(): path for path in result}
    name, beginning = PLAYBOOK
    if name in files:
        with (folder / name).open("rb") as stream:
            if stream.read(len(beginning)) == beginning:
                del files[name]
    _check(files)
    return files


def inline_files(texts: Mapping[str, str]) -> Files:
    """The files of a push that gives them as text; raises as `folder_files` does."""
    files = {path: text.encode(errors="surrogatepass") for path, text in texts.items()}
    _check(files)
    for path in files:
        for parent in PurePosixPath(path).parents:
            if parent.as_posix() in files:
                what = "is given both as a file and as a folder"
                raise refusal(parent.as_posix(), what, "rename one of them")
    return files


@dataclass(frozen=True)
class Stage:
    """Files written out, not published yet. `parent` is where the versions of that name are."""

    parent: Path
    folder: Path
    digest: str
    files: int
    size_bytes: int

    def commit(self) -> Version:
        """Publish. The same files under the same name are the version that is there already."""
        target, created = self.parent / self.digest, True
        self.parent.mkdir(exist_ok=True)
        try:
            self.folder.rename(target)
        except OSError as error:
            if not target.is_dir():
                raise disk_error(error, target) from error
            if digest_of(target) != self.digest:
                what = "the stored files of this version were changed since"
                lost = "runs pinned to it would not have got what was pushed"
                fix = f"remove {target} and push again; {lost}"
                raise FlashError("upload_invalid", what, path=target, fix=fix) from error
            created = False
        return Version(self.parent.name, self.digest, target, self.files, self.size_bytes, created)


@contextlib.contextmanager
def staged(
    name: str, files: Files, base: Path | None = None, *, root: Path | None = None
) -> Generator[Stage, None, None]:
    """Write files to a temporary folder next to their target; it is removed unless committed.

    `root` is the folder of all names, by default that of environments.
    FlashError(invalid_argument | upload_invalid | disk_full).
    """
    root = owner_dir(root or environments_dir(base))
    target = root / check_name(name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=".staged-", dir=root, ignore_cleanup_errors=True
        ) as folder:
            size_bytes = sum(_write(Path(folder, path), source) for path, source in files.items())
            yield Stage(target, Path(folder), digest_of(Path(folder)), len(files), size_bytes)
    except OSError as error:
        raise disk_error(error, root) from error


def owner_dir(root: Path) -> Path:
    """The folder below `root` with the caller's versions. Each owner has one, so that pushing the
    same files does not reveal another owner's push.
    """
    if caller().is_local:
        return root
    return root / f"@{caller().owner}"


def digest_of(folder: Path, *, without_documents: bool = False) -> str:
    """The digest of a folder's files: sha256 over their sorted paths and contents, shortened.
    Without documents, such as a README, it is that of scorer and tasks.
    """
    files: dict[str, Path] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if without_documents and DOCUMENT.fullmatch(name):
            continue
        if path.is_file() and not name.startswith(f"{task_cache.FOLDER}/"):
            files[name] = path
    return digest_of_files(files)


def keep_generated(folder: Path, texts: Mapping[str, str]) -> None:
    """Keep generated tasks with a version (environments.task_cache). FlashError(disk_full)."""
    try:
        task_cache.keep(folder, texts)
    except OSError as error:
        raise disk_error(error, folder) from error


def digest_of_files(files: Files) -> str:
    whole = hashlib.sha256()
    for path in sorted(files, key=PurePosixPath):
        source = files[path]
        content = source if isinstance(source, bytes) else source.read_bytes()
        whole.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()[:DIGEST_LENGTH]


# -- what may be pushed ----------------------------------------------------------------------------


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files below `folder`, sorted. Links are refused: a push holds what it holds."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            if not IGNORED_FOLDERS.fullmatch(entry.name):
                yield from _walk(Path(entry.path))
            continue
        is_link = stat.S_ISLNK(mode)
        is_ignored_link = is_link and IGNORED_FOLDERS.fullmatch(entry.name)
        if is_ignored_link or IGNORED_FILES.fullmatch(entry.name):
            continue
        if not stat.S_ISREG(mode):
            what = "is a link" if is_link else "is no regular file"
            fix = "replace it by the file itself, or move it out of the folder"
            raise refusal(entry.path, what, fix)
        yield Path(entry.path)


def _check(files: Files) -> None:
    for path in files:
        check_path(path)
        if path.startswith(f"{task_cache.FOLDER}/"):
            raise refusal(path, "is where generated tasks are kept", "leave this folder out")
        name = path.rpartition("/")[2]
        if SECRET_FILES.fullmatch(name) and not SECRET_EXAMPLES.fullmatch(name):
            variables = "environment variables, named by train(secrets=[...])"
            fix = f"move it out; environment code gets secrets as {variables}"
            raise refusal(path, "looks like a secret, and what is pushed is kept and copied", fix)
    if ENTRY_POINT not in files:
        what = f"there is no {ENTRY_POINT} among the files: "
        what += ", ".join(sorted(files)[:8]) or "nothing"
        needed = "environment.py, which defines load_environment"
        fix = f"put {needed}, at the top of what is pushed; env_setup writes one"
        raise FlashError("upload_invalid", what, fix=fix)
    if len(files) > MAX_FILES:
        packed = "pack many small files into one JSONL file"
        fix = f"leave out what the environment does not read, or {packed}"
        raise FlashError("upload_invalid", f"there are more than {MAX_FILES} files", fix=fix)
    sizes: dict[str, int] = {}
    for path, source in files.items():
        sizes[path] = len(source) if isinstance(source, bytes) else source.stat().st_size
    largest = max(sizes, key=lambda path: sizes[path])
    total = sum(sizes.values())
    if sizes[largest] > MAX_FILE_BYTES or total > MAX_TOTAL_BYTES:
        limits = (MAX_FILE_BYTES >> 20, MAX_TOTAL_BYTES >> 20)
        fix = "keep each file within {} MiB and all within {} MiB".format(*limits)
        share = f"of which {largest} {sizes[largest]:,}"
        what = f"the files are too large: {total:,} bytes, {share}"
        raise FlashError("upload_invalid", what, fix=fix)


def check_path(path: str) -> None:
    """FlashError(upload_invalid) for a path that leaves the folder, or that others cannot use."""
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or len(path.encode()) > MAX_PATH_BYTES:
        limit = f"more than {MAX_PATH_BYTES} bytes"
        what = f"has a control character or a backslash in its path, or {limit}"
        raise refusal(path, what, "rename it")
    if not {"", ".", ".."}.isdisjoint(parts):
        what = "would not lie inside the environment's folder"
        raise refusal(path, what, "use a plain relative path like datasets/train.jsonl")


def refusal(path: str, what: str, fix: str) -> FlashError:
    return FlashError("upload_invalid", f"{path!r:.200} {what}; nothing was pushed", fix=fix)


def _write(path: Path, source: Path | bytes) -> int:
    """Write one file for good, read-only; returns its size."""
    content = source if isinstance(source, bytes) else source.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    path.chmod(0o444)
    return len(content)
