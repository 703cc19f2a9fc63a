"""The variables by which a process reaches model hubs, package indexes, proxies and trackers.

A supervisor serves every client of a state directory, but has the environment of the one that
started it. So a run uses the variables of the client that created it: its lineage names that
client, and the values go to the supervisor as secrets do, through memory alone."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import psutil

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import LOOPBACK
from flash_mcp.protocol.run_files import Json

CLIENT = f"{os.getpid()}-{secrets.token_hex(8)}"
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


def has_ended(client: str) -> bool:
    """Whether no such process is here. It may be in a container that shares the directory."""
    pid = client.partition("-")[0]
    return not pid.isdigit() or not psutil.pid_exists(int(pid))


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


# -- the operator's logins at services, and what may use them --------------------------------------
# A caller over HTTP uses one only if their token was created with `--secret VARIABLE`, or, for the
# machine's own user, if settings.toml names it.

HUB = "HF_TOKEN"
TRACKERS = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI", "trackio": HUB}
"""The variable that stands for the login of each tracker that sends metrics elsewhere."""
NO_HUB_LOGIN = "FLASH_NO_HUB_LOGIN"
"""Set where the hub may serve only what it serves to anybody."""
_LOGINS = (HUB, "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def environment_for(
    granted: Collection[str] | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The variables for a process that acts for a caller with these grants; None for all."""
    if granted is None or HUB in granted:
        return dict(variables)
    kept = {name: value for name, value in variables.items() if name not in _LOGINS}
    # The second one keeps huggingface_hub from the login that it has stored in a file.
    return kept | {NO_HUB_LOGIN: "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def restrict(job: Json) -> None:
    """Take from this process's variables what the job's caller was not granted. Called before
    huggingface_hub is imported, which reads them then.
    """
    variables = environment_for(job.get("lineage", {}).get("granted"), os.environ)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


# -- the proxies that the environment names, as httpx reads them -----------------------------------

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
BRACKETED = re.compile(r"\[([^\]]*)\]")


def use_proxies() -> None:
    """Prepare the variables of this process for what fetches by httpx. FlashError(proxy_invalid) if
    one is no address of a proxy, which httpx says with errors of no common class.
    """
    import httpx  # noqa: PLC0415  a worker may need neither

    for name in (form for proxy in PROXIES for form in (proxy, proxy.lower())):
        if address := os.environ.get(name, ""):
            try:
                httpx.Proxy(address if "://" in address else f"http://{address}")
            except (ValueError, httpx.InvalidURL) as error:
                # Without its value, which may hold a password.
                what = f"the variable {name}{of_whom()} is no address of a proxy that can be used"
                fix = f"set {name} to http://HOST:PORT or socks5://HOST:PORT, or unset it"
                raise FlashError(
                    "proxy_invalid", what, fix=f"{fix}; then restart the client"
                ) from error
    for name in ("NO_PROXY", "no_proxy"):
        if name in os.environ:  # httpx fails at [::1] and takes ::1 for the same
            os.environ[name] = BRACKETED.sub(r"\1", os.environ[name])


def by_way_of() -> str:
    """Words for an error of what fetches by httpx: the variable whose proxy it used, if any."""
    for name in PROXIES:
        if os.environ.get(name) or os.environ.get(name.lower()):
            return f", by way of the proxy in {name}{of_whom()}"
    return ""


def is_direct(url: str) -> bool:
    """Whether the address is on this machine, where no proxy leads."""
    return urlsplit(url).hostname in LOOPBACK
