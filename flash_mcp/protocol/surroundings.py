"""The variables by which a process reaches model hubs, package indexes, proxies and trackers.

A supervisor serves every client of a state directory, but has the environment of the one that
started it. So a run uses the variables of the client that created it: its lineage names that
client, and the values go to the supervisor as secrets do, through memory alone."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Mapping

CLIENT = secrets.token_hex(8)
"""This process, as the lineage of the runs that it creates names it."""
IN_USE = threading.Event()
"""Set once this process has created a run."""
WHOSE = "FLASH_VARIABLES_OF"
"""In an attempt: whose variables it has."""
OF_CLIENT = "the client that started the run"
NAMES = re.compile(
    r"(HF_|UV_(?!RUN_|PUBLISH_)|PIP_|WANDB_|MLFLOW_)\w+|HUGGING_FACE_HUB_TOKEN|SSL_CERT_(FILE|DIR)"
    r"|(REQUESTS|CURL)_CA_BUNDLE|(HTTP|HTTPS|ALL|NO)_PROXY|(http|https|all|no)_proxy"
)
SECRET = re.compile(r"\w*(TOKEN|KEY|PASSWORD|SECRET|USERNAME|HEADERS)")


def client() -> str:
    """This process, from now on the creator of a run."""
    IN_USE.set()
    return CLIENT


def of(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if NAMES.fullmatch(name)}


def replaced(variables: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """`variables` with `ours` in place of their own; what `ours` lacks is not set."""
    own = of(variables)
    return {name: value for name, value in variables.items() if name not in own} | dict(ours)


def is_secret(name: str, value: str) -> bool:
    """Whether it may hold a password: its name says so, or its address has a user or a query."""
    return SECRET.fullmatch(name) is not None or "@" in value or "?" in value


def of_whom() -> str:
    """Words for an error in an attempt: whose variables it has."""
    whose = os.environ.get(WHOSE)
    if whose:
        return f" of {whose}"
    return ""


def said(*names: str) -> str:
    """Words for an error: which of these variables this process used, and who had set them."""
    used: list[str] = []
    for name in names:
        if value := os.environ.get(name):
            used.append(name if is_secret(name, value) else f"{name}={value}")
    if used:
        return f", with {' and '.join(used)}{of_whom()}"
    whose = os.environ.get(WHOSE)
    if whose:
        return f"; {whose} sets no {' or '.join(names)}"
    return ""
