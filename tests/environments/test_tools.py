"""Tools: schemas of Python functions, what is wrong with a call, and episodes with calls."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from environments import EnvironmentToolUse, TaskExample
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.tools import problem_of, schema_of, text_of, tool_calls_of, tool_schemas
from tests.folders import environment_folder
from tests.places import TOOL_CALCULATOR


def search(
    query: str,
    limit: int | None = None,
    order: Literal["new", "old"] = "new",
    tags: list[str] = [],  # noqa: B006
    weights: dict[str, float] | None = None,
) -> str:
    """Find pages in the index.

    Not part of the description."""
    if limit == 0:
        raise ValueError("limit is zero")
    return f"{query} {limit} {order} {tags} {weights}"


def call(name: str, arguments: Any, identity: str = "call00000") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


def test_a_typed_function_becomes_a_schema() -> None:
    assert schema_of(search)["function"] == {
        "name": "search",
        "description": "Find pages in the index.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "order": {"enum": ["new", "old"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "weights": {
                    "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]
                },
            },
            "required": ["query"],
        },
    }


def untyped(x): ...
def variadic(*words: str): ...
def odd(x: Path): ...


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([untyped], "the parameter x of the tool untyped has no type"),
        ([variadic], "takes *words"),
        ([odd], "which JSON cannot represent"),
        ([search, search], "two tools have the same name"),
        ([{"type": "function"}], "a tool must be"),
        ([{"name": "two words"}], "1 to 64 letters"),
        ([{"name": "x", "parameters": 5}], "must be a JSON schema"),
        ([7], "a function or a schema, got int"),
        ([search] * 200, "there are 200 tools"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused_with_the_reason(tools: Any, reason: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        tool_schemas(tools)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("search", {"query": "x"}, None),
        ("search", {"query": "x", "limit": None, "tags": ["a"], "weights": {"a": 1}}, None),
        ("find", {}, "there is no tool 'find'; the tools are search"),
        ("search", "{", "the arguments of search are not JSON"),
        ("search", [1], "the arguments of search must be an object"),
        ("search", {}, "search's arguments: 'query' is missing"),
        ("search", {"query": 5}, "search's arguments: query: expected string, got 5"),
        ("search", {"query": "x", "limit": True}, "limit: expected integer, got True"),
        ("search", {"query": "x", "order": "up"}, "order: expected one of ['new', 'old']"),
        ("search", {"query": "x", "tags": ["a", 1]}, "tags[1]: expected string, got 1"),
        ("search", {"query": "x", "size": 1}, "there is no 'size'; expected query, limit"),
    ],
)
def test_a_call_that_no_tool_can_run_has_a_reason(name: str, arguments: Any, problem: Any) -> None:
    found = problem_of(call(name, arguments), [schema_of(search)])
    assert found == problem or (problem and found and problem in found)


@pytest.mark.parametrize("schema", [5, {"type": 7}, {"anyOf": []}, {"properties": [1]}, None])
def test_a_schema_that_is_none_fits_every_argument(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert problem_of(call("f", {"a": 1}), [tool]) is None


def test_calls_in_the_forms_that_people_write_become_openais() -> None:
    flat = {"name": "f", "arguments": {"a": "é"}}
    framed = {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert tool_calls_of([flat, framed]) == [call("f", '{"a": "é"}'), call("f", '{"a": 1}', "x")]
    for wrong in ("f", [5], [{}], [{"function": {"name": 3}}]):
        with pytest.raises(ValueError, match="tool"):
            tool_calls_of(wrong)


def test_a_message_is_read_with_its_calls() -> None:
    message = {"role": "assistant", "content": "so", "tool_calls": [call("f", {"a": 1})]}
    assert text_of(message) == 'so\nf({"a": 1})' and text_of({"role": "assistant", "content": None}) == ""


class Searcher(EnvironmentToolUse):
    tools = (search,)

    def start_episode(self, example: Any) -> Any: ...
    def score_episode(self, example: Any, episode: Any) -> Any: ...


def test_every_call_of_a_turn_is_answered_and_a_turn_without_ends_the_episode() -> None:
    task = TaskExample({}, "?")
    calls = [
        call("search", {"query": "a"}, "1"), call("search", {"query": "a", "limit": 0}, "2"), call("nothing", {}, "3"),
    ]  # fmt: skip
    result = Searcher().step_episode(task, [{"role": "assistant", "content": "", "tool_calls": calls}], "")
    assert not result.done
    assert [(each["tool_call_id"], each["content"]) for each in result.messages] == [
        ("1", "a None new [] None"),
        ("2", "Error: limit is zero"),
        ("3", "Error: there is no tool 'nothing'; the tools are search"),
    ]
    assert Searcher().step_episode(task, [{"role": "assistant", "content": "x"}], "x").done


STATEFUL = """
from environments import EnvironmentToolUse
class Counter(EnvironmentToolUse):
    def __init__(self):
        self.dataset = tasks()
        self.tools = [self.count]
    def start_episode(self, example):
        self.counted = 0
        return [{"role": "user", "content": "count"}]
    def count(self) -> dict:
        self.counted += 1
        return {"counted": self.counted}
    def score_episode(self, example, episode):
        calls = [turn.get("tool_calls") for turn in episode.messages[episode.prompt_length :]]
        return RewardResult(self.counted, reason=str(calls[0][0]["function"]["name"]))
    def sft_completion(self, example):
        return [{"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]}]
"""


@pytest.mark.slow
async def test_a_tool_of_the_loaded_object_changes_only_its_own_episode(tmp_path: Path) -> None:
    folder = environment_folder(tmp_path, STATEFUL, returns="Counter()")
    counts = [call("count", {})]
    async with await EnvironmentHost.start(folder) as host:
        one = await host.open("train", 0)
        other = await host.open("train", 1)
        assert [tool["function"]["name"] for tool in one.tools] == ["count"]
        for episode in (one.episode, one.episode, other.episode):
            step = await host.step(episode, "", counts)
        assert json.loads(step.messages[0]["content"]) == {"counted": 1}
        score = await host.score(one.episode)
        assert (score.reward, score.reason) == (2.0, "count")
        (gold,) = await host.gold("train", 0)
        assert gold["content"] == "" and gold["tool_calls"] == counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("def episode_tools(self, example): return 5", "tools must be a list"),
        ("def episode_tools(self, example): return [print]", "tools:"),
        (
            "def start_episode(self, example): return [{'role': 'assistant', 'content': '', 'tool_calls': 5}]",
            "tool_calls must be a list",
        ),
    ],
)
async def test_wrong_tools_are_the_environments_error(tmp_path: Path, method: str, reason: str) -> None:
    folder = environment_folder(tmp_path, f"class Sample(Echo):\n    {method}")
    async with await EnvironmentHost.start(folder) as host:
        with pytest.raises(EnvironmentFault, match=reason) as caught:
            await host.open("train", 0)
        assert caught.value.code == "environment_error"


@pytest.mark.slow
async def test_the_gold_conversations_of_the_example_earn_everything() -> None:
    async with await EnvironmentHost.start(TOOL_CALCULATOR) as host:
        for index in (0, 7, 199):
            opening = await host.open("eval", index)
            for message in await host.gold("eval", index):
                if message["role"] == "assistant":
                    step = await host.step(opening.episode, message["content"], message.get("tool_calls", ()))
            assert step.done
            score = await host.score(opening.episode)
            assert (score.reward, score.success) == (1.0, True)
