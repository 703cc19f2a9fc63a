"""Supervised fine-tuning on an environment's gold answers or on a curated dataset, with TRL's
SFTTrainer.

A batch of rows (worker/rollouts/gold.py) is computed by GRPO's forward pass
(worker/training/packing.py).

Axes: B rows of a batch, T tokens of the longest row."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from environments.process.host import EnvironmentHost, Opening
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.schedules import measured_of, steps_of
from flash_mcp.protocol.spec import RunSpec
from worker.ranks import ALONE, Ranks
from worker.rollouts.calls import Call
from worker.rollouts.gold import (
    COLUMNS,
    IGNORED,
    Row,
    check_gold,
    check_texts,
    learnable_of,
    rows_of,
)
from worker.rollouts.scheduler import AgentCalls, PlayedRollout, RolloutTask, TalkLimits
from worker.rollouts.transcript import ChatTemplate
from worker.rollouts.turns import Completion, Sampling
from worker.survey import survey
from worker.training.checkpoints import trainer_arguments
from worker.training.limits import PackLimits, Passes, combine, no_loss
from worker.training.packing import Pack, Way, packs_of, paths_of

GOLD_SPLITS = {"train": "train", "holdout": "eval"}
"""The names of rows, learnt and held out -> the splits that they are made from."""
PROBED = 4
"""Rows of which it is measured whether their answers depend on their prompts."""


async def gold_rows(
    host: EnvironmentHost,
    template: ChatTemplate,
    split: str,
    max_length: int,
    most: int | None = None,
    **watched: Any,
) -> list[list[Row]]:
    """{"input_ids", "labels"} of every task of a split, or of its first `most`: a row, or several
    where the model is shown the history otherwise (`rows_of`), and of an agent a row for each of
    its conversations. `watched` and errors as of `survey`.
    """

    async def one(index: int) -> list[Row]:
        opening = await host.open(split, index)
        try:
            if opening.is_agent:
                return await _GoldCalls(host, template, max_length).rows(split, opening)
        finally:
            await host.close(opening.episode)
        name = f"{split} task {opening.task_id}"
        gold = await host.gold(split, index)
        return rows_of(name, template.for_tools(opening.tools), opening.messages, gold)

    return await survey(split, min(host.splits.get(split, 0), most or sys.maxsize), one, **watched)


class _GoldCalls(AgentCalls):
    """Answers the calls of an agent with its gold answers, so that each is learnt in the context
    that the model will see.
    """

    def __init__(self, host: EnvironmentHost, template: ChatTemplate, max_length: int) -> None:
        limits = TalkLimits(max_tokens=max_length, max_length=max_length)
        super().__init__(PlayedRollout(RolloutTask("", 0, 0, 0, 0), ""), template, host, limits)
        self._gold_turn = host.gold_turn
        self._name = ""

    async def rows(self, split: str, opening: Opening) -> list[Row]:
        """A row for each path through the calls. A token that several have in common is learnt in
        the first of these.
        """
        self._name = f"{split} task {opening.task_id}"
        await self.serve(opening)
        transcript = self._rollout.transcript
        assert transcript is not None
        ids = transcript.ids
        trained = [False] * len(transcript.prompt_ids) + [mark == 1 for mark in transcript.mask]
        rows: list[Row] = []
        for path in paths_of(len(ids), transcript.forks):
            labels = [ids[place] if trained[place] else IGNORED for place in path]
            for place in path:
                trained[place] = False
            rows.append({"input_ids": [ids[place] for place in path], "labels": labels})
        return rows

    async def complete(self, episode: int, call: Call, sampling: Sampling) -> Completion | None:
        gold = await self._gold_turn(episode, call.number)
        if gold is None:
            what = "there is no gold answer to this request"
            await self._host.refuse_call(episode, call.number, "no_gold", what)
            return None
        template = call.transcript.template
        check_gold(self._name, gold, [], template)
        check_texts(self._name, [*call.transcript.messages, gold], template)
        return template.gold(gold)


class Tuner(SFTTrainer):
    """SFTTrainer with our forward pass; `measure` gives the loss on rows not learnt, and what tells
    a destroyed model.
    """

    way: Way
    limits: PackLimits
    ranks: Ranks
    passes: Passes
    probes: tuple[Any, Any] | None
    """Rows as they are, and with each other's prompts; None if no two differ."""
    prompt_effect = 0.0
    """Before this attempt."""

    def training_step(self, *arguments: Any) -> Any:
        """TRL's, with the gradients and metrics of all ranks: a step is one batch."""
        trl = cast(Any, super())
        can_repeat = not self.passes.is_shared  # ranks that share the model need each pass
        step = partial(trl.training_step, *arguments)
        loss = self.limits.run(self, step, can_repeat=can_repeat)
        if self.ranks.count == 1:
            return loss
        self.passes.finish()
        return combine(self, self.ranks, loss.item())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean negative log-probability of the labelled tokens; with `num_items_in_batch`,
        their sum divided by it. Of several ranks, each sums over its share of the rows.
        """
        causal_lm = cast(Any, self.accelerator).unwrap_model(model).get_base_model()
        ids_BT = inputs["input_ids"]
        assert not return_outputs
        trained_BT = (inputs["labels"] != IGNORED).long()
        trained_BT[:, 0] = 0  # nothing predicts a row's first token
        # Only the first rank measures held-out rows.
        sharing = self.ranks if model.training else ALONE
        own = torch.tensor(sharing.mine(range(len(ids_BT))), dtype=torch.long)
        mask_BT = inputs["attention_mask"]
        packs: list[Pack] = []
        if len(own):
            rows = ids_BT[own], mask_BT[own], trained_BT[own]
            limits = self.limits
            packs = packs_of(*rows, limits.keep_tokens, way=self.way, longest=limits.longest)
        count = trained_BT.sum().clamp(min=1)
        scale = count if num_items_in_batch is None else num_items_in_batch
        entropies = [torch.zeros((), device=ids_BT.device)]

        def loss(pack: Pack, values_N: Tensor, entropies_N: Tensor) -> Tensor:
            entropies.append(entropies_N.sum())
            return -values_N.sum() / scale

        total = self.limits.sum_of(self, causal_lm, packs, loss, temperature=1.0)
        entropy = torch.stack(entropies).sum() / count
        metrics = cast(Any, self)._metrics["train" if model.training else "eval"]
        metrics["entropy"].append(entropy.item() * sharing.count)  # the ranks' mean is logged
        return no_loss(model) if total is None else total

    def begin(self) -> None:
        if self.probes:
            self.prompt_effect = self.effect_of_prompts()

    def measure(self) -> Json:
        """{"eval_loss"} if rows are held out, {"prompt_effect", "prompt_effect/before"} if there
        are probes, and "time/held_out_s".
        """
        started = time.monotonic()
        measured: Json = {}
        if cast(Any, self).eval_dataset is not None:
            measured["eval_loss"] = self.evaluate()["eval_loss"]
        if self.probes:
            before = self.prompt_effect
            measured |= {"prompt_effect": self.effect_of_prompts(), "prompt_effect/before": before}
        return {**measured, "time/held_out_s": time.monotonic() - started}

    def effect_of_prompts(self) -> float:
        """Nats by which a token of an answer is less likely after another row's prompt."""
        assert self.probes
        own, other = (self.evaluate(rows)["eval_loss"] for rows in self.probes)
        return other - own

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """TRL's, which would otherwise leave the step's own metrics unlogged."""
        result = cast(Any, super()).evaluate(*arguments, **options)
        cast(Any, self).model.train()
        return result


