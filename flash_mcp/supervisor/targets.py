"""The targets that the supervisor knows: this machine, and those of targets.toml."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import math
import os
import secrets
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from flash_mcp import __version__
from flash_mcp.protocol import base_models, node_code, sealing, surroundings
from flash_mcp.protocol.artifacts import MARK, Artifacts, packed
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.node_code import Order
from flash_mcp.protocol.packages import how_to_install
from flash_mcp.protocol.paths import home, write_private
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.run_files import ProbeFile
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import LOCAL_TARGET, EvalSpec, RunSpec
from flash_mcp.protocol.storage import RETRY_S
from flash_mcp.protocol.surroundings import environment_for
from flash_mcp.state import queue
from flash_mcp.state.runs import REMOTE_RETRY_S
from flash_mcp.state.targets import TargetSettings, find_target, key_of, tag_of
from flash_mcp.supervisor.launch.base import Handle, Launch, Launcher, Target
from flash_mcp.supervisor.launch.devices import WEIGHTS_SHARE, Device, need_of
from flash_mcp.supervisor.process import PYTHON


class LocalTarget(Target):
    """This machine. Its attempts share the supervisor's state directory, files and environment, but
    for the variables that go with a run.
    """

    name = LOCAL_TARGET
    retry_s = RETRY_S
    # Looking at files here costs little.
    threads = 0
    shares_disk = True
    beats_per_s = math.inf
    read_every_s = 0.0

    def __init__(self, base: Path, launcher: Launcher, worker: Sequence[str]) -> None:
        self.base = base
        self.launcher = launcher
        self.worker = tuple(worker)

    def job(self, run: Run, variables: Mapping[str, str]) -> Json:
        return queue.job(run)

    def launch(self, run: Run, variables: Mapping[str, str]) -> Launch:
        variables = surroundings.replaced(os.environ, variables) | {"FLASH_HOME": str(self.base)}
        return Launch(
            run.id,
            run.attempt,
            [*self.worker, run.folder, "--attempt", str(run.attempt)],
            environment_for(run.lineage.get("granted"), variables),
            Path(run.folder) / f"log.{run.attempt}",
            secrets=run.spec.secrets,
            gpus=0 if run.serves else run.spec.gpus,  # a server itself takes the emptiest cards
        )


class RemoteTarget(Target):
    """Machines that see nothing of this one: what a run needs travels through the storage."""

    retry_s = REMOTE_RETRY_S

    def __init__(
        self,
        name: str,
        settings: TargetSettings,
        launcher: Launcher,
        key: bytes = b"",
        code: Path | None = None,
    ) -> None:
        self.name = name
        self.key = key
        """The state directory's own, from which launch tokens are made."""
        self.settings = settings
        self.launcher = launcher
        self.artifacts = Artifacts(settings.storage, retry_s=REMOTE_RETRY_S)
        self.code = code
        """The folder with the wheel, if attempts bring it."""
        self._code_digest = ""

    def job(self, run: Run, variables: Mapping[str, str]) -> Json:
        job = queue.job(run)
        if self.settings.models == "server":
            own = surroundings.replaced(os.environ, variables)
            job = _with_models(job, RunFolder(run.folder, retry_s=self.retry_s), own)
        cache_bytes = int(self.settings.cache_gib * 2**30)
        storage = {"url": self.settings.storage, "cache_bytes": cache_bytes}
        if self.code:
            job = {**job, "code": {"path": str(self.code)}}
        job = packed(job, self.artifacts)
        if self.code:
            self._code_digest = job["code"]["path"].removeprefix(MARK)
        return {**job, "storage": storage}

    def launch(self, run: Run, variables: Mapping[str, str]) -> Launch:
        variables = node_environment(self.settings)
        folder, attempt = run.folder, run.attempt
        if run.spec.secrets or run.serves:
            variables[sealing.TOKEN] = self._token(run.id)
        named = ["worker.node", folder, "--attempt", str(attempt)]
        code = None
        if self.code:
            archive = self.artifacts.url_of(self._code_digest)
            log = f"{folder}/log.{attempt}"
            code = Order(archive=archive, digest=self._code_digest, log=log)
        command = on_node(self.settings, [*named, "--version", __version__], code)
        gib = card_gib(self.name, self.settings, run.spec)
        chosen = run.spec.slurm if isinstance(run.spec, RunSpec) else None
        options = [f"--{name}={value}" for name, value in (chosen or {}).items()]
        # Last: of two, sbatch takes the later one, and an owner's are the operator's.
        options += self.settings.owners.get(run.owner, [])
        return Launch(run.id, attempt, command, variables, None, run.spec.gpus, options, gib)

    def seal(self, run: Run, offer: Mapping[str, Any], secrets: Mapping[str, str]) -> bytes:
        return sealing.seal(secrets, offer, Handle.of(run).key, self._token(run.id))

    def _token(self, run_id: str) -> str:
        """The same for a later supervisor: an attempt may wait in the engine's queue for days, and
        the engine may start it again under another number.
        """
        return hmac.digest(self.key, run_id.encode(), "sha256").hex()


