"""A trained model in a form that other programs read.

    python -m worker.extensions.export.program JOB.json

writes the files that the job asks for and prints a JSON object for each line: progress as
{stage, share}, then the result as {files}, or an error as {code, what, ...}."""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors import torch as safetensors
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from flash_mcp.protocol import extensions
from flash_mcp.protocol.base_models import with_tools
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.result_model import Agreement, Exported, ExportJob
from worker.adapter import merged_weights, named_in_files
from worker.engine.fetch import ensure
from worker.extensions.export.formats import ANSWER_TOKENS, OTHER_FORMATS, without_end
from worker.model_files import ModelFiles
from worker.training.policy import names_as_they_are

LEAST_EQUAL = 0.8
"""Share of them that are the same. Rounding to 16 or 8 bits turns near ties."""


def export(job: ExportJob) -> Exported:
    """Write the model of `job` to its folder, which exists.

    FlashError(unknown_model | hub_unreachable | export_unsupported | checkpoint_corrupt)."""
    say("reading the base model", 0.0)
    path = ensure(job.model)
    result = Exported(base_digest=digest_of(path))
    write = extensions.find("flash_mcp.exports", job.kind)
    if getattr(write, "of_adapter", False):
        if job.adapter is None:
            what = "there is no adapter to write"
            fix = "export a run's checkpoint, or the model as merged"
            raise FlashError("export_unsupported", what, kind=job.kind, fix=fix)
        write(job.adapter, job, [])
        return result
    disable_progress_bar()
    base = ModelFiles(path)
    if check := getattr(write, "check", None):
        check(base)
    # "auto" would give a wrapper's whole config to its text decoder.
    dtype = base.config.dtype or base.text.dtype or torch.bfloat16
    model = base.auto_class.from_pretrained(path, dtype=dtype)
    changed: dict[str, Tensor] = {}
    if job.adapter is not None:
        say("merging the adapter", 0.2)
        # As the engine does it for rollouts
        with names_as_they_are():
            adapted = cast(Any, PeftModel).from_pretrained(model, str(job.adapter))
        merged = {name: weight.clone() for name, weight in merged_weights(adapted)}
        adapted.unload()
        model.load_state_dict(merged, strict=False)
        changed = named_in_files(model, merged, base.prefix)
    tokenizer = base.tokenizer
    tokenizer.chat_template = with_tools(tokenizer.chat_template)
    options = {"add_generation_prompt": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(messages, **options) for messages in job.prompts]
    say("writing the files", 0.4)
    with tempfile.TemporaryDirectory(dir=job.folder.parent) as whole:
        _write_merged(path, Path(whole), changed, tokenizer)
        answers: list[list[int]] | None = write(Path(whole), job, prompts)
    if answers is None:
        return result
    say("comparing greedy answers with those of the files", 0.7)
    # What `model` would have written after the prompt and after each token of the answer. So a near
    # tie that rounding turns is one token, not all that follow it.
    ours: list[list[int]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer])
            logits_LV = model(input_ids=ids, use_cache=False).logits[0]
        tokens = logits_LV[len(prompt) - 1 :].argmax(-1).tolist()[:ANSWER_TOKENS]
        ours.append(without_end(model, tokens))
    agreement = Agreement(tokens=0, equal=0)
    for own, other in zip(ours, answers, strict=True):
        agreement.tokens += max(len(own), len(other))
        agreement.equal += sum(map(operator.eq, own, other))
    if agreement.equal < LEAST_EQUAL * agreement.tokens:
        what = "the file holds another model: its greedy answers differ from those in memory"
        values = agreement.model_dump()
        raise FlashError("export_unsupported", what, **values, fix=OTHER_FORMATS)
    result.agreement = agreement
    return result


def _write_merged(base: Path, folder: Path, merged: dict[str, Tensor], tokenizer: Any) -> None:
    """The base model's files with the merged weights in place of its own, and this tokenizer. So a
    wrapper keeps its towers, and experts the form in which the hub has them.

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
    tokenizer.save_pretrained(folder)


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
