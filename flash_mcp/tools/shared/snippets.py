"""Calls of a deployment that work as they stand: the endpoint, its key and the prompt of training.

The key is read from its file when a call runs: a result of a tool is kept by clients.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from flash_mcp.protocol.records import Deployment, Json, Rollout
from flash_mcp.state.store import Store
from flash_mcp.supervisor.model_servers import Server

PROMPT_CHARACTERS = 1500
"""A longer prompt is cut down to its system message and a question, or left out."""
QUESTION = "hello"
MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
READ_KEY = "import json, sys; print(json.load(open(sys.argv[1]))['api_key'])"


@dataclass(frozen=True)
class Snippets:
    curl: str
    python: str
    has_prompt: bool
    """Whether the messages are those of training."""


def snippets(store: Store, row: Deployment, server: Server) -> Snippets:
    prompt = _prompt(store, row)
    messages = prompt or [{"role": "user", "content": QUESTION}]
    extra = {"chat_template_kwargs": {"enable_thinking": bool(row.data.get("thinking"))}}
    tools = tools_of(store, row)
    options = {"tools": tools} if tools else {}
    body = {"model": row.id, "messages": messages, **options, **extra}
    trusting, client = "", ""
    if server.certificate:
        place = server.certificate_file
        trusting = f"--cacert {shlex.quote(place)} "
        context = f"ssl.create_default_context(cafile={place!r})"
        client = f", http_client=httpx.Client(verify={context})"
    read_key = f"python3 -c {shlex.quote(READ_KEY)} {shlex.quote(server.file)}"
    curl = (
        f'curl -s {trusting}{server.url}/chat/completions -H "Authorization: Bearer $({read_key})" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
    python = "\n".join(
        [
            "import json",
            *(["import ssl", "import httpx"] if client else []),
            "from openai import OpenAI",
            f"key = json.load(open({server.file!r}))['api_key']",
            f"client = OpenAI(base_url={server.url!r}, api_key=key{client})",
            "answer = client.chat.completions.create(",
            f"    model={row.id!r},",
            f"    messages={messages!r},",
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
    rollout = _newest_rollout(store, str(row.run_id))
    if rollout is None:
        return None
    first = rollout.messages[: rollout.prompt_messages]
    messages = [{name: item[name] for name in MESSAGE_FIELDS if name in item} for item in first]
    system = [message for message in messages if message["role"] == "system"]
    shorter = [*system, {"role": "user", "content": QUESTION}]
    for candidate in (messages, shorter if system else []):
        is_plain = all(isinstance(item.get("content"), str) for item in candidate)
        if candidate and is_plain and len(json.dumps(candidate)) <= PROMPT_CHARACTERS:
            return candidate
    return None


def tools_of(store: Store, row: Deployment) -> list[Json]:
    """OpenAI function schemas of what the model could call in training."""
    rollout = _newest_rollout(store, row.run_id) if row.run_id else None
    return rollout.tools if rollout else []


def _newest_rollout(store: Store, run_id: str) -> Rollout | None:
    for split in ("eval", "train"):
        if steps := store.rollout_steps(run_id, split):
            return store.rollouts(run_id, split, steps[-1], "index", limit=1)[0]
    return None
