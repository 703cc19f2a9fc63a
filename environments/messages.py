"""The fields that a message may have which is to be learnt: one table, for rows of every form and
for an environment's gold answers.

    message = learnable({"role": "assistant", "content": "Blue", "trainable": 0})
    message["weight"]  # 0: context, not learnt

What the table does not list is refused: a field of another trainer can say what is learnt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from environments.base import ChatMessage
from environments.tools import as_list, as_object, tool_calls_of

MASKS = ("weight", "trainable", "train", "training", "loss", "loss_mask")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
FIELDS = {
    ("role", "from"): "Who speaks, by one of the names below.",
    ("content", "value"): 'The text, or a list of parts `{"type": "text", "text": ...}`.',
    MASKS: 'Whether an answer is learnt: true, 1 and "1", or false, 0 and "0"; learnt if there '
    "is none. An answer that is not learnt is context.",
    THOUGHTS: "The thought before an answer, which is learnt with it. `<think>...</think>` at the "
    "beginning of the text is the same.",
    ("tool_calls",): "The calls of an answer, in OpenAI's form.",
    (
        "tool_call_id",
        "name",
    ): "Which call a tool answers, and who speaks, for templates that show it.",
    ("id", "index", "timestamp", "created_at", "date", "model", "token_count"): "Ignored.",
}
"""{names: what they do}. Fields that are null, an empty text or an empty list say nothing."""
KNOWN = {name: names for names in FIELDS for name in names}
IGNORED = frozenset(names for names, meaning in FIELDS.items() if meaning == "Ignored.")
BLOCK = re.compile(
    r"\s*<think>(?P<opened>.*?)</think>\n*|(?P<begun>(?:(?!<think>).)*)\n</think>(?:\n+|$)",
    re.DOTALL,
)
"""A thought at the beginning of a text; where the prompt opens it, the text has its end only."""
RENDERED = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>)?\s*"
    r"(\[INST\]|<start_of_turn>|<\|turn>|<\|(?:im_start|start_header_id|start|channel|user|assistant)\|>)"
)
"""How a text begins that a chat template has rendered already."""
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "ipython"), "tool"),
}
"""Roles as rows name them, those of the ShareGPT form, {"from": role, "value": text}, included."""
CALL_FIX = "write the call as tool_calls of an answer, and its result as a message of the role tool"
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class Unlearnable(ValueError):
    """A row that cannot be learnt as it says, with what to change."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def learnable(value: Any) -> ChatMessage:
    """The message with the fields that templates read, of OpenAI's or ShareGPT's form;
    {"weight": 0} if it is an answer that is not learnt. Raises Unlearnable."""
    fields = {name: field for name, field in as_object(value).items() if says(field)}
    for name, field in fields.items():
        if name not in KNOWN:
            fix = f"remove it, or say it by one of {', '.join(KNOWN)}"
            if name == "function_call":
                fix = CALL_FIX
            raise Unlearnable(f"{name} is {field!r:.50}, a field that is not understood", fix)
    spoken = agreed(fields, ("role", "from"))
    role = ROLES.get(str(spoken).casefold())
    if role is None:
        what = f"a role is {spoken!r:.50}, none of {', '.join(ROLES)}"
        fix = "name the role by one of these"
        if spoken == "function_call":
            fix = CALL_FIX
        raise Unlearnable(what, fix)
    calls = tool_calls_of(without_nulls(fields.get("tool_calls") or ()))
    thought = agreed(fields, THOUGHTS)
    is_learnt = _is_learnt(fields)
    for name, field in {"tool_calls": calls, "a thought": thought, "a mask": is_learnt}.items():
        if field and role != "assistant":
            what = f"{name} is in a message of the role {role}, and only answers are learnt"
            raise Unlearnable(what, "remove it from this message")
    content = agreed(fields, ("content", "value"))
    is_silent = content is None and (calls or "" in map(as_object(value).get, KNOWN["content"]))
    message: ChatMessage = {"role": role, "content": "" if is_silent else _text(content)}
    if thought is not None:
        if not isinstance(thought, str):
            raise Unlearnable(f"a thought is {thought!r:.50}, no text", "give it as one text")
        message[THOUGHTS[0]] = thought
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        said, text = thought_of(message)
        if said and "<think>" not in message["content"]:  # begun where the prompt opens it
            message |= {"content": text, THOUGHTS[0]: said}
    message |= {name: fields[name] for name in KNOWN["name"] if name in fields}
    return message | ({"weight": 0} if role == "assistant" and is_learnt is False else {})


