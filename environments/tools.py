"""Tools that a model calls.

An environment names them in `tools`, or in `episode_tools` if they differ between tasks: OpenAI
function schemas, or typed Python functions, from which `schema_of` makes the schemas. A model's
call arrives as OpenAI's API has it, in `messages[-1]["tool_calls"]`:

    {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

The answer to it is a message {"role": "tool", "tool_call_id": "call00000", "content": "..."}.
EnvironmentToolUse does all of this for an environment whose tools are Python functions.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from environments.base import (
    ChatMessage,
    Environment,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    Json,
    TaskExample,
    Tool,
)

MAX_TOOLS = 128
MAX_DEPTH = 64
TOOL_ERROR = "Error: "  # how an answer to a call that failed begins
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


class ToolsEnded(RuntimeError):
    """What runs the tools has ended or does not answer: not the model's fault, so the rollout is
    dropped."""


class EnvironmentToolUse(EnvironmentMultiTurn):
    """A conversation in which the model calls Python functions. Implement `start_episode` and
    `score_episode`, and set `tools` or override `episode_tools`.

    The episode ends at the first turn without a call. What a tool returns is shown to the model:
    a string as it is, anything else as JSON. What it raises is shown as an error, and so are calls
    of unknown tools or with wrong arguments. To keep state, return methods from `episode_tools`:
    they belong to the object that serves the episode. `call_tool` runs tools that are schemas."""

    max_turns: int = 8
    """The episode ends after this many model turns."""

    def max_episode_turns(self, example: TaskExample) -> int:
        return self.max_turns

    def step_episode(
        self, example: TaskExample, messages: list[ChatMessage], assistant_response: str
    ) -> EnvironmentStepResult:
        calls = messages[-1].get("tool_calls")
        if not calls:
            return EnvironmentStepResult(done=True)
        tools = self.episode_tools(example)
        if type(self).call_tool is EnvironmentToolUse.call_tool and not all(map(callable, tools)):
            what = "a tool of EnvironmentToolUse must be a function"
            raise TypeError(f"{what}; override call_tool to run those that are schemas")
        schemas = tool_schemas(tools)
        return EnvironmentStepResult(
            False, [self._answer(example, call, schemas) for call in calls]
        )

    def call_tool(self, example: TaskExample, name: str, arguments: Json) -> Any:
        """What a tool returns. By default it is the function of that name."""
        functions = map(
            self._own, cast("Sequence[Callable[..., Any]]", self.episode_tools(example))
        )
        return next(item for item in functions if item.__name__ == name)(**arguments)

    def _own(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; for a method of the loaded object, that of this episode's copy."""
        owner = getattr(function, "__self__", None)
        return getattr(self, function.__name__) if isinstance(owner, Environment) else function

    def _answer(self, example: TaskExample, call: Json, schemas: Sequence[Json]) -> ChatMessage:
        name = call["function"]["name"]
        if problem := problem_of(call, schemas):
            content = f"{TOOL_ERROR}{problem}"
        else:
            try:
                result = self.call_tool(example, name, json.loads(call["function"]["arguments"]))
                content = result if isinstance(result, str) else json.dumps(result, default=str)
            except ToolsEnded:
                raise
            except Exception as error:  # the model may call again, in another way
                content = f"{TOOL_ERROR}{error or type(error).__name__}"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


# -- schemas ---------------------------------------------------------------------------------------


def tool_schemas(tools: Sequence[Tool]) -> list[Json]:
    """OpenAI function schemas of these tools. Raises TypeError or ValueError with the reason."""
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"there are {len(tools)} tools; the most are {MAX_TOOLS}")
    schemas = [schema_of(tool) if callable(tool) else _checked(tool) for tool in tools]
    names = [schema["function"]["name"] for schema in schemas]
    if len({*names}) < len(names):
        raise ValueError(f"two tools have the same name: {', '.join(names)}")
    return schemas


def schema_of(function: Callable[..., Any]) -> Json:
    """The OpenAI function schema of a typed Python function; its docstring's first paragraph is the
    description. Raises TypeError if a parameter has no type that JSON can represent.
    """
    name = function.__name__
    hints = get_type_hints(function)
    properties: Json = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"the tool {name} takes *{parameter.name}; name its parameters")
        if parameter.name not in hints:
            raise TypeError(f"the parameter {parameter.name} of the tool {name} has no type")
        properties[parameter.name] = _schema_of_type(hints[parameter.name], name)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    description = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    parameters = {"type": "object", "properties": properties, "required": required}
    body = {"name": name, "description": description, "parameters": parameters}
    return _checked({"type": "function", "function": body})


def _schema_of_type(hint: Any, name: str) -> Json:
    if hint is Any:
        return {}
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of_type(item, name) for item in inner]}
    if origin in (list, Sequence):
        return {"type": "array", "items": _schema_of_type(inner[0], name)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema_of_type(inner[1], name)}
    raise TypeError(f"the tool {name} has a parameter of type {hint}, which JSON cannot represent")


