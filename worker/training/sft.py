"""Supervised fine-tuning on an environment's gold answers or on a curated dataset, with TRL's
SFTTrainer.

The rows are tokenized by the same Transcript that training rollouts use, so that what is learnt
here is what is sampled later, token for token; only the assistant's tokens carry a label. A batch
is computed as one sequence without padding, by the forward pass that GRPO uses (worker/packing.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from environments.base import ChatMessage
from environments.process.host import EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.settings import Settings
from worker.survey import survey
from worker.training.checkpoints import trainer_arguments
from worker.training.packing import check_trl_head, group_logps, recompute

Row = dict[str, list[int]]
IGNORED = -100
GOLD_SPLITS = {"train": "train", "holdout": "eval"}
"""What is learnt, and what is held out: the names of rows -> the splits of the environment that
they are made of.
"""


async def gold_rows(
    host: EnvironmentHost, template: ChatTemplate, split: str, **watched: Any
) -> list[Row]:
    """{"input_ids", "labels"} of every task of a split; `watched` as of `survey`, whose errors it
    raises.
    """

    async def one(index: int) -> Row:
        opening = await host.open(split, index)
        await host.close(opening.episode)
        transcript = Transcript(template, opening.messages)
        return _row(f"{split} task {opening.task_id}", transcript, await host.gold(split, index))

    return await survey(split, host.splits.get(split, 0), one, **watched)


def dataset_rows(dataset: Json, template: ChatTemplate) -> dict[str, list[Row]]:
    """{"train": rows, "holdout": rows} of the curated dataset that job.json names, as `gold_rows`
    makes them.

    FlashError(dataset_invalid) where a file is not the one that the run was pinned to.
    """
    rows: dict[str, list[Row]] = {}
    for file, checksum in dataset["files"].items():
        path = Path(dataset["path"], file)
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != checksum:
            fix = "curate it again and start another run"
            raise FlashError(
                "dataset_invalid", "the file is gone or was changed since", path=path, fix=fix
            )
        lines = [json.loads(line) for line in content.decode().split("\n") if line]
        rows[path.stem] = [
            _row(
                f"{file} line {number}",
                Transcript(template, line["messages"][: line["prompt_messages"]]),
                line["messages"][line["prompt_messages"] :],
            )
            for number, line in enumerate(lines, start=1)
        ]
    return rows


class Tuner(SFTTrainer):
    """SFTTrainer with a packed forward pass; `held_out` is the loss on rows that it does not learn."""

    packed: bool
    keep_tokens: float

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean negative log-probability of the labelled tokens; with `num_items_in_batch`, their
        sum over it.
        """
        causal_lm = self.accelerator.unwrap_model(model).get_base_model()
        if return_outputs or not self.packed:
            recompute(causal_lm, inputs["input_ids"].numel() > self.keep_tokens)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]  # (B, L)
        trained = (labels != IGNORED).long()
        trained[:, 0] = 0  # nothing predicts a row's first token
        with self.accelerator.autocast():
            logps, entropies = group_logps(
                causal_lm,
                inputs["input_ids"],
                inputs["attention_mask"],
                trained,
                1.0,
                keep_tokens=self.keep_tokens,
            )
        count = trained.sum().clamp(min=1)
        self._metrics["train" if model.training else "eval"]["entropy"].append(
            (entropies.sum() / count).item()
        )
        return -logps.sum() / (count if num_items_in_batch is None else num_items_in_batch)

    def held_out(self) -> Json:
        """{"eval_loss", "time/held_out_s"}, or nothing where there are no held-out rows."""
        if self.eval_dataset is None:
            return {}
        started = time.monotonic()
        loss = self.evaluate()["eval_loss"]
        return {"eval_loss": loss, "time/held_out_s": time.monotonic() - started}


def make_sft_trainer(
    model: PeftModel,
    tokenizer: Any,
    spec: Settings,
    rows: Mapping[str, list[Row]],
    writer: RunWriter,
    *,
    max_length: int,
    output_dir: str,
    callbacks: list[TrainerCallback],
    packed: bool,
    keep_tokens: float = math.inf,
) -> Tuner:
    """A trainer on rows["train"], rows["holdout"] held out; `packed` as
    worker.training.packing.can_pack says.

    Activations of a batch of more than `keep_tokens` tokens are recomputed in the backward pass.
    Rows are cut at `max_length` tokens, and how many were is said in an event.
    FlashError(dataset_invalid) where nothing can be learnt."""
    longer = sum(len(row["input_ids"]) > max_length for row in rows["train"])
    learnable, held_out = (
        _learnable(rows.get(split, []), max_length) for split in ("train", "holdout")
    )
    if longer:
        writer.event(
            "warning",
            f"{longer} of {len(rows['train'])} rows are longer than max_length={max_length} and were cut, "
            f"{len(rows['train']) - len(learnable)} of them before their first answer: left out",
        )
    if not learnable:
        raise FlashError(
            "dataset_invalid",
            "no answer to learn fits within max_length",
            rows=len(rows["train"]),
            fix="raise max_length, or give the environment's tasks an output (sft_completion)",
        )
    args = SFTConfig(
        **trainer_arguments(spec, model, output_dir),
        max_steps=spec.steps or -1,
        num_train_epochs=spec.epochs or 1.0,
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        prediction_loss_only=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = Tuner(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(learnable),
        eval_dataset=Dataset.from_list(held_out[: spec.eval_examples]) if held_out else None,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.packed, trainer.keep_tokens = packed, keep_tokens
    if not packed:
        check_trl_head(model.get_base_model(), 1.0)
    return trainer


def _learnable(rows: list[Row], max_length: int) -> list[Row]:
    """The rows, cut, that have a token to learn left."""
    cut = [{name: values[:max_length] for name, values in row.items()} for row in rows]
    return [row for row in cut if any(label != IGNORED for label in row["labels"])]


def _row(name: str, transcript: Transcript, gold: list[ChatMessage]) -> Row:
    """Tokens of a prompt and its gold answers; FlashError(dataset_invalid) with `name` where they
    cannot be learnt.
    """
    between: list[Json] = []
    answered = False
    for message in gold:
        if message["role"] != "assistant":
            between.append(message)
            continue
        if wrong := _wrong(message, [] if answered else between):
            fix = "begin with an answer, and let every answer be plain text"
            raise FlashError("dataset_invalid", f"{name}: {wrong}", fix=fix)
        if (
            answered
        ):  # also where nothing is said in between: a rollout's next answer has a turn of its own
            transcript.add_environment(between)
        transcript.add_answer(transcript.template.answer(message["content"]))
        between, answered = [], True
    ids = transcript.ids
    labels = [IGNORED] * len(transcript.prompt_ids) + [
        token if mine else IGNORED
        for token, mine in zip(transcript.completion_ids, transcript.mask, strict=True)
    ]
    return {"input_ids": ids, "labels": labels}


def _wrong(answer: ChatMessage, before: list[Json]) -> str | None:
    """Why no rollout could hold this gold answer; `before` is what the gold has before its first
    answer.
    """
    if before:
        return f"the gold begins with a {before[0]['role']} message"
    if answer.get("tool_calls"):
        return "an answer has tool_calls, which are not text"
    content = answer.get("content")
    return (
        None if isinstance(content, str) else f"an answer's content is {content!r:.50}, no string"
    )
