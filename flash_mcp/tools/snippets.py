"""Calls of a deployment that work as they stand: the endpoint, its key and the prompt of training,
answered as evaluations are.

The key is read from its file when a call runs: a result of a tool is kept by clients.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from flash_mcp.protocol.records import Deployment, Json, Rollout
from flash_mcp.state.schema import RolloutOrder
from flash_mcp.state.store import Store
from flash_mcp.supervisor.server import Server
from flash_mcp.tools.rollouts import shared_beginning

PROMPT_CHARACTERS = 1500
"""A longer prompt is cut down to its system message and a question, or left out."""
QUESTION = "hello"
QUESTION_CHARACTERS = 300
OPENING_TASKS = 8
"""Tasks whose prompts are compared: what all begin with is the run's opening."""
MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
READ_KEY = "import json, sys; print(json.load(open(sys.argv[1]))['api_key'])"


@dataclass(frozen=True)
class Snippets:
    curl: str
    python: str
    has_prompt: bool
    """Whether the messages are those of training."""


def calls_of(store: Store, row: Deployment, server: Server) -> Snippets:
    prompt = _prompt(store, row)
    messages = prompt or [{"role": "user", "content": QUESTION}]
    extra = {"chat_template_kwargs": {"enable_thinking": bool(row.thinking)}}
    tools = tools_of(store, row)
    options = {"tools": tools} if tools else {}
    # The longest answer that the run's evaluations allow.
    sampling: Json = {"temperature": 0, "max_tokens": store.run(row.run_id).spec.max_tokens}
    body = {"model": row.id, "messages": messages, **sampling, **options, **extra}
    trusting, verify = "", ""
    if server.certificate:
        place = server.certificate_file
        trusting = f"--cacert {shlex.quote(place)} "
        context = f"ssl.create_default_context(cafile={place!r})"
        verify = f", verify={context}"
    read_key = f"python3 -c {shlex.quote(READ_KEY)} {shlex.quote(server.file)}"
    curl = (
        f"curl -s --noproxy '*' {trusting}"
        f'{server.url}/chat/completions -H "Authorization: Bearer $({read_key})" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
    python = "\n".join(
        [
            "import json",
            *(["import ssl"] if verify else []),
            "import httpx",
            "from openai import OpenAI",
            f"key = json.load(open({server.file!r}))['api_key']",
            f"client = OpenAI(base_url={server.url!r}, api_key=key,",
            f"    http_client=httpx.Client(trust_env=False{verify}))",
            "answer = client.chat.completions.create(",
            f"    model={row.id!r},",
            f"    messages={messages!r},",
            *(f"    {name}={value!r}," for name, value in sampling.items()),
            *([f"    tools={tools!r},"] if tools else []),
            f"    extra_body={extra!r},",
            ")",
            f"print(answer.choices[0].message{'' if tools else '.content'})",
        ]
    )
    return Snippets(curl, python, bool(prompt))


def _prompt(store: Store, row: Deployment) -> list[Json] | None:
    """The messages of a task before the model's first turn, as the run saw them. Of a long prompt
    only its system message, with a question of our own; None if there is none that is short.
    """
    prompts = _prompts(store, row, 1)
    if not prompts:
        return None
    messages = prompts[0]
    system = [message for message in messages if message["role"] == "system"]
    shorter = [*system, {"role": "user", "content": QUESTION}]
    for candidate in (messages, shorter if system else []):
        is_plain = all(isinstance(item.get("content"), str) for item in candidate)
        if candidate and is_plain and len(json.dumps(candidate)) <= PROMPT_CHARACTERS:
            return candidate
    return None


def opening_of(store: Store, row: Deployment) -> list[Json]:
    """The messages with which every task of the run begins, such as a system prompt and worked
    examples; without a task's own question.
    """
    prompts = _prompts(store, row, OPENING_TASKS, "random")
    if not prompts:
        return []
    shortest = min(map(len, prompts))
    return shared_beginning([prompt[: shortest - 1] for prompt in prompts])


def question_of(store: Store, row: Deployment) -> str | None:
    prompts = _prompts(store, row, 1)
    content = prompts[0][-1].get("content") if prompts else None
    is_short = isinstance(content, str) and len(content) <= QUESTION_CHARACTERS
    if is_short:
        return content
    return None


def _prompts(
    store: Store, row: Deployment, count: int, order: RolloutOrder = "index"
) -> list[list[Json]]:
    """The messages before the model's first turn of up to `count` rollouts."""
    prompts: list[list[Json]] = []
    for rollout in _rollouts(store, row, count, order):
        messages: list[Json] = []
        for item in rollout.messages[: rollout.prompt_messages]:
            messages.append({name: item[name] for name in MESSAGE_FIELDS if name in item})
        if messages:
            prompts.append(messages)
    return prompts


def tools_of(store: Store, row: Deployment) -> list[Json]:
    rows = _rollouts(store, row, 1, "index")
    if rows:
        return rows[0].tools
    return []


def _rollouts(store: Store, row: Deployment, count: int, order: RolloutOrder) -> list[Rollout]:
    """Of the newest step that has any, of the held-out tasks if they were evaluated."""
    for split in ("eval", "train"):
        if steps := store.rollout_steps(row.run_id, split):
            return store.rollouts(row.run_id, split, steps[-1], order, limit=count)
    return []