def _checked(tool: Any) -> Json:
    """A copy of the schema with the fields that templates read."""
    if not isinstance(tool, Mapping):
        raise TypeError(f"a tool must be a function or a schema, got {type(tool).__name__}")
    schema = cast("Mapping[str, Any]", tool)
    # Some write the function without its frame.
    body: Any = schema.get("function", schema if "name" in schema else None)
    if not isinstance(body, Mapping):
        raise ValueError(
            f"a tool must be {{'type': 'function', 'function': ...}}, got {tool!r:.100}"
        )
    function = cast("Mapping[str, Any]", body)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"a tool's name must be 1 to 64 letters, digits, _ - or ., got {name!r:.80}"
        )
    # The order of vLLM's server: a template shows the JSON, in training as in a deployment.
    shown: Json = {
        "name": name,
        "description": str(function.get("description") or ""),
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
    }
    if not isinstance(shown["parameters"], Mapping):
        raise ValueError(f"the parameters of the tool {name} must be a JSON schema")
    if _is_deeper(shown["parameters"], MAX_DEPTH):
        raise ValueError(f"the parameters of the tool {name} have more than {MAX_DEPTH} levels")
    return {"type": "function", "function": shown}


def _is_deeper(value: Any, levels: int) -> bool:
    inner = [*as_object(value).values(), *as_list(value)]
    if levels == 0:
        return bool(inner)
    return any(_is_deeper(item, levels - 1) for item in inner)


# -- calls -----------------------------------------------------------------------------------------


def tool_calls_of(value: Any) -> list[Json]:
    """Calls in OpenAI's form, with arguments as JSON text and numbered ids. Raises ValueError."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"tool_calls must be a list, got {value!r:.80}")
    calls: list[Json] = []
    for number, call in enumerate(cast("Sequence[Any]", value)):
        values = as_object(call)
        function = as_object(values.get("function")) or values
        name = function.get("name")
        if not isinstance(name, str):
            raise ValueError(f"a tool call must name its function, got {call!r:.80}")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        identity = str(values.get("id") or call_id(number))
        body = {"name": name, "arguments": arguments}
        calls.append({"id": identity, "type": "function", "function": body})
    return calls


def call_id(number: int) -> str:
    """The id of call `number`: nine letters and digits, as some templates refuse other ids."""
    return f"call{number:05}"


def problem_of(call: Json, schemas: Sequence[Json]) -> str | None:
    """Why no tool can run this call: an unknown name, or arguments that do not fit; else None."""
    name = call["function"]["name"]
    existing = {schema["function"]["name"]: schema["function"] for schema in schemas}
    if name not in existing:
        return f"there is no tool {name!r}; the tools are {', '.join(existing)}"
    try:
        arguments: Any = json.loads(call["function"]["arguments"])
    except ValueError:
        return f"the arguments of {name} are not JSON"
    if not isinstance(arguments, dict):
        return f"the arguments of {name} must be an object"
    return _misfit(arguments, existing[name].get("parameters"), f"{name}'s arguments")


def _misfit(value: Any, schema: Any, what: str) -> str | None:
    """Why a value does not fit a JSON schema, by its types, enums and property names, or None."""
    rules = as_object(schema)
    if options := as_list(rules.get("anyOf")):
        fits = [_misfit(value, option, what) for option in options]
        return None if None in fits else fits[0]
    allowed = as_list(rules.get("enum"))
    if allowed and value not in allowed:
        return f"{what}: expected one of {allowed}, got {value!r:.60}"
    kinds = as_list(rules.get("type")) or [rules.get("type")]
    if kinds[0] is not None and not any(_is_a(value, kind) for kind in kinds):
        return f"{what}: expected {' or '.join(map(str, kinds))}, got {value!r:.60}"
    inner: list[str | None] = []
    if isinstance(value, dict):
        fields, properties = as_object(value), as_object(rules.get("properties"))
        for name in as_list(rules.get("required")):
            if name not in fields:
                inner.append(f"{what}: {name!r} is missing")
        for name, item in fields.items():
            if name in properties:
                inner.append(_misfit(item, properties[name], f"{what}: {name}"))
            elif properties and not rules.get("additionalProperties"):
                inner.append(f"{what}: there is no {name!r}; expected {', '.join(properties)}")
    if isinstance(value, list):
        items = enumerate(as_list(value))
        inner = [_misfit(item, rules.get("items"), f"{what}[{place}]") for place, item in items]
    return next(filter(None, inner), None)


def add_call_parts(calls: dict[int, dict[str, Any]], parts: Sequence[Any]) -> None:
    """Add to the calls, by their index, those of OpenAI's message or of a part of its stream."""
    for number, part in enumerate(map(as_object, parts)):
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(part.get("index", number), empty)
        call["id"] = part.get("id") or call["id"]
        for name, more in as_object(part.get("function")).items():
            call["function"][name] += more or ""


def as_object(value: Any) -> Json:
    """The JSON value; {} if it is no object."""
    return cast("Json", value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """The JSON value; [] if it is no list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def _is_a(value: Any, kind: Any) -> bool:
    """Whether the JSON value has this type of JSON schema; any value has an unknown one."""
    if isinstance(value, bool):  # an int to Python
        return kind not in ("integer", "number", "string", "array", "object", "null")
    if kind == "number":
        return isinstance(value, (int, float))
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    type_names = [python for python, name in JSON_TYPES.items() if name == kind]
    return not type_names or isinstance(value, type_names[0])


def text_of(message: ChatMessage) -> str:
    """What a message says, its tool calls included, as people and agents read it."""
    content = message.get("content")
    if content is None:
        content = ""
    text = content if isinstance(content, str) else json.dumps(content)
    lines = [text] if text else []
    for call in as_list(message.get("tool_calls")):
        function = as_object(as_object(call).get("function"))
        lines.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(lines)
