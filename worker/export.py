"""A trained model in a form that other programs read.

    python -m worker.export JOB.json

writes the files that the job asks for and prints a JSON object for each line: progress as
{stage, share}, then the result as {files}, or an error as {code, what, ...}."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors import torch as safetensors
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from flash_mcp.protocol.chat_templates import with_tools
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.exports import Agreement, Exported, ExportJob
from worker import gguf_file
from worker.adapter import merged_weights, names_as_they_are
from worker.engine.fetch import ensure
from worker.model_files import auto_class, checkpoint_prefix, config_of, decoder_prefix

ANSWER_TOKENS = 48
"""Tokens of each greedy answer that is compared."""


def export(job: ExportJob) -> Exported:
    """Write the model of `job` to its folder, which exists.

    FlashError(unknown_model | hub_unreachable | export_unsupported | checkpoint_corrupt)."""
    say("reading the base model", 0.0)
    base = ensure(job.model)
    result = Exported(base_digest=digest_of(base))
    if job.kind == "adapter":
        _write_adapter(job)
        return result
    disable_progress_bar()
    config = config_of(base)
    if job.kind != "merged":
        gguf_file.check(config, base)
    library = auto_class(config)
    # "auto" would give a wrapper's whole config to its text decoder.
    dtype = config.dtype or config.get_text_config().dtype or torch.bfloat16
    model = library.from_pretrained(base, dtype=dtype)
    merged: dict[str, Tensor] = {}
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(base)
    if job.adapter is not None:
        say("merging the adapter", 0.2)
        merged = _merge(model, job.adapter, checkpoint_prefix(base))
    if job.kind == "merged":
        say("writing safetensors", 0.4)
        _write_merged(base, job.folder, merged)
        tokenizer.chat_template = with_tools(tokenizer.chat_template)
        tokenizer.save_pretrained(job.folder)
        written = library.from_pretrained(job.folder, dtype=dtype)
    else:
        say("writing GGUF", 0.4)
        path = gguf_file.write(model, base, job.folder, job.name, job.kind.removeprefix("gguf-"))
        written = gguf_file.read_back(path, library, model.dtype)
    say("comparing greedy answers with those of the file", 0.7)
    result.agreement = _agreement(model, written, tokenizer, job.prompts)
    return result


def _merge(model: Any, adapter: Path, prefix: str) -> dict[str, Tensor]:
    """Add the adapter to the weights of `model`, as the engine does it for rollouts. Returns the
    weights that changed, named as in the base model's files, whose decoder has this prefix.
    """
    with names_as_they_are():
        adapted = cast(Any, PeftModel).from_pretrained(model, str(adapter))
    merged = {name: weight.clone() for name, weight in merged_weights(adapted)}
    adapted.unload()
    model.load_state_dict(merged, strict=False)
    own = decoder_prefix(name for name, _ in model.named_modules())
    return {prefix + name.removeprefix(own): weight for name, weight in merged.items()}


def _write_merged(base: Path, folder: Path, merged: dict[str, Tensor]) -> None:
    """The base model's files with the merged weights in place of its own. So a wrapper keeps its
    towers, and experts the form in which the hub has them.

    FlashError(export_unsupported) if the files have no weights of these names."""
    missing = set(merged)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, folder / path.name)
            continue
        weights: dict[str, Tensor] = cast(Any, safetensors).load_file(path)
        for name in missing & set(weights):
            weights[name] = merged[name].to(weights[name].dtype).contiguous()
            missing.remove(name)
        cast(Any, safetensors).save_file(weights, folder / path.name, {"format": "pt"})
    if missing:
        what = f"the base model's files have no weights {sorted(missing)[0]!r}"
        fix = "export the adapter (kind adapter) and merge it where it is used"
        raise FlashError("export_unsupported", what, missing=len(missing), fix=fix)


def _write_adapter(job: ExportJob) -> None:
    assert job.adapter is not None
    config = json.loads((job.adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = job.hub_id or job.model
    (job.folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(
        job.adapter / "adapter_model.safetensors", job.folder / "adapter_model.safetensors"
    )


def _agreement(
    model: Any, written: Any, tokenizer: Any, prompts: Sequence[Sequence[dict[str, str]]]
) -> Agreement:
    """How many tokens of greedy answers are the same until the first one that differs."""
    tokens = equal = 0
    for messages in prompts:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answers = [_greedy(item, ids) for item in (model, written)]
        tokens += len(answers[0])
        equal += _common(*answers)
    return Agreement(tokens=tokens, equal=equal)


def _greedy(model: Any, prompt: Any) -> list[int]:
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return ids[0, prompt["input_ids"].shape[1] :].tolist()


def _common(left: list[int], right: list[int]) -> int:
    """The length of the shared beginning."""
    for place, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return place
    return min(len(left), len(right))


def digest_of(model: Path) -> str:
    """SHA-256 of the weights' files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def say(stage: str, share: float) -> None:
    """One line of progress; `share` is the part that is done, 0 to 1."""
    _print({"stage": stage, "share": share})


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    job = ExportJob.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        _print(export(job).model_dump())
    except FlashError as error:
        _print(error.to_dict())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
