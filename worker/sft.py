"""Supervised fine-tuning on an environment's gold answers or on a curated dataset, with TRL's SFTTrainer.

The rows are tokenized by the same Transcript that training rollouts use, so that what is learnt here is what is sampled
later, token for token; only the assistant's tokens carry a label.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from environments.base import ChatMessage
from environments.host import EnvironmentHost
from flash_mcp.errors import FlashError
from flash_mcp.runfolder import Json, RunWriter
from worker.settings import Settings
from worker.transcript import ChatTemplate, Transcript

Row = dict[str, list[int]]
IGNORED = -100


async def gold_rows(host: EnvironmentHost, template: ChatTemplate, split: str, max_length: int) -> list[Row]:
    """{"input_ids", "labels"} of every task of a split, cut at `max_length` tokens."""

    async def one(index: int) -> Row:
        opening = await host.open(split, index)
        await host.close(opening.episode)
        return _row(Transcript(template, opening.messages), await host.gold(split, index), max_length)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(host.splits.get(split, 0))]
    return [task.result() for task in tasks]


def dataset_rows(dataset: Json, template: ChatTemplate, max_length: int) -> dict[str, list[Row]]:
    """{"train": rows, "holdout": rows} of the curated dataset that job.json names, as `gold_rows` makes them.

    FlashError(dataset_invalid) where a file is not the one that the run was pinned to.
    """
    rows: dict[str, list[Row]] = {}
    for file, checksum in dataset["files"].items():
        path = Path(dataset["path"], file)
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != checksum:
            fix = "curate it again and start another run"
            raise FlashError("dataset_invalid", "the file is gone or was changed since", path=path, fix=fix)
        lines = [json.loads(line) for line in content.decode().split("\n") if line]
        rows[path.stem] = [
            _row(
                Transcript(template, line["messages"][: line["prompt_messages"]]),
                line["messages"][line["prompt_messages"] :],
                max_length,
            )
            for line in lines
        ]
    return rows


def make_sft_trainer(
    model: PeftModel,
    tokenizer: Any,
    spec: Settings,
    rows: Mapping[str, list[Row]],
    writer: RunWriter,
    *,
    output_dir: str,
    callbacks: list[TrainerCallback],
) -> SFTTrainer:
    """A trainer on rows["train"] that measures the loss on rows["holdout"], if there are any, with every checkpoint.

    FlashError(dataset_invalid) where no row has a token to learn.
    """
    learnable, holdout = _learnable(rows["train"]), _learnable(rows.get("holdout", []))
    if len(learnable) < len(rows["train"]):
        writer.event("warning", f"{len(rows['train']) - len(learnable)} rows have no token to learn within max_length")
    if not learnable:
        raise FlashError(
            "dataset_invalid",
            "no answer to learn fits within max_length",
            rows=len(rows["train"]),
            fix="raise max_length, or give the environment's tasks an output (sft_completion)",
        )
    args = SFTConfig(
        output_dir=output_dir,
        max_steps=spec.steps or -1,
        num_train_epochs=spec.epochs or 1.0,
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        eval_strategy="steps" if holdout else "no",
        eval_steps=spec.save_every,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=spec.max_grad_norm,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=spec.seed,
        bf16=model.dtype == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",  # worker.checkpoints asks for a save when one is due
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(learnable),
        eval_dataset=Dataset.from_list(holdout) if holdout else None,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _learnable(rows: list[Row]) -> list[Row]:
    return [row for row in rows if any(label != IGNORED for label in row["labels"])]


def _row(transcript: Transcript, gold: list[ChatMessage], max_length: int) -> Row:
    between: list[Json] = []
    for message in gold:
        if message["role"] != "assistant":
            between.append(message)
            continue
        if between:
            transcript.add_environment(between)
            between = []
        transcript.add_answer(transcript.template.answer(str(message["content"])))
    ids = transcript.ids
    labels = [IGNORED] * len(transcript.prompt_ids) + [
        token if mine else IGNORED for token, mine in zip(transcript.completion_ids, transcript.mask, strict=True)
    ]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}
