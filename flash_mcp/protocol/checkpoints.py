"""The checkpoints of a run: checkpoints/STEP/EPOCH-N/ of its folder.

Each attempt saves into folders of its own, and a complete checkpoint never changes, but for its
optimizer's state. So an attempt that was stopped while it saved, and wakes later, cannot touch its
successor's."""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

from environments.locks import lock, part_of
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.run_files import Json, Manifest, ManifestFile, number
from flash_mcp.protocol.storage import Storage, dump, sha256_of

ADAPTER = "adapter_"
"""How the files of a checkpoint begin that serving and a warm start need."""
OPTIMIZER = "optimizer.pt"
"""The optimizer's state, twice as large as the adapter. Only the newest good checkpoint keeps it.
Without it a checkpoint is complete: whoever resumes from it starts with a fresh optimizer."""
LATEST = "latest"
"""A link of a local run folder to the newest checkpoint. The supervisor makes it, and nobody reads
it but programs of others."""
SAVED = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
"""EPOCH-N, the name of a checkpoint's folder."""


class Checkpoints:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    # -- reading -----------------------------------------------------------------------------------

    def versions(self) -> dict[int, str]:
        """{step: version} of checkpoints that may be complete. The version changes with each that
        an attempt completes.
        """
        versions: dict[int, str] = {}
        for step in self._all_steps():
            names = self._storage.names("checkpoints", str(step))
            complete = filter(functools.partial(self._is_complete, step), names)
            if version := ",".join(sorted(complete)):
                versions[step] = version
        return versions

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return list(filter(self.manifest, self._all_steps()))

    def _all_steps(self) -> list[int]:
        steps = map(number, self._storage.names("checkpoints"))
        return sorted(step for step in steps if step is not None)

    def _is_complete(self, step: int, save: str) -> bool:
        is_save = SAVED.fullmatch(save) is not None
        return is_save and "MANIFEST.json" in self._storage.names("checkpoints", str(step), save)

    def manifest(self, step: int, digest: str | None = None) -> Manifest | None:
        """The newest complete checkpoint of that step; with `digest`, the newest that has it."""
        names = self._storage.names("checkpoints", str(step))
        saves = list(filter(SAVED.fullmatch, names))
        for save in sorted(saves, key=saved_by, reverse=True):
            place = f"checkpoints/{step}/{save}"
            name = f"{place}/MANIFEST.json"
            manifest = self._storage.read_object(ManifestFile, name, step=step)
            if manifest is None:
                continue
            if manifest["epoch"] != saved_by(save)[0]:
                self._storage.damaged[name] = f"it is of attempt {manifest['epoch']}"
            elif manifest["digest"] != _digest_of(manifest["files"]):
                self._storage.damaged[name] = "its digest is not that of its files"
            elif manifest["optimizer_bytes"] > manifest["size_bytes"]:
                self._storage.damaged[name] = "a part of it is larger than the whole"
            elif digest in (None, manifest["digest"]):
                return {**manifest, "path": self._storage.address(place)}
        return None

    def verify(self, step: int, digest: str | None = None) -> Manifest:
        """The manifest, if every file matches it, and it has `digest`, which the database knows;
        otherwise FlashError(checkpoint_corrupt) or FlashError(unknown_checkpoint).
        """
        manifest = self._existing(step, digest)
        place = self._place(manifest)
        _check_files(manifest, lambda name: self._storage.digest(f"{place}/{name}"))
        return manifest

    def _existing(self, step: int, digest: str | None) -> Manifest:
        manifest = self.manifest(step, digest)
        if manifest is None and digest and self.manifest(step):
            what = "the folder has another checkpoint than the run saved at that step"
            fix = "use another checkpoint; while the run goes on, repeat the call in a minute"
            raise FlashError("checkpoint_corrupt", what, step=step, digest=digest, fix=fix)
        if manifest is None:
            what, fix = "there is no checkpoint at that step", f"use one of {self.steps()}"
            raise FlashError("unknown_checkpoint", what, step=step, fix=fix)
        return manifest

    def newest_good(self) -> int | None:
        for step in reversed(self.versions()):
            try:
                self.verify(step)
            except FlashError as error:
                if error.code.startswith("store_"):  # it says nothing about the checkpoint
                    raise
                continue
            return step
        return None

    def has_optimizer(self, step: int) -> bool:
        manifest = self.manifest(step)
        return bool(manifest and self._storage.has(f"{self._place(manifest)}/{OPTIMIZER}"))

    def fetch(
        self, step: int, into: Path, *, whole: bool = True, digest: str | None = None
    ) -> Path:
        """The folder of a verified checkpoint: its own if it is local, else a copy beside `into`
        that is made once. Without `whole`, the copy has the adapter only. `digest` is as in
        `verify`.
        """
        if self._storage.is_local:
            return Path(self.verify(step, digest)["path"])
        manifest = self._existing(step, digest)
        target = into.with_name(f"{into.name}-{manifest['digest']}")
        if not whole:
            files = manifest["files"].items()
            adapter = {name: digest for name, digest in files if name.startswith(ADAPTER)}
            manifest = cast("Manifest", {**manifest, "files": adapter})
            target = target.with_name(f"{target.name}-adapter")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Deployments that start at once copy the same adapter once.
        with target.with_name(f".{target.name}.lock").open("a") as file:
            lock(file)
            if not target.is_dir():
                with part_of(target) as part:
                    self._copy(manifest, part / "copy")
                    # A copy that was cut off never has the final name.
                    (part / "copy").rename(target)
        return target

    def _copy(self, manifest: Manifest, into: Path) -> None:
        """Copy a checkpoint's files and check them. The optimizer's state may be gone."""
        place = self._storage.path(self._place(manifest))
        folder = self._place(manifest)
        sizes = self._storage.sizes(folder)
        names = [f"{folder}/{name}" for name in manifest["files"]]
        if sum(sizes.get(name, 0) for name in names) > manifest["size_bytes"]:
            what, fix = "its files are larger than it says", "use an earlier checkpoint"
            raise FlashError("checkpoint_corrupt", what, step=manifest["step"], fix=fix)
        for name in manifest["files"]:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                self._storage.filesystem.get_file(f"{place}/{name}", str(into / name))
        _check_files(manifest, Storage(into).digest)

    def _place(self, manifest: Manifest) -> str:
        return manifest["path"].removeprefix(self._storage.address(""))

    # -- writing -----------------------------------------------------------------------------------

    def save(
        self, step: int, save: str, source: Path, metrics: Json, guard: Callable[[], None]
    ) -> Manifest:
        """Copy the files of local folder `source` to a new checkpoint of `step`; its manifest.

        `save` is EPOCH-N, of the attempt that saves. MANIFEST.json is written last: a checkpoint
        without it does not exist. The newest checkpoint of a step counts. The files of one that
        failed are removed."""
        place = f"checkpoints/{step}/{save}"
        files: dict[str, Path] = {}
        digests: dict[str, str] = {}
        for path in filter(Path.is_file, sorted(source.rglob("*"))):
            name = str(path.relative_to(source))
            files[name] = path
            digests[name] = sha256_of(path)
        manifest: ManifestFile = {
            "step": step,
            "epoch": saved_by(save)[0],
            "time": time.time(),
            "digest": _digest_of(digests),
            "files": digests,
            "size_bytes": sum(path.stat().st_size for path in files.values()),
            "optimizer_bytes": files[OPTIMIZER].stat().st_size if OPTIMIZER in files else 0,
            "metrics": metrics,
        }
        try:
            self._storage.put_files(place, files)
            self._storage.write(f"{place}/MANIFEST.json", dump(manifest), guard)
        except BaseException as error:
            self._storage.remove(place)
            if isinstance(error, OSError):
                guard()  # a successor removes what it finds unfinished
                error = disk_error(error, Path(self._storage.path(place)))
            if isinstance(error, FlashError) and error.code == "disk_full":
                error.values["needed_bytes"] = manifest["size_bytes"]
            raise error
        with self._storage.listed():
            epoch = manifest["epoch"]
            for name in self._storage.names("checkpoints", str(step)):
                is_over = SAVED.fullmatch(name) and saved_by(name)[0] < epoch
                if is_over and not self._is_complete(step, name):
                    self._storage.remove("checkpoints", str(step), name)
            # An older state may still be needed until the new one has been read back.
            if self.newest_good() == step:
                self._drop_older_optimizers(place, manifest["epoch"])
        return {**manifest, "path": self._storage.address(place)}

    def _drop_older_optimizers(self, newest: str, epoch: int) -> None:
        """Delete the optimizer's state of every checkpoint that attempt `epoch` or an earlier one
        saved, except `newest`.
        """
        for step in self._storage.names("checkpoints"):
            for name in self._storage.names("checkpoints", step):
                place = f"checkpoints/{step}/{name}"
                is_ours = SAVED.fullmatch(name) and saved_by(name)[0] <= epoch
                has_state = OPTIMIZER in self._storage.names(*place.split("/"))
                if is_ours and place != newest and has_state:
                    self._storage.remove(place, OPTIMIZER)

    def remove(self, step: int) -> None:
        """Delete all of that step, its manifest first: without one a checkpoint does not exist."""
        names = self._storage.sizes("checkpoints", str(step))
        self._storage.remove_files([name for name in names if name.endswith("/MANIFEST.json")])
        self._storage.remove("checkpoints", str(step))

    def drop_optimizers(self) -> int:
        """Delete the optimizer's state of every checkpoint, which can still be served and trained
        from; the bytes that it took."""
        sizes = self._storage.sizes("checkpoints")
        states = [name for name in sizes if name.endswith(f"/{OPTIMIZER}")]
        self._storage.remove_files(states)
        return sum(map(sizes.__getitem__, states))


def saved_by(name: str) -> tuple[int, int]:
    """The attempt that saved the checkpoint of this folder, and the number of its save."""
    epoch, _, number = name.partition("-")
    return int(epoch), int(number)


def _digest_of(files: Mapping[str, str]) -> str:
    return hashlib.sha256(dump(files)).hexdigest()[:16]


def _check_files(manifest: Manifest, digest_of: Callable[[str], str | None]) -> None:
    for name, digest in manifest["files"].items():
        result = digest_of(name)
        if result is None and name == OPTIMIZER:
            continue
        if result != digest:
            what, fix = f"{name} does not match its checksum", "use an earlier checkpoint"
            raise FlashError("checkpoint_corrupt", what, step=manifest["step"], fix=fix)
