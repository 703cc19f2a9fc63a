"""Supervised fine-tuning on an environment's gold answers or on a curated dataset, with TRL's
SFTTrainer.

The rows are tokenized by the same Transcript that rollouts use, so that what is learnt here is
what is sampled later, token for token; only the assistant's tokens carry a label. A batch is
computed by GRPO's forward pass (worker/training/packing.py).

Axes: B rows of a batch, T tokens of the longest row."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from peft import PeftModel
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from environments.base import ChatMessage
from environments.process.host import EnvironmentHost, Opening
from environments.tools import problem_of
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunWriter
from flash_mcp.protocol.schedules import measured_of, steps_of
from flash_mcp.protocol.spec import RunSpec
from worker.ranks import ALONE, Ranks
from worker.rollouts.calls import Call
from worker.rollouts.scheduler import AgentCalls, PlayedRollout, RolloutTask, TalkLimits
from worker.rollouts.transcript import ChatTemplate, Transcript
from worker.rollouts.turns import Completion, Sampling
from worker.survey import survey
from worker.training.checkpoints import trainer_arguments
from worker.training.limits import PackLimits, Passes, combine, no_loss
from worker.training.packing import Pack, Way, packs_of, paths_of

Row = dict[str, list[int]]
COLUMNS = ("input_ids", "labels")
IGNORED = -100
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
    where the model is shown the history otherwise (`_rows`), and of an agent a row for each of its
    conversations. `watched` and errors as of `survey`.
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
        return _rows(name, template.for_tools(opening.tools), opening.messages, gold)

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
        _check(self._name, gold, [], template)
        _check_texts(self._name, [*call.transcript.messages, gold], template)
        return template.gold(gold)


def dataset_rows(dataset: Json, template: ChatTemplate) -> dict[str, list[list[Row]]]:
    """{"train": rows, "holdout": rows} of the curated dataset that job.json names, by conversation
    like those of `gold_rows`.

    FlashError(dataset_invalid) if a file changed since the run was created.
    """
    rows: dict[str, list[list[Row]]] = {}
    for file, checksum in dataset["files"].items():
        path = Path(dataset["path"], file)
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != checksum:
            what = "the file is gone or was changed since"
            fix = "curate it again and start another run"
            raise FlashError("dataset_invalid", what, path=path, fix=fix)
        lines = [json.loads(line) for line in content.decode().split("\n") if line]
        rows[path.stem] = []
        for number, line in enumerate(lines, start=1):
            count = line["prompt_messages"]
            prompt = line["messages"][:count]
            chat = template.for_tools(line.get("tools", ()))
            gold = line["messages"][count:]
            rows[path.stem].append(_rows(f"{file} line {number}", chat, prompt, gold))
    return rows


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
        begun = 0 if self.passes.is_shared else 1  # ranks that share the model need each pass
        loss = self.limits.run(self, lambda: trl.training_step(*arguments), lambda: begun)
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
    learnable = _learnable(rows["train"], max_length)
    held_out = _learnable(rows.get("holdout", []), max_length)
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


def _learnable(conversations: list[list[Row]], max_length: int) -> list[list[Row]]:
    """The rows, cut, without those that have no token left to learn."""
    kept: list[list[Row]] = []
    for rows in conversations:
        cut = [{name: values[:max_length] for name, values in row.items()} for row in rows]
        kept.append([row for row in cut if any(label != IGNORED for label in row["labels"])])
    return list(filter(None, kept))


def _dataset(conversations: list[list[Row]]) -> Any:
    """One item for each conversation: {"input_ids", "labels"} with a list for each of its rows."""
    items = [{name: [row[name] for row in rows] for name in COLUMNS} for rows in conversations]
    return cast(Any, Dataset).from_list(items)


def _unpacked(item: dict[str, list[list[int]]]) -> list[Row]:
    """The rows of an item of `_dataset`."""
    pairs = zip(*(item[name] for name in COLUMNS), strict=True)
    return [dict(zip(COLUMNS, pair, strict=True)) for pair in pairs]


def _rows(
    name: str, template: ChatTemplate, prompt: list[ChatMessage], gold: list[ChatMessage]
) -> list[Row]:
    """Tokens of a prompt and its gold answers; FlashError(dataset_invalid) with `name` if they
    cannot be learnt.

    It is one row, unless the template shows an answer otherwise once it is history: Qwen3 drops its
    thought when the user speaks again. Then what follows is learnt in a row of its own, which shows
    the history as a deployment does.
    """
    _check_texts(name, [*prompt, *gold], template)
    transcript = Transcript(template, prompt)
    finished: list[Transcript] = []
    between: list[Json] = []
    answered = False
    for message in gold:
        if message["role"] != "assistant":
            between.append(message)
            continue
        _check(name, message, [] if answered else between, template)
        try:
            if answered:
                before = transcript.copy()
                # Even if nothing was said in between: each answer of a rollout has its own turn.
                transcript.add_environment(between)
                if transcript.forks or transcript.unlike_template(prompts=True):
                    finished.append(before)
                    transcript = Transcript(template, transcript.messages)
            transcript.add_gold(message)
            between = []
            answered = True
            if error := transcript.unlike_template(prompts=False):
                raise error
        except FlashError as error:
            raise FlashError(error.code, f"{name}: {error.what}", fix=error.fix) from error
    learnt = [each for each in [*finished, transcript] if any(each.mask)]
    return list(map(_row, learnt or [transcript]))


def _check_texts(name: str, messages: list[ChatMessage], template: ChatTemplate) -> None:
    for number, message in enumerate(messages, start=1):
        if token := template.control_token(message):
            what = f"{name}: message {number} holds {token!r}, a control token of this model"
            fix = "remove it from the text, or write it otherwise, such as with a space"
            raise FlashError("dataset_invalid", what, fix=fix)


def _row(transcript: Transcript) -> Row:
    labels = [IGNORED] * len(transcript.prompt_ids)
    for token, mine in zip(transcript.completion_ids, transcript.mask, strict=True):
        labels.append(token if mine else IGNORED)
    return {"input_ids": transcript.ids, "labels": labels}


def _check(name: str, answer: ChatMessage, before: list[Json], template: ChatTemplate) -> None:
    """FlashError(dataset_invalid) if no rollout could hold this gold answer; `before` are the
    gold's messages before its first answer."""
    content = answer.get("content")
    if before:
        wrong = f"the gold begins with a {before[0]['role']} message"
    elif answer.get("tool_calls") and not template.tools:
        wrong = "an answer has tool_calls, but the task has no tools"
    elif not isinstance(content, str):
        wrong = f"an answer's content is {content!r:.50}, no string"
    elif problem := _problem_of_calls(answer, template):
        wrong = f"an answer's call cannot be learnt: {problem}"
    else:
        return
    fix = "begin with an answer, and let every answer be text or calls of declared tools"
    raise FlashError("dataset_invalid", f"{name}: {wrong}", fix=fix)


def _problem_of_calls(answer: ChatMessage, template: ChatTemplate) -> str | None:
    """Why no tool takes a call of this answer, or None. What a model sampled is learnt as it is."""
    if "bad_tool_call" in answer or answer.get("weight") == 0:
        return None
    problems = (problem_of(call, template.tools) for call in answer.get("tool_calls") or ())
    return next(filter(None, problems), None)
