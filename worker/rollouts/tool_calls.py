"""Tool calls in a model's own format: which format a chat template has, and what a turn calls.

    form = form_of(with_tools(template))          # the vLLM parser that reads this template's calls
    turn = CallReader(tokenizer, form, schemas).read(ids, text)
    turn.content, turn.tool_calls, turn.bad_tool_call

The parsers are those of vLLM, so a deployed model's calls are read as they were in training."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from environments.base import ChatMessage, Json
from environments.tools import as_object, call_id, problem_of
from flash_mcp.protocol.base_models import ToolForm


@dataclass(frozen=True)
class Turn:
    """What the model wrote in one turn: its text, and the calls in it in OpenAI's form.

    `bad_tool_call` says why a call cannot be run: it does not parse (then it is text), or names an
    unknown tool, or its arguments do not fit the schema."""

    content: str
    tool_calls: list[Json] = field(default_factory=list[Json])
    bad_tool_call: str | None = None

    def message(self) -> ChatMessage:
        said: ChatMessage = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            said["tool_calls"] = self.tool_calls
        if self.bad_tool_call:
            said["bad_tool_call"] = self.bad_tool_call
        return said


SAMPLES: dict[str, Any] = {"string": "x y", "integer": 3}


def sample_call(tool: Json) -> Json:
    """A call of this tool, to see whether a template and a parser agree. It gives the arguments of
    plain types, as parsers read the text of an argument by its type.
    """
    function = tool["function"]
    arguments: Json = {}
    for name, schema in as_object(as_object(function.get("parameters")).get("properties")).items():
        kind = as_object(schema).get("type")
        if isinstance(kind, str) and kind in SAMPLES and "enum" not in schema:
            arguments[name] = SAMPLES[kind]
    called = {"name": function["name"], "arguments": json.dumps(arguments)}
    return {"id": call_id(0), "type": "function", "function": called}


class CallReader:
    """Reads the calls of turns that may call `schemas`."""

    def __init__(self, tokenizer: Any, form: ToolForm, schemas: Sequence[Json]) -> None:
        # Imported here: vLLM reads the environment when it is imported, and SFT does without it.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
        from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

        # A call that does not parse is counted by us. vLLM writes a traceback for each.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        request: Any = ChatCompletionRequest
        manager: Any = ToolParserManager
        self._form = form
        self._schemas = schemas
        self._request = request(messages=[], model="", tools=list(schemas))
        self._parser = manager.get_tool_parser(form.parser)(tokenizer, self._request.tools)

    @property
    def ends(self) -> str | None:
        """The text that ends each call, if that is known."""
        return "</tool_call>" if self._form.begins == "<tool_call>" else None

    def tag(self, choice: str, name: str | None, *, parallel: bool) -> Json | None:
        """The structural tag of xgrammar for turns that call as `choice` says ("auto" or
        "required", or the tool `name`). None if vLLM has none for this format.
        """
        named = {"type": "function", "function": {"name": name}}
        # Of a tool that is not strict, vLLM leaves the arguments open.
        strict = [
            {**schema, "function": {**schema["function"], "strict": True}}
            for schema in self._schemas
        ]
        request = type(self._request)(
            messages=[], model="", tools=strict, tool_choice=named if name else choice
        )
        tag = self._parser.get_structural_tag(request)
        if tag is None:
            return None
        form = json.loads(tag.model_dump_json())["format"]
        if not parallel:
            form["stop_after_first"] = True
        return form

    def read(self, written: str, text: str, first: int = 0) -> Turn:
        """The turn whose tokens read as `written` with special tokens but for those that end a
        turn, and as `text` without any. Its calls are numbered from `first` on.
        """
        result = self._parser.extract_tool_calls(written, self._request)
        if not result.tool_calls:
            is_bad = self._form.begins is not None and self._form.begins in written
            return Turn(text, bad_tool_call="the call does not parse" if is_bad else None)
        calls: list[Json] = []
        for number, call in enumerate(result.tool_calls, start=first):
            function = {"name": call.function.name, "arguments": call.function.arguments}
            calls.append({"id": call_id(number), "type": "function", "function": function})
        problems = filter(None, (problem_of(call, self._schemas) for call in calls))
        return Turn(result.content or "", calls, next(problems, None))


# -- patterns for the strings of a JSON schema, where the engine's own rule lets too much pass -----

ANY_CHARACTER = r"[\s\S]"
PATTERN_PART = 100
"""Characters of one repetition in a pattern. xgrammar fails at more than 128."""
LONGEST_PATTERN = 1000
"""Characters of the longest string that gets a pattern: a longer one would slow down each token."""


def with_valid_strings(schema: Json) -> Json:
    """The schema, or what holds schemas, with a pattern for each string of limited length.

    xgrammar lets such a string hold raw control characters, which no reader of JSON takes. A string
    that has a pattern may not."""
    try:
        return _with_patterns(schema)
    except RecursionError:  # nested that deeply, it is left to xgrammar
        return schema


def _with_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_patterns(part) for part in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast(Json, schema)
    result = {
        name: part if name in ("const", "enum") else _with_patterns(part)
        for name, part in fields.items()
    }
    if fields.get("type") == "string" and "pattern" not in fields:
        least, most = fields.get("minLength", 0), fields.get("maxLength", -1)
        if most == -1 and least in range(1, LONGEST_PATTERN + 1):
            result["pattern"] = f"^{_characters(int(least), int(least))}{ANY_CHARACTER}*$"
        elif most in range(LONGEST_PATTERN + 1) and least in range(int(most) + 1):
            result["pattern"] = f"^{_characters(int(least), int(most))}$"
    return result


def _characters(least: int, most: int) -> str:
    """A pattern of so many characters, in parts."""
    pattern = ""
    while most > 0:
        part = min(most, PATTERN_PART)
        sure = min(least, part)
        pattern += f"{ANY_CHARACTER}{{{sure},{part}}}"
        least, most = least - sure, most - part
    return pattern
