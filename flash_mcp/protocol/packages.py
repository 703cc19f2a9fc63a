"""The packages of a worker, which a server may lack."""

from __future__ import annotations

from importlib.util import find_spec

WORKER_PACKAGES = ("torch", "vllm", "trl", "peft")


def missing_packages() -> list[str]:
    return [name for name in WORKER_PACKAGES if find_spec(name) is None]
