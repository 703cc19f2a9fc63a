"""What the MCP conformance suite expects of a server under test, mounted on the product's own server.

    python -m tests.clients.fixtures PORT

The suite's `--requirements` scenarios call tools, prompts and resources of these names; it describes each in its own
output. The product's middleware, schemas and errors stay in front of all of them."""

from __future__ import annotations

import base64
import functools
import json
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import anyio
from mcp.server.extension import Extension, ToolBinding
from mcp.server.mcpserver.context import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    Completion,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)
from pydantic import BaseModel, Field

from flash_mcp.protocol.errors import FlashError
from flash_mcp.server.mcp_server import FlashServer, build_server
from flash_mcp.server.tasks import TaskState, completed, failed

PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
        "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
    )
).decode()
WAV = base64.b64encode(b"RIFF&\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0@\x1f\0\0\x80>\0\0\2\0\x10\0data\2\0\0\0\0\0").decode()


def text(words: str) -> TextContent:
    return TextContent(type="text", text=words)


def embedded(uri: str, words: str, kind: str = "text/plain") -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=kind, text=words))


def test_simple_text() -> str:
    """Say a fixed sentence."""
    return "This is a simple text response for testing."


def test_image_content() -> ImageContent:
    """Show one red pixel."""
    return ImageContent(type="image", data=PNG, mime_type="image/png")


def test_audio_content() -> AudioContent:
    """Play one sample of silence."""
    return AudioContent(type="audio", data=WAV, mime_type="audio/wav")


def test_embedded_resource() -> EmbeddedResource:
    """Return a resource inside the result."""
    return embedded("test://embedded-resource", "This is an embedded resource content.")


def test_multiple_content_types() -> list[Any]:
    """Return a text, an image and a resource."""
    resource = embedded("test://mixed-content-resource", '{"test":"data","value":123}', "application/json")
    return [text("Multiple content types test:"), test_image_content(), resource]


def test_error_handling() -> str:
    """Fail."""
    raise ToolError("This tool intentionally returns an error for testing")


async def test_tool_with_logging(ctx: Context[Any, Any]) -> str:
    """Send three log messages."""
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.info(words)
        await anyio.sleep(0.05)
    return "logged"


async def test_logging_tool(ctx: Context[Any, Any]) -> str:
    """Send log messages to those who asked for them."""
    return await test_tool_with_logging(ctx)


async def test_tool_with_progress(ctx: Context[Any, Any]) -> str:
    """Report progress three times."""
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
        await anyio.sleep(0.05)
    return "done"


async def test_trigger_tool_change(ctx: Context[Any, Any]) -> str:
    """Tell subscribers that the list of tools has changed."""
    await ctx.notify_tools_changed()
    return "told"


async def test_trigger_prompt_change(ctx: Context[Any, Any]) -> str:
    """Tell subscribers that the list of prompts has changed."""
    await ctx.notify_prompts_changed()
    return "told"


async def test_sampling(prompt: str, ctx: Context[Any, Any]) -> str:
    """Have the client's model answer."""
    answer = await ctx.session.create_message(
        messages=[SamplingMessage(role="user", content=text(prompt))], max_tokens=100
    )
    return f"LLM response: {getattr(answer.content, 'text', '')}"


class Person(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Defaults(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Literal["active", "inactive", "pending"] = "active"
    verified: bool = True


def titled(*values: tuple[str, str]) -> list[dict[str, str]]:
    return [{"const": value, "title": title} for value, title in values]


CHOICES = titled(("value1", "First"), ("value2", "Second"), ("value3", "Third"))
OPTIONS = ["option1", "option2", "option3"]
ENUMS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "untitledSingle": {"type": "string", "enum": OPTIONS},
        "titledSingle": {"type": "string", "oneOf": CHOICES},
        "legacyEnum": {"type": "string", "enum": OPTIONS, "enumNames": ["One", "Two", "Three"]},
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": OPTIONS}},
        "titledMulti": {"type": "array", "items": {"anyOf": CHOICES}},
    },
}


async def test_elicitation(message: str, ctx: Context[Any, Any]) -> str:
    """Ask the user who they are."""
    answer = await ctx.session.elicit_form(message, Person.model_json_schema(), ctx.request_id)
    return f"User response: action={answer.action}, content={answer.content}"


async def test_elicitation_sep1034_defaults(ctx: Context[Any, Any]) -> str:
    """Ask with a default for every kind of value."""
    answer = await ctx.session.elicit_form("Please fill in", Defaults.model_json_schema(), ctx.request_id)
    return f"Elicitation completed: action={answer.action}, content={answer.content}"


