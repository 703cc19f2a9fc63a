"""The APIs that an agent may speak, with the packages that real agents use."""

import asyncio
import json
import pkgutil
import random
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

from environments.agents import server
from environments.agents.calls import AgentCall, Usage
from environments.agents.dialects import ApiError, TurnToSend
from environments.agents.server import DIALECTS, Endpoint
from environments.agents.session import AgentSession
from environments.process.host import EnvironmentHost
from environments.tools import as_object
from tests.environments.agents.test_endpoint import CALL, TOOL, agents

pytestmark = [pytest.mark.slow, pytest.mark.linux]
TURNS: list[tuple[str, list[Any], Usage]] = [
    ("Let me add.", [CALL], Usage(30, 5)), ("It is 4", [], Usage(50, 3)), ("", [CALL], Usage(60, 4)),
    ("Yes, it", [], Usage(80, 2, "length")),
]  # fmt: skip


async def conversation(host: EnvironmentHost, turns: Sequence[Any]) -> tuple[list[AgentCall], Any]:
    """The calls that the agent made when the model answered so, and what the agent told."""
    opening = await host.open("train", 0)
    calls = [opening.call]
    for number, (text, called, usage) in enumerate(turns):
        await host.answer_call(opening.episode, number, text, called, usage)
        call = await host.next_call(opening.episode)
        if isinstance(call, AgentCall):
            calls.append(call)
    assert len(calls) == len(turns)
    return calls, json.loads((await host.score(opening.episode)).reason or "")


def agent(package: str, steps: str) -> str:
    """Source of an agent that takes these steps with the package's client."""
    body = textwrap.indent(textwrap.dedent(steps), " " * 20)
    return f"""
        import {package.lower()}
        class Sample(Sample):
            max_calls = 8
            def run(self, example, base_url, api_key, model):
                told = []
                with {package.lower()}.{package}(base_url=base_url, api_key=api_key) as client:
{body}
                return RewardResult(1.0, reason=json.dumps(told))
    """


RESPONSES = agent(
    "OpenAI",
    """
    tools = [{"type": "function", "name": "add", "description": "", "parameters": {"type": "object"}}]
    known = {"model": model, "instructions": "Be brief.", "tools": [*tools, {"type": "web_search"}]}
    first = client.responses.create(input="2 + 2?", **known)
    told.append(first.model_dump(exclude_unset=True))
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "4"}
    written = [item.model_dump(exclude_unset=True) for item in first.output]
    asked = {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}
    second = client.responses.create(input=[asked, *written, result], **known)
    told.append(second.output_text)
    more = {"previous_response_id": second.id, "input": "Sure?"}
    with client.responses.stream(**more, **known) as stream:
        told.append([event.type for event in stream])
        third = stream.get_final_response()
    told.append(third.output[0].arguments)
    result = {"type": "function_call_output", "call_id": third.output[0].call_id, "output": "4"}
    more = {"previous_response_id": third.id, "input": [result], "stream": True}
    with client.responses.create(**more, **known) as stream:
        events = list(stream)
    told.append([event.type for event in events])
    told.append(events[-1].response.model_dump(exclude_unset=True))
    try:
        client.responses.create(previous_response_id="resp_none", input="x", **known)
    except openai.NotFoundError as error:
        told.append(error.code)
    """,
)
MESSAGES = agent(
    "Anthropic",
    """
    tools = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
    tools.append({"type": "web_search_20250305", "name": "web_search"})
    known = {"model": model, "system": "Be brief.", "max_tokens": 9, "tools": tools}
    messages = [{"role": "user", "content": "2 + 2?"}]
    told.append(client.messages.count_tokens(
        model=model, messages=messages, tools=tools[:1]
    ).input_tokens)
    first = client.messages.create(messages=messages, **known)
    told.append(first.model_dump(exclude_unset=True))
    def answered(message):
        result = {"type": "tool_result", "tool_use_id": "call00000", "content": "4"}
        written = [block.model_dump(exclude_unset=True) for block in message.content]
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
        return [
            {"role": "assistant", "content": [thought, *written]},
            {"role": "user", "content": [result]},
        ]
    messages += answered(first)
    second = client.messages.create(messages=messages, **known)
    told.append(second.content[0].text)
    messages += [
        {"role": "assistant", "content": second.content[0].text},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    with client.messages.stream(messages=messages, **known) as stream:
        told.append([event.type for event in stream])
        third = stream.get_final_message()
    told.append(third.content[0].input)
    messages += answered(third)
    with client.messages.stream(messages=messages, **known) as stream:
        told.append("".join(stream.text_stream))
        told.append(stream.get_final_message().model_dump(exclude_unset=True))
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    try:
        client.messages.create(messages=[{"role": "user", "content": [image]}], **known)
    except anthropic.BadRequestError as error:
        told.append(error.body)
    """,
)


