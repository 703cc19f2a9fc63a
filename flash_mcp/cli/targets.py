"""`flash-mcp target`: places beyond this machine where runs may train, written and proved."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from flash_mcp.cli.output import answer
from flash_mcp.cli.parsing import (
    JSON,
    Arguments,
    Command,
    Group,
    flag,
    option,
    repeated,
    toml_value,
)
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.state.targets import (
    FILE,
    Cards,
    TargetSettings,
    find_target,
    new_target,
    note_cards,
    remove_target,
    targets,
    write_target,
)

if TYPE_CHECKING:
    from flash_mcp.protocol.run_files import ProbeFile


def add(arguments: Arguments) -> None:
    """Add a place beyond this machine where runs may train, and prove it with a job of a second.

    The job starts on a node, claims a folder of the storage, and reports its version of flash-mcp,
    its devices and missing packages. If it fails, nothing is added."""
    options = vars(arguments)
    fields = {name: options[name] for name in TargetSettings.model_fields if name in options}
    fields["options"] = shlex.split(" ".join(arguments.option))
    fields["env"] = dict(_pair("--env", text) for text in arguments.env)
    pairs = [_pair("--resource", text) for text in arguments.resource]
    fields["resources"] = {name: toml_value(text) for name, text in pairs}
    chosen = {name: value for name, value in fields.items() if value not in (None, [], {})}
    settings = new_target(home(), arguments.name, chosen)
    result = None if arguments.unproved else _prove(arguments.name, settings, arguments.wait_s)
    if result and _shows_cards(settings):
        settings = settings.model_copy(update={"cards": Cards(**result["cards"])})
    if result and not result.get("reaches_hub"):
        settings = settings.model_copy(update={"models": "server"})
    # Last: a target that could not run the job is not written.
    write_target(home(), arguments.name, settings)
    body = {"target": arguments.name, "file": str(home() / FILE), **(result or {})}
    answer(arguments, body)


def check(arguments: Arguments) -> None:
    """Prove a target with a job of a second, as `target add` does."""
    settings = find_target(home(), arguments.name)
    result = _prove(arguments.name, settings, arguments.wait_s)
    if _shows_cards(settings):
        note_cards(home(), arguments.name, Cards(**result["cards"]))
    answer(arguments, {"target": arguments.name, **result})


def _prove(name: str, settings: TargetSettings, wait_s: float) -> ProbeFile:
    # It loads the clients of all engines, for which no other command has to wait.
    from flash_mcp.supervisor.targets import probe  # noqa: PLC0415

    return probe(name, settings, wait_s)


def _shows_cards(settings: TargetSettings) -> bool:
    """Whether the probe says what the target's nodes have. An engine may choose a card for each
    run, and the probe needs none.
    """
    return settings.cards is None and not settings.launcher.chooses_cards(settings)


def list_targets(arguments: Arguments) -> None:
    """List the targets of targets.toml."""
    results: dict[str, Any] = {}
    lines: list[str] = []
    for name, item in targets(home()).items():
        results[name] = item.model_dump(exclude_defaults=True)
        lines.append(f"{name}  {item.engine}  {item.storage}")
    nothing = "no targets: `flash-mcp target add` makes one; runs train on this machine"
    answer(arguments, results, "\n".join(lines) or nothing)


def remove(arguments: Arguments) -> None:
    """Remove a target that has no active runs."""
    from flash_mcp.state.store import Store  # noqa: PLC0415  # only here

    if arguments.name in Store(home()).active_targets():
        what = f"runs of {arguments.name} are queued or under way"
        fix = "wait for them, or cancel them: `flash-mcp status` lists them"
        raise FlashError("invalid_argument", what, fix=fix)
    remove_target(home(), arguments.name)
    answer(arguments, {"removed": arguments.name}, f"removed {arguments.name}")


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        what = f"{option} takes NAME=VALUE, not {text!r}"
        raise FlashError("invalid_argument", what, fix=f"write it as {option} NAME=VALUE")
    return name, value


SETUPS = ("path", "image", "uv")
TARGET = option("name", "name of the target, as train's target", "NAME")
WAIT = option("--wait-s", "seconds for the job (default 120)", "S", type=float, default=120.0)
COMMANDS: dict[str, Command | Group] = {
    "target": Group(
        "Add, list, check and remove places beyond this machine where runs may train.",
        ("flash-mcp target add lab --engine slurm --storage s3://bucket/flash",),
        {
            "add": Command(
                add,
                (
                    "flash-mcp target add lab --engine slurm --storage /shared/flash "
                    "--python /opt/flash/bin/python --option=--gres=gpu:1",
                ),
                (
                    TARGET,
                    option("--engine", "slurm, ray, sky, or what a package brings", required=True),
                    option("--storage", "URL, or a folder that all nodes share", required=True),
                    option("--setup", "how nodes get flash-mcp: path, image, uv", choices=SETUPS),
                    option("--python", "interpreter on the nodes", "COMMAND"),
                    option("--home", "FLASH_HOME on the nodes (default: of each its own)", "DIR"),
                    option("--ssh", "host that has the engine's commands", "HOST"),
                    repeated("--option", "argument of sbatch, such as --gres=gpu:1", "ARGUMENT"),
                    option("--address", "URL of Ray's dashboard or SkyPilot's API server", "URL"),
                    option("--token-file", "file here with the token for this URL", "PATH"),
                    repeated("--resource", "what an attempt takes: GPU=1, infra=aws", "NAME=N"),
                    repeated("--env", "variable of the attempts", "NAME=VALUE"),
                    option("--env-file", "shell file on the nodes that sets others", "PATH"),
                    option("--slots", "GPUs of attempts at once (default 8)", "N", type=int),
                    option("--price-per-hour", "price of an attempt's hour", "P", type=float),
                    flag("--unproved", "add it without the job"),
                    WAIT,
                    JSON,
                ),
            ),
            "list": Command(list_targets, ("flash-mcp target list",), (JSON,)),
            "check": Command(check, ("flash-mcp target check lab",), (TARGET, WAIT, JSON)),
            "remove": Command(remove, ("flash-mcp target remove lab",), (TARGET, JSON)),
        },
    )
}
