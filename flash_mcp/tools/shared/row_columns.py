"""The columns of rows that are conversations to learn: one table. docs/rows.md shows it.

    row, ignored = conversation_of({"system": "Be brief."}, [user, answer], None, used=["question"])

A column of another name is ignored and counted, unless its name says that it changes what is
learnt: then the row is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from environments.messages import (
    CALL_FIX,
    THOUGHTS,
    TRUTHS,
    Unlearnable,
    agreed,
    ignored_fields,
    learnable,
    says,
    without_nulls,
)
from environments.tools import as_list, as_object, problem_of, tool_schemas
from flash_mcp.protocol.records import Json

CHATS = ("messages", "conversations")
PARTS = ("prompt", "completion")
SYSTEM = ("system", "system_prompt")
COLUMNS = {
    CHATS: "The messages of a conversation, whose answers are learnt from the first that follows a "
    "message of the user.",
    PARTS: "Messages, or a text each: the answers in `completion` are learnt.",
    SYSTEM: "The system message of the conversation.",
    ("history",): "Earlier questions and answers as `[[question, answer], ...]`, learnt too, as "
    "LLaMA-Factory does.",
    ("tools",): "The tools that the model is shown, in OpenAI's form, as a list or its JSON.",
    THOUGHTS: "The thought before the answer, of rows with a question and an answer.",
}
"""{names: what they do}, beside the columns of a question and its answer."""
RENAME = (
    f"rename it to one of {', '.join(name for names in COLUMNS for name in names)}, or remove it"
)
PREFERENCE = (
    "an answer is imitated: keep those that are good, as messages or completion, and remove this "
    "column; to learn from better and worse, reward them in an environment (env_setup)"
)
MASKED = "mark the answers in messages, with weight 0 or 1, and remove this column"
REFUSED = {
    "chosen rejected preferred kto": PREFERENCE,
    "image images video videos audio audios": "the model reads text alone: remove such rows, "
    "or the column if the text says enough",
    "mask masks loss train trainable training weight weights": MASKED,
    "ids labels": "give text: tokens belong to one model",
    "system history tool tools function functions documents template kwargs prefix suffix": RENAME,
    "reasoning thinking thought thoughts think cot": RENAME,
}
"""{words: what to do} about a column whose name has one of the words."""


def fields_of(row: Mapping[str, Any]) -> Json:
    """What the row says, by the names of its columns without case and spaces."""
    return {name.strip().casefold(): value for name, value in row.items() if says(value)}


def conversation_of(
    fields: Json, turns: Sequence[Any], prompt: int | None, used: Collection[str]
) -> tuple[Json, list[str]]:
    """The row as a line of a dataset, which sft accepts, and what of it is ignored. `turns` are
    messages in the form of the row, from its columns `used`.

    The first `prompt` messages are not learnt; None: those before the first answer to learn. Raises
    Unlearnable.
    """
    ignored = check_columns(fields, {*used, *SYSTEM, "history", "tools"})
    before = _before(fields)
    if prompt is not None:
        prompt += len(before)
    messages: list[Json] = []
    for number, turn in enumerate(turns):
        try:
            messages.append(learnable(turn))
        except ValueError as error:
            fix = getattr(error, "fix", "give tool_calls in OpenAI's form")
            raise Unlearnable(f"message {number + 1}: {error}", fix) from error
        ignored += [f"{name} of a message" for name in ignored_fields(turn)]
    if before and messages[:1] == before[:1]:
        before = before[1:]
    messages = [*before, *messages]
    if any(turn["role"] == "system" for turn in messages[1:]) and before:
        fix = "keep the column, or the system message"
        raise Unlearnable("it has a column of the system message and another in its messages", fix)
    tools: Any = parsed(fields.get("tools", []))
    if not isinstance(tools, list):
        raise Unlearnable(f"tools is {tools!r:.50}, no list", "give tools as a list of schemas")
    tools = tool_schemas(without_nulls(tools))
    prompt = _unlearnt(messages, prompt)
    _check_results(messages)
    for number, message in enumerate(messages):
        is_learnt = number >= prompt and message.get("weight") != 0
        if is_learnt and (name := _called_in_text(message, tools)):
            what = f"message {number + 1} calls {name} in its text, which no client reads as a call"
            raise Unlearnable(what, CALL_FIX)
        for call in message.get("tool_calls", ()):
            if not tools:
                fix = "give the schemas of its tools in the column tools"
                raise Unlearnable("an answer has tool_calls, but the row has no tools", fix)
            known = tools if is_learnt else [{"function": {"name": call["function"]["name"]}}]
            if problem := problem_of(call, known):
                what = f"a call in message {number + 1} cannot be learnt: {problem}"
                raise Unlearnable(what, "correct the call, or give its answer weight 0")
    kept: Json = {"messages": messages, "prompt_messages": prompt}
    if tools:
        kept["tools"] = tools
    return kept, ignored


def _called_in_text(message: Json, tools: Sequence[Json]) -> str | None:
    """The tool that an answer's text calls, which is JSON of a call or of several, as in xLAM's
    rows; else None."""
    value: Any = None
    if message["role"] == "assistant" and tools:
        with suppress(ValueError, RecursionError):
            value = json.loads(message["content"])
    called = {str(as_object(call).get("name")) for call in as_list(value) or [value]}
    return next((name for tool in tools if (name := tool["function"]["name"]) in called), None)


def _check_results(messages: Sequence[Json]) -> None:
    """Raises Unlearnable of results of tools that answer other calls than those before them, or in
    another order: most templates show no ids, so that each is read as the next call's."""
    waiting: list[str] = []
    for number, message in enumerate(messages, start=1):
        identity = message.get("tool_call_id")
        if message["role"] == "tool" and identity is not None:
            if identity not in waiting[:1]:
                what = f"message {number} answers the call {identity!r:.50}"
                next_one = f", and the next is {waiting[0]!r:.50}" if waiting else ""
                fix = "give each call's result after it, in the order of the calls"
                raise Unlearnable(f"{what}{next_one or ', which no answer made'}", fix)
            waiting = waiting[1:]
        elif message["role"] == "assistant":
            waiting = [call["id"] for call in message.get("tool_calls", ())]