def _with_models(job: Json, folder: RunFolder, variables: Mapping[str, str]) -> Json:
    """The job with its base model, and that of its teacher, as folders of this machine."""
    before = (folder.read_json("job.json") or {}).get("lineage", {})
    lineage = job.get("lineage", {})
    variables = environment_for(lineage.get("granted"), variables)
    commit = lineage.get("model_commit") or before.get("model_commit")
    path = _fetched(base_models.pinned(job["model"], commit), variables)
    lineage = {**lineage, "model_commit": base_models.commit_of(path)}
    job = {**job, "model": str(path), "lineage": lineage}
    if (teacher := job.get("teacher")) and "model" in teacher:
        job["teacher"] = {**teacher, "path": str(_fetched(teacher["path"], variables))}
    return job


def _fetched(model: str, variables: Mapping[str, str]) -> Path:
    if base_models.is_folder(model):
        return Path(model)
    command = [*PYTHON, "worker.engine.fetch", "ensure", model]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        what = f"this machine cannot fetch {model} for the nodes: {done.stderr.strip()[-500:]}"
        fix = "let this machine reach the model's source, or set models = 'node' in the target"
        raise FlashError("hub_unreachable", what, fix=fix)
    return Path(done.stdout.strip())


def card_gib(name: str, settings: TargetSettings, spec: RunSpec | EvalSpec) -> float:
    """The memory that the engine has to find in a card, in GiB; 0 if it does not choose cards.
    FlashError(target_refused) if nobody knows how large the model is.
    """
    if not settings.launcher.chooses_cards(settings):
        return 0.0
    need = need_of(spec, Device("gpu", "a card", 0.0, 0.0))
    if need is None:
        what = f"nobody knows how large {spec.model} is, so that no card can be chosen for it"
        fix = f"name one: accelerators in resources of {name} in targets.toml"
        raise FlashError("target_refused", what, fix=fix)
    return need.all_gib / WEIGHTS_SHARE


def on_node(settings: TargetSettings, module: Sequence[str], code: Order | None) -> list[str]:
    command = [*shlex.split(settings.python or "python3"), "-P", "-m", *module]
    if code:
        program = ["-P", "-c", node_code.program(), json.dumps(code), *module]
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        python = shlex.split(settings.python) or [version]
        uv = ["uv", "run", "--no-project", "--no-config", "--quiet", "--python", *python]
        if "://" in settings.storage:
            uv += ["--with", "fsspec", "--with", "s3fs"]
        command = [*uv, "python", *program]
    if settings.env_file is None:
        return command
    sourced = f'set -a; . {shlex.quote(settings.env_file)}; set +a; exec "$@"'
    return ["/bin/sh", "-c", sourced, "sh", *command]


def node_environment(settings: TargetSettings) -> dict[str, str]:
    """What the target gives an attempt: nothing of this process's environment."""
    home = {} if settings.home is None else {"FLASH_HOME": settings.home}
    return {**home, **settings.env}


def open_target(base: Path, name: str) -> Target:
    settings = find_target(base, name)
    code = code_folder(base) if settings.setup == "uv" else None
    launcher = settings.launcher.of(settings, tag_of(base))
    return RemoteTarget(name, settings, launcher, key_of(base), code)


# -- this very version of flash-mcp as a wheel, for nodes that do not have it (setup = "uv") -------

ROOT = Path(__file__).parents[2]
PACKAGES = ("environments", "flash_mcp", "worker")
PINS = ("constraints-cpu.txt", "constraints-gpu.txt")
"""Of a checkout; an installed package has none, and uv takes the newest versions that fit."""
OVERRIDES = "".join(
    f"{name}; sys_platform == 'never'\n" for name in ("torchaudio", "torchcodec", "torchvision")
)
"""As [tool.uv] in pyproject.toml."""
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""So that the same files are the same bytes."""
TAG = "Wheel-Version: 1.0\nGenerator: flash-mcp\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def code_folder(base: Path) -> Path:
    """The folder in FLASH_HOME with the wheel and its pins, as they are now."""
    folder = base / "code" / __version__
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"flash_mcp-{__version__}-py3-none-any.whl": _wheel()}
    files["overrides.txt"] = OVERRIDES.encode()
    for name in PINS:
        if (ROOT / name).is_file():
            files[name] = (ROOT / name).read_bytes()
    for name, body in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != body:
            write_private(path, body, folder.parent)
    return folder


def _wheel() -> bytes:
    files: dict[str, bytes] = {}
    for path in sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    info = f"flash_mcp-{__version__}.dist-info"
    installed = metadata.distribution("flash-mcp")
    files[f"{info}/WHEEL"] = TAG.encode()
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (installed.read_text(name) or "").encode()
    record = f"{info}/RECORD"
    lines: list[str] = []
    for name, body in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(body)}\n")
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    created = io.BytesIO()
    with zipfile.ZipFile(created, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name, LONG_AGO), body, zipfile.ZIP_DEFLATED)
    return created.getvalue()


# The job that proves a target: it starts on a node, uses the storage, and says what is there

PROBE_S = 120.0
MAX_CLOCK_S = 300.0
"""A node's clock may differ by so much."""
MAX_LIST_LAG_S = 60.0
"""Lists may show so much later what another machine wrote: a folder is read again that often."""
SETUP_FIX = "correct the target's setup or python; docs/targets.md describes them"
POLL_S = 0.5
GONE_S = 10.0
"""A file may become visible so long after the job that wrote it has ended."""


