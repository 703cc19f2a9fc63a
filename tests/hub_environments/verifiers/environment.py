"""verifiers 0.4: its own taskset of OpenEnv's environments with the one that OpenEnv's template
has, and a taskset of sums for one agent, for one with a shell, and for the best of two."""

import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import sums
import uvicorn
import verifiers.v1 as vf

from environments.adapters.gym import GymEnvironment
from environments.base import TaskExample

CHAT = {"harness": {"id": "null"}}
ECHO_PORT = 8000
"""The environment has a loopback interface of its own. A task's id depends on its address."""


def load_environment(name="", **config):
    if name:
        return MAKERS[name](**config)
    listed = GymEnvironment(lambda seed: None, max_turns=1)
    listed.dataset = [TaskExample({}, each, id=each) for each in MAKERS]
    return listed


def made(taskset, **config):
    return vf.load_environment(vf.resolve_env_config({"taskset": taskset, **config}))


def echo():
    serve_echo()
    url = f"http://127.0.0.1:{ECHO_PORT}"
    resets = [{"seed": seed} for seed in range(40)]
    taskset = {"id": "openenv", "base_url": url, "resets": resets}
    return made(taskset, player={**CHAT, "max_turns": 2})


def serve_echo():
    """OpenEnv's own server of the environment that `openenv init` writes."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "openenv.cli", "init", "echo", "--output-dir", str(folder)]
    subprocess.run(command, check=True)
    app = folder / "echo" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    sys.path.insert(0, str(folder))
    listener = socket.create_server(("127.0.0.1", ECHO_PORT))
    server = uvicorn.Server(uvicorn.Config("echo.server.app:app", log_level="warning"))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()


MAKERS = {
    "openenv echo": echo,
    "one agent": lambda: made({"id": "sums"}, agent=CHAT),
    "one agent with a shell": lambda: sums.SumTaskset(sums.SumConfig()),
    "best-of-n": lambda: made({"id": "sums"}, id="best-of-n", agent=CHAT, n=2),
}
