"""The forms in which a model is written: functions that entry points of flash_mcp.exports name.

    write(folder, job, prompts) -> answers

writes what is in `folder`, a whole model as the hub has them, to `job.folder`, and returns the
greedy answers of what it wrote to the prompts, as token ids, or None if it is not read back. If it
has `check`, that is called first with the base model's files, and may refuse. If
`of_adapter` is true, `folder` holds the adapter alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flash_mcp.protocol.result_model import ExportJob
from worker.adapter import CONFIG, WEIGHTS
from worker.extensions.export import gguf_file
from worker.extensions.export.gguf_file import OTHER_FORMATS as OTHER_FORMATS
from worker.model_files import ModelFiles

ANSWER_TOKENS = 48
"""Tokens of each greedy answer that is compared."""
Prompts = Sequence[list[int]]


def adapter(folder: Path, job: ExportJob, prompts: Prompts) -> None:
    """PEFT's form, for the base model."""
    shutil.copyfile(folder / WEIGHTS, job.folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    config["base_model_name_or_path"] = job.hub_id or job.model
    (job.folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


adapter.of_adapter = True  # pyright: ignore[reportFunctionMemberAccess]


def merged(folder: Path, job: ExportJob, prompts: Prompts) -> list[list[int]]:
    """safetensors with tokenizer and chat template."""
    for path in folder.iterdir():
        shutil.move(path, job.folder)
    files = ModelFiles(job.folder)
    dtype = files.config.dtype or files.text.dtype or torch.bfloat16
    model = files.auto_class.from_pretrained(job.folder, dtype=dtype)
    answers: list[list[int]] = []
    for prompt in prompts:
        answers.append(_greedy(model, prompt))
    return answers


class Gguf:
    """One file for llama.cpp."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def check(self, base: ModelFiles) -> None:
        gguf_file.check(base)

    def __call__(self, folder: Path, job: ExportJob, prompts: Prompts) -> list[list[int]]:
        path = job.folder / f"{job.name}-{self.type_name}.gguf"
        gguf_file.write(folder, path, self.type_name)
        return gguf_file.answers(path, prompts, ANSWER_TOKENS)


F16, Q8_0 = Gguf("f16"), Gguf("q8_0")


def _greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """The answer without the token that ends it."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        written = model.generate(input_ids=ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return without_end(model, written[0, len(prompt) :].tolist())


def without_end(model: Any, answer: list[int]) -> list[int]:
    ends: int | list[int] = model.generation_config.eos_token_id
    if answer and answer[-1] in (ends if isinstance(ends, list) else [ends]):
        return answer[:-1]
    return answer