def probe(name: str, settings: TargetSettings, wait_s: float = PROBE_S) -> ProbeFile:
    """Run the job; what its node says of itself.
    FlashError(target_unreachable | target_refused | store_unreachable).
    """
    key = f"probe-{secrets.token_hex(4)}"
    folder = RunFolder(settings.folder_of(key), retry_s=REMOTE_RETRY_S)
    artifacts = Artifacts(settings.storage, retry_s=REMOTE_RETRY_S)
    launcher = settings.launcher.of(settings)
    with ExitStack() as cleanup:  # whatever one of them raises, the others are called
        cleanup.callback(folder.remove)
        code: Order | None = None
        if settings.setup == "uv":
            digest = artifacts.put(code_folder(home()), key)
            cleanup.callback(artifacts.release, digest, key)
            log = f"{folder.url}/log.1"
            code = Order(archive=artifacts.url_of(digest), digest=digest, log=log)
        command = on_node(settings, ["worker.node", folder.url, "--probe"], code)
        began = time.time()
        folder.create({"time": began})
        # What it prints before it can store anything is seen where the node shares the folder.
        log = Path(folder.path("log.1")) if folder.is_local else None
        variables = node_environment(settings)
        handle = launcher.submit(Launch(key, 1, command, variables, log))
        cleanup.callback(launcher.cancel, handle)
        deadline = time.monotonic() + wait_s
        gone_at: float | None = None
        while (probed := folder.probe()) is None:
            status = launcher.poll([handle])[handle.key]
            if status.state == "gone" and gone_at is None:
                gone_at = time.monotonic()
            if gone_at is not None and time.monotonic() - gone_at > GONE_S:
                what = f"the probe of {name} ended without an answer ({status.detail})"
                if said := folder.log_tail(1):
                    raise FlashError("target_refused", f"{what}: {said}", fix=SETUP_FIX)
                needs = "python must exist there, with flash-mcp, and reach the storage with its"
                fix = f"run this on a node: {shlex.join(command)}; {needs} keys"
                raise FlashError("target_refused", what, fix=fix)
            if time.monotonic() > deadline:
                what = f"the probe of {name} did not answer within {wait_s:.0f} s"
                where = status.detail or status.state
                fix = f"the engine says: {where}; wait longer with --wait-s, or correct the target"
                raise FlashError("target_unreachable", what, fix=fix)
            time.sleep(POLL_S)
        probed["list_lag_s"] = _list_lag_s(name, folder)
        return _checked(name, probed, time.time() - began)


def _list_lag_s(name: str, folder: RunFolder) -> float:
    """How long the storage's lists lack what the node wrote before its answer."""
    began = time.monotonic()
    while not folder.newest_epoch():
        if time.monotonic() - began > MAX_LIST_LAG_S:
            what = f"a list of {name}'s storage lacks what was there {MAX_LIST_LAG_S:.0f} s ago"
            fix = "use a store with consistent lists, or shorten the cache of that file system"
            raise FlashError("target_refused", what, fix=fix)
        time.sleep(POLL_S)
    return round(time.monotonic() - began, 1)


def _checked(name: str, probed: ProbeFile, waited_s: float) -> ProbeFile:
    if probed["version"] != __version__:
        what = f"the nodes of {name} have flash-mcp {probed['version']}; this is {__version__}"
        raise FlashError("target_refused", what, fix="install this version there")
    # Jobs may wait, so that its clock may be late by that.
    if not -MAX_CLOCK_S < probed["clock_s"] < waited_s + MAX_CLOCK_S:
        what = f"the clock of {probed['host']} is wrong, by {probed['clock_s']:.0f} s or less"
        fix = "set it by NTP: stores refuse requests of other times, and reports would be wrong"
        raise FlashError("target_refused", what, fix=fix)
    if probed["missing"]:
        what = f"the nodes of {name} lack {', '.join(probed['missing'])}"
        raise FlashError("target_refused", what, fix=f"{how_to_install(probed['missing'])} there")
    return probed
