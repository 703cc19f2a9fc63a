import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "vllm", "transformers", "trl", "peft", "datasets", "worker", "ray"}
PACKAGES = ("environments", "flash_mcp", "worker")
FLOORS = (
    ("environments.base", "environments.doors", "environments.faults", "environments.locks", "environments.settings",
        "environments.task_cache", "environments.untrusted_text"),
    ("environments.judge", "environments.tools"),
    ("environments.adapters", "environments.sandbox"),
    ("environments.agents",),
    ("environments.process",),
    ("environments.checks", "environments.examples"),
    ("flash_mcp.protocol",),
    ("flash_mcp.judgement",),
    ("flash_mcp.state",),
    ("flash_mcp.supervisor",),
    ("flash_mcp.tools.shared",),
    ("flash_mcp.tools.training",),
    ("flash_mcp.tools",),
    ("flash_mcp.server",),
    ("flash_mcp.client",),
    ("flash_mcp.cli",),
    ("flash_mcp.extensions",),
)  # fmt: skip
"""The rooms of docs/architecture.md, the lowest first. A room imports from itself and from the floors below.
Nothing imports an extension, then: it is found by an entry point."""


def loaded_by(module: str) -> set[str]:
    """What a fresh process has imported after `import module`."""
    code = f"import json, sys; old = {{*sys.modules}}; import {module}; print(json.dumps([*({{*sys.modules}} - old)]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of(package: str) -> list[str]:
    paths = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / package.replace(".", "/")).rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@cache
def imports_of(package: str) -> list[tuple[str, str]]:
    """(module, imported module) for every import of ours in the package, those within functions included."""
    known = {name for owner in (*PACKAGES, "bench") for name in modules_of(owner)}
    found: list[tuple[str, str]] = []
    for name in modules_of(package):
        path = ROOT / name.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.walk(ast.parse(source.read_text())):
            targets: set[str] = set()
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names} & known
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = {f"{node.module}.{alias.name}" for alias in node.names} & known
                targets = targets or {node.module} & known
            found += [(name, target) for target in sorted(targets)]
    return found


def floor_of(module: str) -> int | None:
    """How high the room of a module lies; None for the packages themselves."""
    named = [
        (len(room), floor)
        for floor, rooms in enumerate(FLOORS)
        for room in rooms
        if module == room or module.startswith(f"{room}.")
    ]
    return max(named)[1] if named else None


@pytest.mark.parametrize("package", ["environments", "flash_mcp"])
def test_no_import_runs_upward(package: str):
    upward = []
    for module, imported in imports_of(package):
        ours, theirs = floor_of(module), floor_of(imported)
        if ours is not None and theirs is not None and theirs > ours:
            upward.append(f"{module} imports {imported}")
    assert upward == []


def test_an_extension_is_named_by_itself_and_the_table_of_doors_alone():
    named = re.compile(r"\b(?:flash_mcp|worker)(?:\.extensions\b\.?| import extensions\b)(\w*)")
    crossing = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        _, folder, room, *_ = (*path.relative_to(ROOT).with_suffix("").parts, "")
        own = room if folder == "extensions" else None
        if path != ROOT / "environments/doors.py":
            crossing += [f"{path} names {match[0]}" for match in named.finditer(path.read_text()) if match[1] != own]
    assert crossing == []


def test_judgement_is_pure_functions_of_records():
    imported = {name for _, name in imports_of("flash_mcp.judgement")}
    assert "flash_mcp.protocol.records" in imported
    allowed = ("flash_mcp.judgement", "flash_mcp.protocol", "environments.same_task")
    assert all(name.startswith(allowed) for name in imported)


def test_no_imports_form_a_circle():
    graph: dict[str, set[str]] = {}
    for package in (*PACKAGES, "bench"):
        for module, imported in imports_of(package):
            graph.setdefault(module, set()).add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.slow
def test_the_control_plane_starts_fast_without_training_plotting_or_a_new_path():
    modules = ", ".join(name for name in modules_of("flash_mcp") if not name.endswith("__main__"))
    code = f"""
import json, sys, time
path = [*sys.path]
import flash_mcp.server.mcp_server
seconds = time.process_time()  # other processes of the machine do not count
import {modules}
print(json.dumps([seconds, sys.path == path, [*sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, is_same_path, loaded = json.loads(done.stdout)
    # Under 1.5 s on a quiet machine, most of it the MCP SDK. Clients give a server 10 s to start.
    assert seconds < 5 and is_same_path
    assert "flash_mcp.tools.status" in loaded
    assert not roots({*loaded}) & {*HEAVY, "matplotlib", "plotext", "numpy"}


def test_environments_load_nothing_but_the_standard_library_and_themselves():
    adapters = ("environments.adapters.", "environments.examples.")
    contract = ", ".join(name for name in modules_of("environments") if not name.startswith(adapters))
    assert "environments.process.host" in contract
    assert roots(loaded_by(contract)) <= {"environments", *sys.stdlib_module_names}


def test_the_worker_imports_only_the_protocol_and_environments():
    imported = {target for _, target in imports_of("worker") if not target.startswith("worker")}
    assert "flash_mcp.protocol.run_folder" in imported
    assert [name for name in imported if not name.startswith(("flash_mcp.protocol", "environments"))] == []


def test_the_engine_and_the_trainer_do_not_know_each_other():
    others = {"worker.engine": "worker.training", "worker.training": "worker.engine"}
    crossing = []
    for room, other in others.items():
        imported = imports_of(room)
        assert imported
        crossing += [pair for pair in imported if pair[1].startswith(f"{other}.")]
    assert crossing == []


def test_the_protocol_loads_nothing_else_of_the_control_plane():
    loaded = loaded_by(", ".join(modules_of("flash_mcp.protocol")))
    ours = {name for name in loaded if name.partition(".")[0] == "flash_mcp"}
    assert all(name == "flash_mcp" or name.startswith("flash_mcp.protocol") for name in ours)
