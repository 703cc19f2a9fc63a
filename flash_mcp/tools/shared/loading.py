"""Load an environment in a child process, for the tools that do so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from anyio.to_thread import run_sync
from pydantic import Field

from environments import faults
from environments.checks.splits import Overlap
from environments.faults import remedy
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.same_task import TaskTexts, task_of
from flash_mcp.judgement.curation import HeldBack
from flash_mcp.judgement.health import contaminated
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.packages import how_to_install, missing_packages
from flash_mcp.protocol.records import EnvironmentVersion
from flash_mcp.protocol.spec import LOCAL_TARGET
from flash_mcp.state.owners import caller
from flash_mcp.state.store import Store
from flash_mcp.state.targets import find_target
from flash_mcp.state.versions import keep_generated
from flash_mcp.supervisor.secrets import variables
from flash_mcp.tools.shared.tool_base import report

LOAD_TIMEOUT_S = 20.0
OPENING_TIMEOUT_S = 15.0
"""Time that MAX_OPENED eval tasks have to show their prompts."""
MAX_OPENED = 1000
INSTALL_TIMEOUT_S = 15.0
"""Time that a call waits for an environment's packages. The installation continues afterwards."""
FIXES = {
    "not_ready": "call again in half a minute; the installation continues and happens only once",
    "requirements_failed": "correct requirements.txt: every name and version has to exist, and to "
    "fit the others and this Python",
    **faults.FIXES,
}

Secrets = Annotated[
    list[str] | None,
    Field(
        max_length=64,
        description="Server variables that the environment may read. Values are never stored.",
    ),
]
Arguments = Annotated[
    dict[str, Any] | None, Field(description="Keyword arguments of load_environment.")
]
RunName = Annotated[
    str | None, Field(max_length=60, description="Your name for the run, new or found.")
]
RunNote = Annotated[str | None, Field(max_length=500, description="Your note on it.")]


def check_target(store: Store, target: str, *, slurm: bool = False) -> None:
    """FlashError(unknown_target | targets_invalid | engine_missing) if no run can go there."""
    engine = "local"
    if target == LOCAL_TARGET:
        check_machine()
    else:
        engine = find_target(store.base, target).engine
    if slurm and engine != "slurm":
        what = f"slurm has arguments of sbatch, and {target} is no target of Slurm"
        raise FlashError("invalid_argument", what, fix="leave it out, or name another target")


def check_machine(otherwise: str = "") -> None:
    """FlashError(engine_missing) if packages are missing. `otherwise`: what to do without them."""
    if missing := missing_packages():
        fix = f"{how_to_install(missing)} where this server runs, and call again{otherwise}"
        raise FlashError("engine_missing", f"not installed here: {', '.join(missing)}", fix=fix)


def secret_values(names: Sequence[str] | None, env_files: Sequence[str] = ()) -> dict[str, str]:
    """{name: value} from the server's environment or `.env` files. FlashError(invalid_argument)
    names those that neither has, or that the caller's token may not use.
    """
    values = variables(env_files)
    granted = set(values)
    fix = "set them in the server's environment or in a .env file beside train's config file, or "
    fix += "leave them out of secrets"
    allowed = caller().secrets
    if allowed is not None:
        granted &= allowed
        where = "name them in `flash-mcp token create --secret`"
        if caller().is_local:
            where = "name them in settings.toml of FLASH_HOME: secrets of [server]"
        fix = f"set them in the server's environment and {where}, or leave them out of secrets"
    absent = [name for name in names or () if name not in granted]
    if absent:
        what = f"secrets that the server does not have: {', '.join(absent)}"
        raise FlashError("invalid_argument", what, fix=fix)
    return {name: values[name] for name in names or ()}


def check_logins(names: Iterable[str]) -> None:
    """FlashError(invalid_argument) for logins of the server that the caller's token may not use."""
    if caller().secrets is not None:
        secret_values(list(names))


@asynccontextmanager
async def hosted(
    folder: Path, name: str, *, fix: str, **options: Any
) -> AsyncGenerator[EnvironmentHost]:
    """A folder's environment in a child process that is started with these options. A fault of its
    code becomes a FlashError.
    """
    try:
        async with await EnvironmentHost.start(
            folder, install_timeout_s=INSTALL_TIMEOUT_S, on_progress=report, **options
        ) as host:
            yield host
    except EnvironmentFault as fault:
        raise as_flash_error(fault, name, fix) from fault


@asynccontextmanager
async def loaded(
    environment: EnvironmentVersion,
    *,
    args: Mapping[str, Any] | None,
    secrets: Sequence[str] | None,
    env_files: Sequence[str] = (),
    timeout_s: float = LOAD_TIMEOUT_S,
    fix: str,
) -> AsyncGenerator[EnvironmentHost]:
    """A published environment; `secrets` are names, `timeout_s` bounds each call. Tasks that it
    generates are kept with the version: a run that starts later has the same.
    """
    path = Path(environment.path)
    async with hosted(
        path,
        environment.reference,
        known_as=environment.identity,
        args=args,
        secrets=secret_values(secrets, env_files),
        timeout_s=timeout_s,
        start_timeout_s=LOAD_TIMEOUT_S,
        fix=fix,
    ) as host:
        await run_sync(keep_generated, path, await host.generated())
        yield host


def contamination_note(shared: Overlap) -> str | None:
    """A warning for splits that share tasks; None if they share none."""
    if not shared.shared:
        return None
    flag = contaminated(shared.shared, shared.eval_tasks, str(shared))
    return f"CONTAMINATED: {flag.evidence}"


def as_flash_error(fault: EnvironmentFault, environment: str, fix: str) -> FlashError:
    """A fault of environment code as a tool's error, with the end of its traceback."""
    fix = remedy(fault) or FIXES.get(fault.code, fix)
    return FlashError.of_fault(fault, fix=fix, environment=environment)


async def read_held_out(host: EnvironmentHost) -> HeldBack:
    """Ask a loaded environment. Raises EnvironmentFault if it cannot list its tasks. Prompts are
    those of the tasks that open in time: environments may be slow.
    """
    train = await host.tasks("train")
    held_out = await host.tasks("eval")
    counter = Counter(question for _, question in held_out)
    return HeldBack(
        ids=frozenset(task_id for task_id, _ in held_out),
        questions=frozenset(question for question, times in counter.items() if times == 1),
        prompts=await read_prompts(host, "eval"),
        train_questions=dict(train),
        total=len(held_out),
    )


async def read_prompts(host: EnvironmentHost, split: str) -> list[TaskTexts]:
    """Those of the tasks of a split that open in time."""
    prompts: list[TaskTexts] = []

    async def look(index: int) -> None:
        with suppress(EnvironmentFault):  # a task that cannot be opened cannot be trained on either
            opening = await host.open(split, index)
            prompts.append(task_of(opening.messages))
            await host.close(opening.episode)

    with suppress(TimeoutError):
        async with asyncio.timeout(OPENING_TIMEOUT_S), asyncio.TaskGroup() as group:
            for index in range(min(host.splits[split], MAX_OPENED)):
                group.create_task(look(index))
    return prompts