def continued(calls: Sequence[AgentCall]) -> None:
    """Each call continues the one before, and shows the model what it should."""
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert calls[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    result = {"role": "tool", "tool_call_id": "call00000", "content": "4"}
    assert calls[1].messages == calls[3].messages == [result]
    assert calls[2].messages == [{"role": "user", "content": "Sure?"}] and all(call.tools == [TOOL] for call in calls)


async def test_the_openai_package_speaks_responses_whole_and_streamed(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", "", source=RESPONSES) as host:
        calls, found = await conversation(host, TURNS)
    continued(calls)
    first, text, called, arguments, events, last, error = found
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    assert first["output"][0]["content"][0]["text"] == "Let me add."
    assert first["status"] == "completed" and first["usage"]["total_tokens"] == 35
    assert (text, json.loads(arguments)) == ("It is 4", {"a": 1})
    assert called == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert events[-1] == "response.incomplete" and "response.output_text.delta" in events
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["content"][0]["text"] == "Yes, it" and error == "previous_response_not_found"


async def test_the_anthropic_package_speaks_messages_whole_and_streamed(tmp_path: Path) -> None:
    async with agents(tmp_path / "agent", "", source=MESSAGES) as host:
        calls, found = await conversation(host, TURNS)
    continued(calls)
    counted, first, text, events, given, said, last, error = found
    assert counted > 10 and first["stop_reason"] == "tool_use"
    assert first["content"][0] == {"type": "text", "text": "Let me add."} and first["content"][1]["input"] == {"a": 1}
    assert first["usage"]["input_tokens"] == 30 and first["usage"]["output_tokens"] == 5
    assert (text, given, said) == ("It is 4", {"a": 1}, "Yes, it")
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert last["stop_reason"] == "max_tokens" and last["usage"]["output_tokens"] == 2
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"


PARAMETERS = {
    "/chat/completions": ["openai.types.chat.completion_create_params:CompletionCreateParamsNonStreaming"],
    "/responses": ["openai.types.responses.response_create_params:ResponseCreateParamsNonStreaming"],
    "/messages": [
        "anthropic.types.message_create_params:MessageCreateParamsNonStreaming",
        "anthropic.types.beta.message_create_params:MessageCreateParamsNonStreaming",
    ],
}
"""The types of each API's requests. Their packages take seconds to import."""


@pytest.mark.parametrize("place", PARAMETERS)
def test_every_field_of_the_official_packages_is_known(place: str) -> None:
    names: set[str] = set()
    for parameters in map(pkgutil.resolve_name, PARAMETERS[place]):
        for base in (parameters, *parameters.__orig_bases__):
            names |= set(base.__annotations__)
    assert len(names) > 15
    dialect = DIALECTS[place]
    groups = [dialect.honoured, dialect.of_the_run, dialect.without_effect, {*dialect.neutral}]
    known = {name for group in groups for name in group} | {"thread"}
    assert names - known == set()
    assert sum(map(len, groups)) == len(known) - 1, "each field is in one group"


REPLIES = {
    "/chat/completions": (
        "openai.types.chat:ChatCompletion", "openai.types.chat:ChatCompletionChunk", "openai.types.shared:ErrorObject"),
    "/responses": ("openai.types.responses:Response", "openai.types.responses:ResponseStreamEvent",
        "openai.types.shared:ErrorObject"),
    "/messages": ("anthropic.types:Message", "anthropic.types:RawMessageStreamEvent", "anthropic.types:ErrorResponse"),
}  # fmt: skip
"""The types of whole replies, of events, and of errors."""
ANSWERS = {
    "a text": TurnToSend({"role": "assistant", "content": "x"}, Usage(3, 2)),
    "a call": TurnToSend({"role": "assistant", "content": "", "tool_calls": [CALL]}, Usage(3, 2)),
    "both": TurnToSend({"role": "assistant", "content": "x", "tool_calls": [CALL, {**CALL, "id": "2"}]}, Usage(3, 2)),
    "cut off": TurnToSend({"role": "assistant", "content": "x"}, Usage(3, 2, "length")),
    "stopped": TurnToSend({"role": "assistant", "content": "x"}, Usage(3, 2, stopped_by="END")),
    "with log-probabilities": TurnToSend(
        {"role": "assistant", "content": "xy"}, Usage(3, 2, logprobs=[("x", -0.5), ("y", -1.0)])
    ),
}
LOGPROBS = {
    "/chat/completions": {"logprobs": True},
    "/responses": {"include": ["message.output_text.logprobs"]},
    "/messages": {},
}


def strictly(kind: str, body: Any) -> None:
    """Validate JSON by an official type: every value of its kind, no field too many."""
    adapter = pydantic.TypeAdapter(pkgutil.resolve_name(kind))
    read = adapter.validate_json(json.dumps(body), strict=True)
    assert json.loads(adapter.dump_json(read, exclude_unset=True, by_alias=True)) == body
    extras: list[Any] = [read]
    while extras:
        value = extras.pop()
        if isinstance(value, pydantic.BaseModel):
            # We also name the call whose arguments are done.
            assert {*(value.model_extra or {})} <= ({"name"} if "arguments.done" in str(value) else set()), value
            extras += [getattr(value, name) for name in type(value).model_fields]
        elif isinstance(value, list):
            extras += value


@pytest.mark.parametrize("place", REPLIES)
@pytest.mark.parametrize("name", ANSWERS)
def test_every_body_and_event_is_valid_by_the_official_types(place: str, name: str) -> None:
    dialect = DIALECTS[place]
    whole, event, _ = REPLIES[place]
    more = LOGPROBS[place] if "log" in name else {}
    asked = dialect.read({**BODIES[place], **more}, {"resp_1": [{"role": "user", "content": "z"}]})
    answers = [ANSWERS[name]]
    strictly(whole, dialect.whole(answers, asked))
    for kind, data in dialect.events(answers, asked):
        strictly(event, data)
        assert kind in (None, data.get("type"))


@pytest.mark.parametrize("place", REPLIES)
def test_every_error_is_valid_by_the_official_types(place: str) -> None:
    dialect = DIALECTS[place]
    for status in (400, 401, 404, 429, 500):
        error = ApiError(status, {401: "invalid_api_key", 404: "unknown_url"}.get(status, "x"), "what", "param")
        body = dialect.error(error, "req_1")
        strictly(REPLIES[place][2], body if place == "/messages" else body["error"])
    if place == "/responses":
        strictly(REPLIES[place][1], dialect.error_event(error)[1])


@asynccontextmanager
async def served(place: str) -> AsyncGenerator[tuple[AgentSession, httpx.AsyncClient]]:
    """The server of one session, and a client with its key."""
    endpoint = Endpoint(asyncio.get_running_loop())
    session = AgentSession(8)
    endpoint.sessions[session.key] = session
    name = "x-api-key" if place == "/messages" else "authorization"
    key = session.key if place == "/messages" else f"Bearer {session.key}"
    async with httpx.AsyncClient(base_url=endpoint.url, headers={name: key}, trust_env=False) as http:
        yield session, http
    await endpoint.aclose()


def events_of(content: str) -> list[tuple[str | None, Any]]:
    """The events of a stream: their names and data. Comments are left out."""
    events: list[tuple[str | None, Any]] = []
    for block in content.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            data = fields["data"]
            events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events


@pytest.mark.parametrize("place", REPLIES)
async def test_what_is_sent_is_valid_and_has_the_id_of_its_request(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, event, failure = REPLIES[place]
    body = {**BODIES[place], "previous_response_id": None} if place == "/responses" else BODIES[place]
    monkeypatch.setattr(server, "COMMENT_EVERY_S", 0.01)
    async with served(place) as (session, http):

        async def ask(end: Any, **more: Any) -> httpx.Response:
            reply = asyncio.ensure_future(http.post(place, json={**body, **more}))
            call = await session.requests.get()
            await asyncio.sleep(0.1)  # a stream begins with comments
            end(call.number)
            return await reply

        def turn(number: int) -> None:
            session.answer(number, {"role": "assistant", "content": "x", "tool_calls": [CALL]}, Usage(3, 2))

        def error(number: int) -> None:
            session.fail(number, ApiError(400, "invalid_value", "no room", "messages"))

        replies = [await ask(turn), await ask(turn, stream=True), await ask(error), await ask(error, stream=True)]
        replies += [await http.post(place, json={**body, "guided_json": {}})]
        models = (await http.get("/models")).json()["data"]
        assert [model["id"] for model in models] == ["policy"]
        replies += [await http.post(place, content=b"[", headers={"x-api-key": "sk-1", "authorization": "sk-1"})]
    ids = [reply.headers["request-id"] for reply in replies]
    assert len({*ids}) == len(ids) and all(one.startswith("req_") for one in ids)
    assert ids == [reply.headers["x-request-id"] for reply in replies]
    assert [reply.status_code for reply in replies] == [200, 200, 400, 200, 400, 401]
    answered, streamed, *failed = replies
    strictly(whole, answered.json())
    events = events_of(streamed.text)
    if place == "/chat/completions":
        assert events.pop() == (None, "[DONE]")
    for name, data in events:
        strictly(event, data)
        assert name == data.get("type")
    ((name, data),) = events_of(failed[1].text)
    bodies = [failed[0].json(), data, *(reply.json() for reply in failed[2:])]
    if place == "/responses":
        assert name == "error"
        strictly(event, bodies.pop(1))
    for identity, sent in zip([ids[2], ids[3], *ids[4:]], bodies, strict=False):
        strictly(failure, sent if place == "/messages" else sent["error"])
        assert place != "/messages" or sent["request_id"] == identity


def refusal(place: str, **more: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        DIALECTS[place].read({**BODIES[place], **more}, {"resp_1": []})
    assert caught.value.status == 400
    return DIALECTS[place].error(caught.value)["error"]


def test_a_field_that_is_not_served_is_refused_as_the_api_refuses_it() -> None:
    assert refusal("/chat/completions", guided_json={})["message"] == ("Unknown parameter: 'guided_json'.")
    assert refusal("/responses", top_k=3)["code"] == "unknown_parameter"
    assert refusal("/messages", seed=3)["message"] == "seed: Extra inputs are not permitted"
    wrong_key = DIALECTS["/messages"].error(ApiError(401, "invalid_api_key", "x"))
    assert wrong_key["error"]["type"] == "authentication_error"
    assert refusal("/messages", mcp_servers=[{"type": "url"}])["type"] == "invalid_request_error"
    details = refusal("/messages", thread={"type": "continue"})["details"]
    assert details["error_code"] == "thread_unsupported_request"


def test_what_the_run_decides_is_accepted_and_echoed_as_the_runs() -> None:
    dialect = DIALECTS["/responses"]
    more = {"temperature": 0.1, "top_p": 0.2, "reasoning": {"effort": "low"}}
    asked = dialect.read({**BODIES["/responses"], **more}, {"resp_1": []})
    usage = Usage(1, 1, temperature=0.7, top_p=0.9)
    whole = dialect.whole([TurnToSend({"role": "assistant", "content": "x"}, usage)], asked)
    assert (whole["temperature"], whole["top_p"]) == (0.7, 0.9)


ODD = (
    None, True, 0, -1, 10**30, 0.5, "", "x", "\ud800", [], [[]], [None], {}, {"type": []}, {"": {}},
    {"type": "text", "text": 7}, {"role": "user"}, {"name": "f"}, {"function": {}},
)  # fmt: skip
BODIES = {
    "/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00000", "content": "1"},
        ],
        "tools": [TOOL],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
    },
    "/responses": {
        "model": "policy",
        "instructions": "y",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "2"},
        ],
        "previous_response_id": "resp_1",
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        "text": {"format": {"type": "text"}},
        "metadata": {},
    },
    "/messages": {
        "model": "policy",
        "system": [{"type": "text", "text": "y"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 9,
        "stop_sequences": ["END"],
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    },
}  # fmt: skip


def changed(rng: random.Random, value: Any) -> Any:
    """The JSON value with something odd in one place."""
    places: list[Any] = []
    if isinstance(value, (dict, list)):
        places = [*value] if isinstance(value, dict) else [*range(len(value))]
    if not places or rng.random() < 0.1:
        return rng.choice(ODD)
    place = rng.choice(places)
    inner = value[place]
    is_left = isinstance(inner, (dict, list)) and rng.random() < 0.8
    odd = changed(rng, inner) if is_left else rng.choice(ODD)
    if isinstance(value, dict):
        return {**value, place: odd}
    return [*value[:place], odd, *value[place + 1 :]]


@pytest.mark.parametrize("place", BODIES)
def test_whatever_is_asked_is_answered_or_refused(place: str) -> None:
    rng = random.Random(place)
    dialect = DIALECTS[place]
    outcomes: Counter[int] = Counter()
    for _ in range(3000):
        body = BODIES[place]
        for _ in range(rng.randint(0, 3)):
            body = changed(rng, body)
        answer = TurnToSend({"role": "assistant", "content": "x", "tool_calls": [CALL]}, Usage())
        try:
            asked = dialect.read(as_object(body), {"resp_1": [{"role": "user", "content": "z"}]})
            answers = [answer] * asked.choices
            json.dumps([dialect.whole(answers, asked), *dialect.events(answers, asked)])
            outcomes[200] += 1
        except ApiError as error:
            json.dumps(dialect.error(error))
            outcomes[error.status] += 1
    expected = {200, 400, 404} if place == "/responses" else {200, 400}
    assert min(outcomes.values()) > 50 and set(outcomes) == expected, outcomes
