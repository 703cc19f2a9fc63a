"""A small agent that works in a terminal, and the program of environments/agents/harbor.py.

    python terminal.py INSTRUCTION_FILE FOLDER

It asks a model for commands and runs them, until the model answers without one. It imports nothing
of ours and knows nothing of training: the model is where OPENAI_BASE_URL says. A conversation that
has become long is compacted: the model goes on in a new one that holds the commands so far and the
end of what the last one printed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SYSTEM = (
    "You work in a terminal. Run commands with the tool bash until the task is done. Then answer "
    "with a short sentence."
)
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
WHAT = "Run a command by bash in the task's folder; what it printed and its exit code."
TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": WHAT, "parameters": COMMAND}}
]
TURNS = 20
COMMAND_S = 60
SHOWN_CHARACTERS = 2000
MAX_BYTES = 8 << 20
COMPACT_CHARACTERS = 12_000  # A conversation with more is compacted
ROOTS = ("app", "tests", "logs", "solution", "tmp")
"""Folders of a task's image that a task without a container has in a folder of its own."""
SECRET = re.compile("OPENAI_|ANTHROPIC_|FLASH_")

Shell = Callable[[str], str]  # A command -> what it printed and how it ended
Ask = Callable[[list[Json]], Json]
"""A conversation -> the model's message. ModelRefused if the model may be asked no more."""


class ModelRefused(Exception):
    """The model's API refused a request; `too_long` if a shorter one may be made."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.too_long = "context_length_exceeded" in text


def solve(instruction: str, shell: Shell, ask: Ask, turns: int = TURNS) -> None:
    """Let the model work until it asks for no command, or may ask no more."""
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    messages, commands = list(opening), list[str]()
    for _ in range(turns):
        try:
            answer = ask(messages)
        except ModelRefused as refused:
            if not refused.too_long or messages == opening:
                return
            messages = compacted(opening, commands, messages[-1]["content"])
            continue
        calls: list[Json] = answer.get("tool_calls") or []
        if not calls:
            return
        messages.append(answer)
        for call in calls:
            try:
                command = json.loads(call["function"]["arguments"])["command"]
            except (ValueError, KeyError, TypeError):
                printed = 'error: call bash with {"command": TEXT}'
            else:
                commands.append(str(command))
                printed = shell(str(command))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": printed})
        if sum(len(str(message.get("content") or "")) for message in messages) > COMPACT_CHARACTERS:
            messages = compacted(opening, commands, messages[-1]["content"])


def compacted(opening: list[Json], commands: list[str], printed: str) -> list[Json]:
    ran = "\n".join(f"$ {command}" for command in commands)[-SHOWN_CHARACTERS:]
    text = f"You have run these commands:\n{ran}\nThe last one printed:\n{printed}\nGo on."
    return [*opening, {"role": "user", "content": text}]


def asking(messages: list[Json]) -> Json:
    """The model's next message, from where the variables say that it is."""
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": TOOLS}
    url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        raise ModelRefused(error.read().decode(errors="replace")) from None


def run(command: list[str], folder: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a program prints, at most SHOWN_CHARACTERS of it, with its exit code."""
    # A file, as a program in the background may hold a pipe open.
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=folder, env=env,
        )  # fmt: skip
        try:
            ended = f"exit code {process.wait(COMMAND_S)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"killed after {COMMAND_S} s"
        printed.seek(0)
        text = printed.read(MAX_BYTES).decode(errors="replace")
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return f"{text}[{ended}]"


# -- a task without a container --------------------------------------------------------------------


def inward(text: str, root: Path) -> str:
    """A text in which the folders of a task's image are those below `root`."""
    names = "|".join(ROOTS)
    return re.sub(rf"(?<![\w./-])/(?=(?:{names})(?![\w-]))", lambda _: f"{root}/", text)


def shell_in(root: Path, workdir: str) -> Shell:
    """Commands that see the folders of a task's image below `root`."""
    kept = {name: value for name, value in os.environ.items() if not SECRET.match(name)}

    def shell(command: str) -> str:
        command = inward(command, root)
        printed = run(["bash", "-c", command], f"{root}{workdir}", kept)
        return printed.replace(str(root), "")

    return shell


if __name__ == "__main__":
    instruction, workdir = sys.argv[1:]
    solve(Path(instruction).read_text(), shell_in(Path.cwd(), workdir), asking)