def thought_of(message: ChatMessage) -> tuple[str | None, str]:
    """The thought of an answer, None without one, and the text after it. Raises Unlearnable."""
    content: str = message["content"]
    fields = {name: message[name] for name in THOUGHTS if message.get(name)}
    thought, text = agreed(fields, THOUGHTS), content
    if block := BLOCK.match(content):
        inline, text = block["opened"], content[block.end() :]
        if inline is None:
            inline = block["begun"]
        if thought is not None and thought.strip() != inline.strip():
            what = f"there are two thoughts: {thought!r:.50}, and in the text {inline!r:.50}"
            raise Unlearnable(what, "keep one of them")
        thought = inline.strip("\n")
    elif content.lstrip().startswith("<think>"):
        what = f"the thought {content.lstrip()!r:.50} has no </think>"
        raise Unlearnable(what, "close it before the answer, or leave the row out")
    return thought, text


def says(value: Any) -> bool:
    """Whether a field says anything; parquet fills those that other rows have with null."""
    return value not in (None, "", [], {}) and value == value  # NaN, as pandas writes it, is not


def without_nulls(value: Any, *, within: bool = False) -> Any:
    """A tool's schema or a call without the keys that parquet filled with null, as TRL's
    `remove_none_values` drops them. The fields of a call itself stay: arguments of null are no
    arguments that a tool takes."""
    if isinstance(value, list):
        return [without_nulls(item, within=within) for item in as_list(value)]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for name, item in as_object(value).items():
        if item is not None or (name == "arguments" and not within):
            kept[name] = without_nulls(item, within=within or name == "arguments")
    return kept


def ignored_fields(value: Any) -> list[str]:
    """The fields of a message that change nothing."""
    return [
        name
        for name, field in as_object(value).items()
        if says(field) and KNOWN.get(name) in IGNORED
    ]


def agreed(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """What the fields of one meaning say, or None. Raises Unlearnable if they differ."""
    said = {name: fields[name] for name in names if name in fields}
    values = list(said.values())
    if any(value != values[0] for value in values):
        shown = ", ".join(f"{name} is {value!r:.50}" for name, value in said.items())
        raise Unlearnable(f"{shown}: they contradict one another", "keep one of them")
    return values[0] if values else None


def _is_learnt(fields: Mapping[str, Any]) -> bool | None:
    """What the masks say; None without any."""
    truths: dict[str, Any] = {}
    for name in MASKS:
        if name in fields:
            truths[name] = TRUTHS.get(str(fields[name]).strip().casefold())
            if truths[name] is None:
                what = f"{name} is {fields[name]!r:.50}: an answer is learnt whole or not at all"
                raise Unlearnable(what, "give true or 1, or false or 0")
    return agreed(truths, MASKS)


def _text(content: Any) -> str:
    """The text of a message, which OpenAI's form may have in parts. Raises Unlearnable."""
    if isinstance(content, str):
        if mark := RENDERED.match(content):
            what = f"a text begins with {mark[1]!r}, as a chat template writes it"
            raise Unlearnable(what, "give the text alone: the model's own template is put around")
        return content
    texts: list[str] = []
    for part in as_list(content) or [None]:
        said = {name: field for name, field in as_object(part).items() if says(field)}
        text = as_object(part).get("text")
        if (
            not isinstance(text, str)
            or said.keys() - {"text", "type"}
            or said.get("type", "text") != "text"
        ):
            what = f"a content is {content!r:.50}, no text"
            raise Unlearnable(what, "give content as a text, or as parts of the type text")
        texts.append(text)
    return "".join(texts)