def check_columns(fields: Json, used: Collection[str]) -> list[str]:
    """The columns that are ignored. Raises Unlearnable of one that is not `used`, whose name says
    that it changes what is learnt."""
    ignored: list[str] = []
    for name, value in fields.items():
        if name in used:
            continue
        truth = TRUTHS.get(str(value).strip().casefold())
        words = re.findall(r"[^\W\d_]+", name)
        fix = None
        for steering in REFUSED:
            if not set(words).isdisjoint(steering.split()):
                fix = REFUSED[steering]
                break
        if name == "label" and truth is not None:
            fix = PREFERENCE
        elif name == "split" and str(value).casefold() not in ("train", "training"):
            fix = "keep the rows of the split to train on, and remove this column"
        elif isinstance(value, (bool, int, float)) and fix not in (MASKED, PREFERENCE):
            fix = None  # as of num_tools
        elif fix is MASKED and truth is True:
            fix = None
        if fix is not None:
            raise Unlearnable(f"the column {name} is {value!r:.50}", fix)
        ignored.append(name)
    return ignored


def chat_of(fields: Json) -> tuple[list[Any], int | None, Collection[str]]:
    """Messages, how many of them are the prompt, and the columns, of a row that has messages.
    Raises Unlearnable."""
    if not fields.keys().isdisjoint(CHATS):
        return as_list(parsed(agreed(fields, CHATS))), None, CHATS
    if fields.keys().isdisjoint(PARTS):
        what = f"other rows have messages, and this one {', '.join(fields) or 'nothing'}"
        raise Unlearnable(what, "give all rows in one form")
    sides: list[list[Any]] = []
    for name, role in zip(PARTS, ("user", "assistant"), strict=True):
        side = fields.get(name, [])
        if not isinstance(side, list):
            side = [{"role": role, "content": side}]
        sides.append(as_list(side))
    return [*sides[0], *sides[1]], len(sides[0]), PARTS


def pair_of(fields: Json, question: str, answer: str) -> list[Json]:
    thoughts = {name: fields[name] for name in THOUGHTS if name in fields}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer} | thoughts,
    ]


def _before(fields: Json) -> list[Json]:
    """The messages that a row's other columns put before its own. Raises Unlearnable."""
    messages: list[Json] = []
    system = agreed(fields, SYSTEM)
    if system is not None:
        if not isinstance(system, str):
            raise Unlearnable(f"the system message is {system!r:.50}, no text", "give it as a text")
        messages.append({"role": "system", "content": system})
    history: Any = parsed(fields.get("history", []))
    for pair in as_list(history) or [history] * (history != []):
        texts = as_list(pair)
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            what = f"history holds {pair!r:.50}, no question with its answer"
            raise Unlearnable(
                what, "give [[question, answer], ...], or the conversation as messages"
            )
        messages.append({"role": "user", "content": texts[0]})
        messages.append({"role": "assistant", "content": texts[1]})
    return messages


def _unlearnt(turns: Sequence[Json], prompt: int | None) -> int:
    """How many messages come before the first to learn: `prompt`, if a number. Raises
    Unlearnable."""
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    learnt = [number for number in answers if turns[number].get("weight") != 0]
    first = prompt
    if prompt is None:
        first = next(filter(None, learnt), None)
    if not first or first not in answers or not any(number >= first for number in learnt):
        what = "no message of the assistant follows one of the user, or its weight is 0"
        raise Unlearnable(what, "end with an answer, and begin a completion with one")
    return first


def parsed(value: Any) -> Any:
    """The value; of text the JSON that it holds, as in a CSV."""
    if isinstance(value, str):
        return json.loads(value)
    return value