async def test_elicitation_sep1330_enums(ctx: Context[Any, Any]) -> str:
    """Ask with every kind of choice."""
    answer = await ctx.session.elicit_form("Please choose", ENUMS, ctx.request_id)
    return f"Elicitation completed: action={answer.action}, content={answer.content}"


def ask(message: str, field: str, kind: str = "string") -> ElicitRequest:
    schema: dict[str, Any] = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def sample(question: str, max_tokens: int) -> CreateMessageRequest:
    messages = [SamplingMessage(role="user", content=text(question))]
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=messages, max_tokens=max_tokens))


def needs(ctx: Context[Any, Any], state: str | None = None, **requests: InputRequest) -> InputRequiredResult | None:
    """What is still to be asked; None once every answer is there, of the right kind."""
    given = ctx.input_responses or {}
    if all(name in given for name in requests):
        return None
    return InputRequiredResult(input_requests=requests, request_state=state)


def answer_of(ctx: Context[Any, Any], name: str) -> dict[str, Any]:
    return (ctx.input_responses or {})[name].model_dump(mode="json", by_alias=True)


def test_input_required_result_elicitation(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Greet a user who says their name."""
    asked = needs(ctx, user_name=ask("What is your name?", "name"))
    return asked or f"Hello, {(answer_of(ctx, 'user_name').get('content') or {}).get('name')}!"


def test_streaming_elicitation(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask within the response stream."""
    return needs(ctx, user_name=ask("What is your name?", "name")) or "asked"


def test_input_required_result_sampling(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask the client's model."""
    asked = needs(ctx, capital_question=sample("What is the capital of France?", 100))
    return asked or json.dumps(answer_of(ctx, "capital_question"))


def test_input_required_result_list_roots(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask for the client's roots."""
    return needs(ctx, client_roots=ListRootsRequest(params=None)) or json.dumps(answer_of(ctx, "client_roots"))


def test_input_required_result_request_state(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask, and recognise the state that comes back."""
    asked = needs(ctx, "asked", confirm=ask("Please confirm", "ok", "boolean"))
    return asked or ("state-ok" if ctx.request_state == "asked" else "state-lost")


def test_input_required_result_tampered_state(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask with a state that nobody may change."""
    return test_input_required_result_request_state(ctx)


def test_input_required_result_multiple_inputs(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask the user, the model and the client at once."""
    asked = needs(
        ctx, "asked", user_name=ask("What is your name?", "name"), greeting=sample("Generate a greeting", 50),
        client_roots=ListRootsRequest(params=None),
    )  # fmt: skip
    return asked or "all answered"


def test_input_required_result_multi_round(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask twice."""
    if ctx.request_state != "round 2":
        return InputRequiredResult(
            input_requests={"step2": ask("Step 2: What is your favorite color?", "color")}, request_state="round 2"
        ) if ctx.request_state == "round 1" else InputRequiredResult(
            input_requests={"step1": ask("Step 1: What is your name?", "name")}, request_state="round 1"
        )  # fmt: skip
    return "both answered"


def test_input_required_result_capabilities(ctx: Context[Any, Any]) -> str | InputRequiredResult:
    """Ask only what the client can answer."""
    able = ctx.client_capabilities
    requests: dict[str, InputRequest] = {}
    if able and able.sampling is not None:
        requests["greeting"] = sample("Generate a greeting", 50)
    if able and able.elicitation is not None:
        requests["user_name"] = ask("What is your name?", "name")
    return needs(ctx, **requests) or "answered"


def test_missing_capability(ctx: Context[Any, Any]) -> str:
    """Refuse a client that cannot sample."""
    if ctx.client_capabilities is None or ctx.client_capabilities.sampling is None:
        data = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(code=MISSING_REQUIRED_CLIENT_CAPABILITY, message="sampling is needed", data=data)
    return "able"


def greet(name: str) -> str:
    """Greet somebody, at once."""
    return f"Hello, {name}!"


class Sleeping(BaseModel):
    until: float
    failing: bool = False


async def slow_compute(seconds: float, label: str = "") -> Sleeping:
    """Be done after some seconds; a client without tasks gets the result at once."""
    return Sleeping(until=time.time() + seconds)


async def failing_job() -> Sleeping:
    """Fail after a second."""
    return Sleeping(until=time.time() + 1, failing=True)


class Sleepers:
    """Jobs that are done once their time has come."""

    tools = frozenset({"slow_compute", "failing_job"})

    def __init__(self) -> None:
        self.known: dict[str, tuple[float, Sleeping]] = {}
        self.cancelled: set[str] = set()

    async def begin(self, tool: str, result: dict[str, Any]) -> str | None:
        sleeping, task_id = Sleeping(**result), f"sleep-{secrets.token_hex(4)}"
        self.known[task_id] = time.time(), sleeping
        return task_id if sleeping.until > time.time() else None

    async def look(self, task_id: str) -> TaskState:
        if task_id not in self.known:
            raise FlashError("unknown_run", "nobody sleeps under this id", task_id=task_id)
        created, sleeping = self.known[task_id]
        job = functools.partial(TaskState, created=created, updated=time.time())
        if task_id in self.cancelled:
            return job("cancelled")
        if time.time() < sleeping.until:
            return job("working")
        words = (
            failed(FlashError("worker_failed", "it was to fail")) if sleeping.failing else completed({"slept": True})
        )
        return job("completed", result=words)

    async def cancel(self, task_id: str) -> None:
        self.cancelled.add(task_id)


TOOLS = [value for name, value in list(globals().items()) if name.startswith("test_")]


class Fixtures(Extension):
    """The tools above, as an extension of the product's server."""

    identifier = "org.example/conformance-fixtures"

    def tools(self) -> Sequence[ToolBinding]:
        plain = [ToolBinding(function, kwargs={"structured_output": False}) for function in [*TOOLS, greet]]
        return [*plain, ToolBinding(slow_compute), ToolBinding(failing_job)]


def add_prompts(server: FlashServer) -> None:
    @server.prompt()
    def test_simple_prompt() -> str:
        """Say a fixed sentence."""
        return "This is a simple prompt for testing."

    @server.prompt()
    def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
        """Repeat the arguments."""
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @server.prompt()
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
        """Embed a resource."""
        resource = embedded(resourceUri, "Embedded resource content for testing.")
        return [UserMessage(resource), UserMessage("Please process the embedded resource above.")]

    @server.prompt()
    def test_prompt_with_image() -> list[UserMessage]:
        """Show one red pixel."""
        return [UserMessage(test_image_content()), UserMessage("Please analyze the image above.")]

    @server.prompt()
    def test_input_required_result_prompt(ctx: Context[Any, Any]) -> Any:
        """Ask before it answers."""
        asked = needs(ctx, user_context=ask("What context should the prompt use?", "context"))
        return asked or f"Context: {answer_of(ctx, 'user_context').get('content')}"


def add_resources(server: FlashServer) -> None:
    @server.resource("test://static-text", mime_type="text/plain")
    def static_text() -> str:
        """A text."""
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png")
    def static_binary() -> bytes:
        """A picture."""
        return base64.b64decode(PNG)

    @server.resource("test://watched-resource", mime_type="text/plain")
    def watched() -> str:
        """A text to subscribe to."""
        return "Watched."

    @server.resource("test://template/{id}/data", mime_type="application/json")
    def template(id: str) -> str:
        """An object made of its address."""
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


def add_handlers(server: FlashServer) -> None:
    async def nothing(ctx: Any, params: Any) -> EmptyResult:
        return EmptyResult()

    @server.completion()
    async def complete(ref: Any, argument: Any, context: Any) -> Completion:
        words = [word for word in ("paris", "park", "party") if word.startswith(argument.value)]
        return Completion(values=words, total=len(words), has_more=False)

    low = server._lowlevel_server
    low.add_request_handler("logging/setLevel", SetLevelRequestParams, nothing)
    low.add_request_handler("resources/subscribe", SubscribeRequestParams, nothing)
    low.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, nothing)


class Events(EventStore):
    """Remembers what was sent, for clients that come back."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        self.sent.append((stream_id, message))
        return str(len(self.sent))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        stream_id, _ = self.sent[int(last_event_id) - 1]
        for number, (stream, message) in enumerate(self.sent[int(last_event_id) :], int(last_event_id) + 1):
            if stream == stream_id and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream_id


def fixture_server() -> FlashServer:
    server = build_server(Fixtures(), jobs=[Sleepers()])
    add_prompts(server)
    add_resources(server)
    add_handlers(server)
    return server


if __name__ == "__main__":
    fixture_server().run("streamable-http", port=int(sys.argv[1]), event_store=Events(), retry_interval=100)
