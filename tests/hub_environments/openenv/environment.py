"""OpenEnv: the echo environment of its template, a game that a rubric scores, and tools over MCP.
Each in this process, or behind OpenEnv's own server, as "echo over HTTP"."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path

import games
from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import CallToolAction

from environments.adapters.gym import GymEnvironment
from environments.base import TaskExample

TEMPLATE_WORDS = {
    "__ENV_NAME__": "echo",
    "__ENV_CLASS_NAME__": "Echo",
    "__ENV_TITLE_NAME__": "Echo",
    "max_concurrent_envs=1": "max_concurrent_envs=16",
}
NAMES = ["echo", "guess", "tools"]


def load_environment(name=""):
    game, _, served = name.partition(" over ")
    if not name:
        environment = GymEnvironment(lambda seed: None, max_turns=6)
        names = [*NAMES, *(f"{each} over HTTP" for each in NAMES)]
        environment.dataset = [TaskExample({}, each, id=each) for each in names]
        return environment
    made, client, server, to_action = parts(game)
    if served:
        url = f"http://127.0.0.1:{serve(server)}"
        return GymEnvironment(lambda seed: client(base_url=url), max_turns=6, train_size=8, to_action=to_action)
    return GymEnvironment(lambda seed: made(), max_turns=6, train_size=8, to_action=to_action)


def parts(game):
    """The environment's class, its client, its server, and the action that a text means."""
    if game == "echo":
        write_echo()
        action = import_module("echo.models").EchoAction
        return (
            import_module("echo.server.echo_environment").EchoEnvironment,
            import_module("echo.client").EchoEnv,
            "echo.server.app:app",
            lambda text: action(message=text),
        )
    if game == "guess":
        return games.Guess, GenericEnvClient, "servers:guess", to_number
    return games.Tools, GenericEnvClient, "servers:tools", to_tool_call


def to_number(text):
    return games.Number(number=sum(map(ord, text)) % 10)


def to_tool_call(text):
    return CallToolAction(tool_name="draw", arguments={"text": text})


def write_echo():
    """The template as `openenv init` writes it, but without a lock file."""
    target = Path(tempfile.mkdtemp(), "echo")
    with as_file(files("openenv.cli") / "templates" / "openenv_env") as template:
        shutil.copytree(template, target, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [path for path in target.rglob("*") if path.is_file()]:
        text, place = path.read_text(), str(path.relative_to(target))
        for word, meaning in TEMPLATE_WORDS.items():
            text, place = text.replace(word, meaning), place.replace(word, meaning)
        path.unlink()
        (target / place).write_text(text)
    sys.path.insert(0, str(target.parent))


def serve(app):
    """Start OpenEnv's server of an environment. Returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    while server.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return port
        time.sleep(0.1)
    raise RuntimeError(f"the server ended with {server.returncode}")
