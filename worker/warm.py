"""A worker that has imported its packages and waits for its attempt.

    python -P -m worker.warm, with a socket as its standard input

Imports are half of the work between `train` and the first rollout. The supervisor keeps one such
process while the machine has nothing else to do (flash_mcp/supervisor/launch/warm.py), and gives it
one attempt, whose worker it then is. Until then it holds nothing of any run. It ends when the other
end of the socket is closed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

from flash_mcp.protocol.records import Json
from worker import main as attempt
from worker.process import prepare_process, quick_imports, usage

MODULES = (
    "torch._dynamo",
    "trl.generation.vllm_generation",
    "vllm.lora.layers",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "worker.evaluate",
    "worker.train",
    "worker.training.grpo",
)
"""What attempts need, also what torch, vLLM and TRL import when they are first used."""


def import_all() -> None:
    prepare_process()
    with quick_imports():
        for module in MODULES:
            import_module(module)


def main() -> int:
    with socket.socket(fileno=os.dup(0)) as link:
        with suppress(Exception):  # the attempt meets it again, and reports it
            import_all()
        link.sendall(b"\n")  # ready
        line, logs, *_ = socket.recv_fds(link, 1 << 16, 1)
        while not line.endswith(b"\n"):
            part = link.recv(1 << 16)
            if not part:  # nobody needs this process any more
                return 0
            line += part
    order: Json = json.loads(line)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate([null, *logs, *logs]):
        os.dup2(descriptor, number)
    for descriptor in [null, *logs]:
        os.close(descriptor)
    if code := subprocess.run(order["register"], check=False).returncode:
        return code
    os.environ |= order["variables"]
    sys.orig_argv = order["command"]
    sys.argv = sys.orig_argv[sys.orig_argv.index(attempt.__name__) :]
    usage()  # what it used until now is none of the run's
    return attempt.main()


if __name__ == "__main__":
    attempt.leave(main())
