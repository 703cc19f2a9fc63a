"""Curated datasets: DATASETS_DIR/NAME/DIGEST/{train.jsonl, holdout.jsonl, manifest.json}, never
changed once there.

Those of an owner over HTTP lie in a folder of their own (`owner_dir`).

A line is {"messages": [...], "prompt_messages": N, "provenance": {...}}: the first N messages are
the task's, and all assistant messages after them are learnt but those of weight 0. A row whose task
has tools also has "tools", their OpenAI function schemas. DIGEST covers the manifest as well, so
that NAME@DIGEST in a run's spec names the rows and where they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import datasets_dir, home
from flash_mcp.protocol.records import Json
from flash_mcp.state.disk import check_quota, size_of
from flash_mcp.state.owners import LOCAL_OWNER, operator_settings
from flash_mcp.state.versions import Version, digest_of, owner_dir, staged

TRAIN, HOLDOUT, MANIFEST = "train.jsonl", "holdout.jsonl", "manifest.json"


@dataclass(frozen=True)
class Dataset:
    """A dataset as `find` found it, its files as they were made."""

    name: str
    digest: str
    path: Path
    manifest: Json

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.digest}"

    @property
    def created(self) -> float:
        return self.path.stat().st_mtime

    def rows(self, file: str = TRAIN) -> list[Json]:
        path = self.path / file
        if path.is_file():
            return list(load_rows(path.read_bytes()))
        return []

    def pinned(self) -> Json:
        """What job.json says of it: where it is, and the checksums of its rows."""
        pinned: Json = {"name": self.name, "digest": self.digest, "path": str(self.path)}
        return pinned | {"files": self.manifest["files"]}


def register(
    name: str,
    train: Sequence[Json],
    holdout: Sequence[Json],
    manifest: Json,
    base: Path | None = None,
) -> Version:
    """Keep rows and manifest for good; the same ones under the same name are the dataset that is
    there already.

    Raises FlashError(invalid_argument | quota_exceeded | disk_full).
    """
    files = {TRAIN: dump_rows(train)} | ({HOLDOUT: dump_rows(holdout)} if holdout else {})
    checksums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    body = json.dumps({**manifest, "name": name, "files": checksums}, indent=1, sort_keys=True)
    with staged(name, {**files, MANIFEST: body.encode()}, root=datasets_dir(base)) as stage:
        if not (stage.parent / stage.digest).exists():
            stored = sum(map(size_of, chain.from_iterable(_known(base).values())))
            limit = int(operator_settings(base or home()).disk.datasets_gib * 2**30)
            check_quota("datasets", stored, stage.size_bytes, limit, "datasets_gib")
        return stage.commit()


def find(reference: str) -> Dataset:
    """In NAME@DIGEST six characters of the digest do; NAME alone where there is one version.

    Raises FlashError(unknown_dataset | dataset_invalid).
    """
    path = locate(reference)
    if digest_of(path) != path.name:
        what = "its files were changed since it was made"
        fix = "curate it again; a run would not learn what its manifest says"
        raise FlashError("dataset_invalid", what, dataset=reference, fix=fix)
    return _read(path)


def locate(reference: str, base: Path | None = None) -> Path:
    """Where the dataset is that `find` returns, whether its files are as they were made or not."""
    name, _, digest = reference.partition("@")
    existing = _known(base)
    versions = existing.get(name, [])
    results = versions
    if digest:
        results = [path for path in versions if path.name.startswith(digest) and len(digest) >= 6]
    if len(results) != 1:
        what = "there is no dataset of that name"
        names = ", ".join(sorted(existing)[:20])
        fix = f"use one of: {names}" if names else "make one with curate"
        if versions:
            what = "that is not one version of it"
            fix = f"use one of: {', '.join(f'{name}@{path.name}' for path in versions[:5])}"
        raise FlashError("unknown_dataset", what, dataset=reference, fix=fix)
    return results[0]


def newest_first(base: Path) -> list[Dataset]:
    results = map(_read, chain.from_iterable(_known(base).values()))
    return sorted(results, key=lambda dataset: dataset.created, reverse=True)


def everyones(base: Path) -> list[tuple[str, Path]]:
    """(owner, version) of every dataset of all owners, for any caller."""
    root, there = datasets_dir(base), f"[!.@]*/*/{MANIFEST}"
    results: list[tuple[str, Path]] = []
    for folder in (root, *sorted(root.glob("@*"))):
        owner = LOCAL_OWNER if folder == root else folder.name[1:]
        results += ((owner, manifest.parent) for manifest in sorted(folder.glob(there)))
    return results


def _read(path: Path) -> Dataset:
    return Dataset(path.parent.name, path.name, path, json.loads((path / MANIFEST).read_text()))


def _known(base: Path | None) -> dict[str, list[Path]]:
    existing: dict[str, list[Path]] = {}
    for manifest in sorted(owner_dir(datasets_dir(base)).glob(f"[!.]*/*/{MANIFEST}")):
        existing.setdefault(manifest.parent.parent.name, []).append(manifest.parent)
    return existing


def dump_rows(rows: Iterable[Json]) -> bytes:
    """JSON lines, in plain ASCII: no line separator within a text can be taken for a line's end.
    Keys keep their order, as templates show the schemas of tools."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def load_rows(content: bytes) -> Iterator[Json]:
    return (json.loads(line) for line in content.decode().split("\n") if line)
