"""What tools share that load an environment in a child process or hand it to a worker."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from environments.checks.splits import Overlap
from environments.process.faults import remedy
from environments.process.host import EnvironmentFault, EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion
from flash_mcp.state.owners import caller
from flash_mcp.tools.shared.frame import report

EVIDENCE_CHARACTERS = 900
INSTALL_TIMEOUT_S = 15.0
"""How long a call waits for an environment's packages; the installation goes on for the next call.
"""
FIXES = {
    "not_ready": "call again in half a minute; the installation goes on meanwhile, and is made once",
    "requirements_failed": "mend requirements.txt: names and versions that exist, and fit together and this Python",
}

Secrets = Annotated[
    list[str] | None,
    Field(
        max_length=64,
        description="Names of environment variables of the server that the environment's process may see. Values are "
        "never stored.",
    ),
]
Arguments = Annotated[
    dict[str, Any] | None, Field(description="Keyword arguments of load_environment.")
]


def check_machine() -> None:
    """FlashError(engine_missing) where the packages that sample and train are not installed."""
    missing = [
        name for name in ("torch", "vllm", "trl", "peft") if importlib.util.find_spec(name) is None
    ]
    if missing:
        fix = "install flash-mcp[cpu] or, with an NVIDIA GPU, flash-mcp[gpu] beside this server, and call again"
        raise FlashError("engine_missing", f"not installed here: {', '.join(missing)}", fix=fix)


def secret_values(names: Sequence[str] | None) -> dict[str, str]:
    """{name: value} from the server's environment; FlashError(invalid_argument) naming those that
    it lacks.

    One that the caller's token was not given is lacking.
    """
    granted = os.environ.keys() if caller().is_local else caller().secrets & os.environ.keys()
    absent = [name for name in names or () if name not in granted]
    if absent:
        fix = "set them in the environment of the server (and name them in the token), or leave them out of secrets"
        raise FlashError(
            "invalid_argument",
            f"secrets that the server does not have: {', '.join(absent)}",
            fix=fix,
        )
    return {name: os.environ[name] for name in names or ()}


@asynccontextmanager
async def hosted(
    folder: Path,
    name: str,
    *,
    args: Mapping[str, Any] | None,
    secrets: Mapping[str, str],
    call_timeout_s: float,
    start_timeout_s: float,
    fix: str,
) -> AsyncGenerator[EnvironmentHost]:
    """A folder's environment in a child process; a fault of its code is a FlashError that ends with
    `fix`.
    """
    try:
        async with await EnvironmentHost.start(
            folder,
            args=args,
            secrets=secrets,
            timeout_s=call_timeout_s,
            start_timeout_s=start_timeout_s,
            install_timeout_s=INSTALL_TIMEOUT_S,
            on_progress=report,
        ) as host:
            yield host
    except EnvironmentFault as fault:
        raise as_flash_error(fault, name, fix) from fault


def loaded(
    environment: EnvironmentVersion, *, secrets: Sequence[str] | None, **options: Any
) -> AbstractAsyncContextManager[EnvironmentHost]:
    """A published environment, `hosted` with these options; `secrets` are names."""
    name = f"{environment.name}@{environment.digest}"
    return hosted(Path(environment.path), name, secrets=secret_values(secrets), **options)


def contamination_note(shared: Overlap) -> str | None:
    """What to tell the author of splits that share tasks; None where they share none."""
    if not shared.shared:
        return None
    return (
        f"CONTAMINATED: {shared.shared} of {shared.eval_tasks} eval tasks are train tasks too ({shared}): an "
        "evaluation measures memory"
    )


def as_flash_error(fault: EnvironmentFault, environment: str, fix: str) -> FlashError:
    """A fault of environment code as the error of a tool, with the end of its traceback as
    evidence.
    """
    fix = remedy(fault) or FIXES.get(fault.code, fix)
    evidence = (
        f"\n{fault.traceback.strip()[-EVIDENCE_CHARACTERS:]}\n" if fault.traceback.strip() else ""
    )
    return FlashError(fault.code, f"{fault.what}{evidence}", environment=environment, fix=fix)