def make_sft_trainer(
    model: PeftModel,
    tokenizer: Any,
    spec: RunSpec,
    rows: Mapping[str, list[list[Row]]],
    writer: RunWriter,
    *,
    max_length: int,
    output_dir: str,
    callbacks: list[TrainerCallback],
    way: Way,
    keep_tokens: float = math.inf,
    ranks: Ranks = ALONE,
) -> Tuner:
    """A trainer on rows["train"], with a sample of rows["holdout"] held out. Both are by
    conversation, of which a batch takes `batch_size`, each with all its rows. `way` is the result
    of worker.training.packing.way_of.

    Activations of more than `keep_tokens` tokens are recomputed. Rows are cut at `max_length`
    tokens; an event says how many. FlashError(dataset_invalid) if no row has anything to learn."""
    every = list(chain.from_iterable(rows["train"]))
    total = len(every)
    longer = sum(len(row["input_ids"]) > max_length for row in every)
    learnable = learnable_of(rows["train"], max_length)
    held_out = learnable_of(rows.get("holdout", []), max_length)
    if longer:
        left_out = total - sum(map(len, learnable))
        writer.event(
            "warning",
            f"{longer} of {total} rows are longer than max_length={max_length} and were cut, "
            f"{left_out} of them before their first answer: left out",
        )
    if not learnable:
        what = "no answer to learn fits within max_length"
        fix = "raise max_length, or give the environment's tasks an output (sft_completion)"
        raise FlashError("dataset_invalid", what, rows=total, fix=fix)
    # The same ones each time, of any place in the split, also in an attempt that resumes.
    held_out = held_out[: spec.eval_examples]
    count = measured_of(spec, len(learnable), len(held_out))
    held_out = random.Random(spec.seed).sample(held_out, count)
    args = cast(Any, SFTConfig)(
        **trainer_arguments(spec, model, output_dir),
        max_steps=steps_of(spec, len(learnable)),
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        prediction_loss_only=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = Tuner(
        model=model,
        args=args,
        train_dataset=_dataset(learnable),
        eval_dataset=_dataset(held_out) if held_out else None,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    collate = cast(Any, trainer.data_collator)

    def flat(batch: list[dict[str, list[list[int]]]]) -> Any:
        return collate(list(chain.from_iterable(map(_unpacked, batch))))

    trainer.data_collator = flat
    trainer.way = way
    trainer.ranks = ranks
    trainer.passes = Passes(model, ranks)
    trainer.limits = PackLimits(keep_tokens, None, lambda what: writer.event("warning", what))
    trainer.probes = _probes(learnable, max_length, random.Random(spec.seed))
    return trainer


def loss_of_frequencies(conversations: list[list[Row]]) -> float:
    """The loss of a model that knows how often each token is learnt, and nothing else: no answer
    that is the same in every place has a lower one.
    """
    labels = chain.from_iterable(row["labels"] for row in chain.from_iterable(conversations))
    counts = Counter(label for label in labels if label != IGNORED)
    total = counts.total()
    return sum(count / total * math.log(total / count) for count in counts.values())


def _probes(
    conversations: list[list[Row]], max_length: int, rng: random.Random
) -> tuple[Any, Any] | None:
    """The first rows of a few conversations that differ in prompt and answer, and the same with the
    next one's prompt; None if there are no two."""
    parts: dict[tuple[int, ...], tuple[Row, Row]] = {}
    answers: set[tuple[int, ...]] = set()
    for row, *_ in rng.sample(conversations, min(len(conversations), 16 * PROBED)):
        place = next(number for number, label in enumerate(row["labels"]) if label != IGNORED)
        prompt = {name: values[:place] for name, values in row.items()}
        answer = {name: values[place:] for name, values in row.items()}
        learnt = tuple(answer["labels"])
        key = tuple(prompt["input_ids"])
        if place and key not in parts and learnt not in answers:
            parts[key] = prompt, answer
            answers.add(learnt)
    pairs = list(parts.values())[:PROBED]
    if len(pairs) < 2:
        return None
    probes: list[Any] = []
    for shift in (0, 1):
        rows: list[list[Row]] = []
        for number, (_, answer) in enumerate(pairs):
            prompt, _ = pairs[(number + shift) % len(pairs)]
            # Of a long answer its beginning says enough; of a long prompt its end is the question.
            room = max_length - min(len(answer["labels"]), max_length // 2)
            rows.append(
                [{name: (prompt[name][-room:] + answer[name])[:max_length] for name in COLUMNS}]
            )
        probes.append(_dataset(rows))
    return probes[0], probes[1]


def _dataset(conversations: list[list[Row]]) -> Any:
    """One item for each conversation: {"input_ids", "labels"} with a list for each of its rows."""
    items = [{name: [row[name] for row in rows] for name in COLUMNS} for rows in conversations]
    return cast(Any, Dataset).from_list(items)


def _unpacked(item: dict[str, list[list[int]]]) -> list[Row]:
    """The rows of an item of `_dataset`."""
    pairs = zip(*(item[name] for name in COLUMNS), strict=True)
    return [dict(zip(COLUMNS, pair, strict=True)) for pair in pairs]
