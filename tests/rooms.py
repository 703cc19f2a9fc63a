"""What lies behind doors: the files of each room, and what they bring."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from environments import doors
from tests.places import ROOT

LAUNCH = "flash_mcp/supervisor/launch"
PRODUCT = ("flash_mcp", "worker", "environments")


@dataclass(frozen=True)
class Room:
    paths: tuple[str, ...]
    brings: str

    @property
    def points(self) -> list[tuple[str, str]]:
        """The group and name of the entry points that lead into it."""
        results: list[tuple[str, str]] = []
        for group, points in doors.OURS.items():
            for name, value in points.items():
                if f"{value.partition(':')[0].replace('.', '/')}.py".startswith(self.paths):
                    results.append((group, name))
        return results

    @property
    def lines(self) -> int:
        return lines_in(map(Path, self.paths))


ADAPTERS = ("freesolo", "gym", "inspect_tasks", "mcp", "trl", "verifiers")
ROOMS = {
    "adapters": Room(
        tuple(f"environments/adapters/{name}.py" for name in ADAPTERS),
        "environments of other contracts, and tools of MCP servers",
    ),
    "certificate": Room(
        ("flash_mcp/extensions/certificate/",),
        "`certify`: what is known of an environment, signed; its page, its line in `catalog`",
    ),
    "engines": Room(tuple(f"{LAUNCH}/{name}.py" for name in ("ray", "sky", "slurm")), "engines of targets"),
    "export": Room(
        ("flash_mcp/extensions/export/", "worker/extensions/export/"),
        "checkpoints as files for others: the command, `checkpoints(export=...)`, formats",
    ),
    "gateway": Room(
        ("flash_mcp/extensions/gateway/", "worker/extensions/gateway.py"),
        "rollouts that programs outside the sandbox play: command, routes, the worker's side",
    ),
    "hunt": Room(("flash_mcp/extensions/hunt/",), "the hunt of `env_test`: a search for cheap answers that pay"),
    "pages": Room(
        ("flash_mcp/extensions/pages/",), "the report and the live pages: commands, routes, templates, charts as SVG"
    ),
    "recording": Room(
        ("flash_mcp/extensions/recording/", "worker/extensions/recording.py"),
        "chats of deployments, kept: the model server's side, the command `recordings`",
    ),
    "terminal": Room(
        ("environments/agents/harbor.py", "environments/agents/terminal.py", "environments/examples/terminal/"),
        "agents in a terminal, on tasks in Harbor's form; a template of `env_setup`",
    ),
    "tournament": Room(("flash_mcp/extensions/tournament/",), "the tool `tournament`, its rows, rounds and statistics"),
}


def lines_in(paths: Iterable[Path]) -> int:
    """Of Python, blank ones included."""
    total = 0
    for path in (ROOT / path for path in paths):
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            total += len(file.read_text().splitlines())
    return total


def rows() -> list[tuple[str, ...]]:
    """The table of docs/architecture.md."""
    results: list[tuple[str, ...]] = []
    for name, room in ROOMS.items():
        paths = ", ".join(f"`{path}`" for path in room.paths)
        if len(folders := {Path(path).parent for path in room.paths}) < len(room.paths) - 1:
            paths = f"`{folders.pop()}/`: {', '.join(Path(path).stem for path in room.paths)}"
        results.append((name, paths, room.brings, f"{round(room.lines, -2)}"))
    core = lines_in(map(Path, PRODUCT)) - sum(room.lines for room in ROOMS.values())
    # A thousand lines: a hundred come and go too often for a page that tests compare.
    return [*results, ("the core", "all else", "", f"{round(core, -3)}")]
