"""A package that is none of ours brings an engine and an adapter (docs/extending.md)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client

from environments import adapters, doors
from flash_mcp.cli.main import COMMANDS
from flash_mcp.server import http_server
from flash_mcp.server.mcp_server import server
from flash_mcp.state.store import open_store
from flash_mcp.state.targets import find_target, new_target
from flash_mcp.tools.registry import TOOLS
from tests import reaper
from tests.calls import refusal
from tests.places import ROOT
from tests.rooms import PRODUCT, ROOMS, Room
from tests.samples import finished_run
from tests.test_imports import modules_of
from tests.waiting import WAIT_S

PACKAGES = ROOT / "tests/fixture_packages"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the package, as if it was installed here."""
    monkeypatch.syspath_prepend(PACKAGES)
    doors.installed.cache_clear()
    doors.brought.cache_clear()
    import lab  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    yield lab
    doors.installed.cache_clear()
    doors.brought.cache_clear()


@pytest.mark.slow
def test_another_packages_engine_runs_a_job_that_its_tool_lists_and_its_command_forgets(tmp_path, flash_home, lab: Any):
    notes, storage = tmp_path / "notes", tmp_path / "storage"
    notes.mkdir()
    storage.mkdir()

    def typed(*words: str) -> str:
        command = [sys.executable, "-m", "flash_mcp.cli", *words]
        variables = {**os.environ, "PYTHONPATH": str(PACKAGES)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    added = ("target", "add", "here", "--engine", "lab", "--python", sys.executable)
    typed(*added, "--address", str(notes), "--storage", str(storage))
    settings = find_target(flash_home, "here")
    assert settings.engine == "lab" and settings.cards and settings.cards.count == 1
    (job,) = (note.name for note in notes.iterdir())
    assert json.loads(typed("lab-jobs", str(notes), "--json"))["jobs"] == [job]
    assert json.loads(typed("lab-forget", str(notes), "--json")) == {"removed": [job]}
    assert not list(notes.iterdir()) and "gguf-q8_0, shapes" in typed("export", "--help")


async def test_its_address_asks_for_a_token_as_ours_do(lab: Any, flash_home: Path, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "DOORS", doors.each("flash_mcp.routes"))
    for authenticate, status in ((True, 401), (False, 200)):
        app = http_server.application(server, "127.0.0.1", http_server.Admission(authenticate))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            assert (await http.get("/lab/printer")).status_code == status


def test_its_objects_are_adapted(lab: Any) -> None:
    adapted = adapters.adapted(lab.Quiz({"two and two": "4", "three and three": "6"}))
    assert [task.output for task in adapted.dataset] == ["4"]


def test_our_adapters_are_found_in_an_interpreter_that_has_our_files_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from environments import adapters, doors; "
    code += "print(*sorted(doors.brought(adapters.ADAPTERS)))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.split() == ["inspect_ai", "verifiers"]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"] == doors.OURS


def test_two_packages_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[flash_mcp.targets]\nlab = other:Launcher\nslow = nothing:Launcher\n")
    monkeypatch.syspath_prepend(tmp_path)
    doors.installed.cache_clear()
    doors.brought.cache_clear()
    with pytest.raises(Exception, match="several packages bring 'lab'"):
        new_target(tmp_path, "here", {"engine": "lab", "storage": "/s"})
    with pytest.raises(Exception, match=r"slow of flash_mcp.targets cannot be imported"):
        new_target(tmp_path, "here", {"engine": "slow", "storage": "/s"})


@pytest.mark.parametrize(
    ("module", "point", "tool", "arguments"),
    [
        ("worker.extensions.recording", "chats of flash_mcp.recorders", "deploy", {"record": True, "wait_s": 0}),
        ("environments.agents.harbor", "harbor of flash_mcp.tasks", "env_setup", {"template": "terminal"}),
    ],
)
async def test_a_tool_refuses_what_is_behind_a_door_that_leads_nowhere(
    module: str, point: str, tool: str, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if its file was not there
    if tool == "deploy":
        arguments = arguments | {"run_id": finished_run(tmp_path).id}
    async with Client(server) as client:
        text = await refusal(client, tool, **arguments)
    assert text.startswith("[extension_missing") and f"{point} cannot be imported" in text
    assert "Fix: install the package that brings it" in text and not open_store().deployments()


REPOSITORY = ("tests", "docs", "scripts", "pyproject.toml", "TRAINING.md", "constraints-cpu.txt", "constraints-gpu.txt")
QUICK = ("tests/cli", "tests/server", "tests/state", "tests/tools")
"""The folders of the core's tests that are run without each room."""
CORE = """
import asyncio, importlib, json, os, sys
import mcp.client, mcp.server.mcpserver, mcp.server.streamable_http, httpx, jinja2, psutil, uvicorn  # shared by all
modules, *folders = sys.argv[1:]
for folder in folders:
    if os.fork():
        os.wait()
        continue
    os.chdir(folder)
    sys.path.insert(0, folder)
    for module in modules.split(","):
        if os.path.exists(module.replace(".", "/") + ".py"):
            importlib.import_module(module)
    from flash_mcp.cli import doctor, main
    from flash_mcp.server.mcp_server import server
    assert doctor.__file__.startswith(folder)
    tools = [tool.name for tool in asyncio.run(server.list_tools())]
    level, detail, _ = doctor.CHECKS["extensions"]()
    said = {"tools": tools, "commands": [*main.COMMANDS], "instructions": server.instructions}
    said |= {"level": level, "detail": detail}
    print(json.dumps(said), flush=True)
    os._exit(0)
"""


def copied(folder: Path, room: Room, *more: str) -> Path:
    """Our packages, and `more` of the repository, without a room."""
    for name in (*PRODUCT, *more):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
            continue
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=without, copy_function=os.link)
    for path in (folder / name for name in room.paths):
        assert path.exists()
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By room: what a core says from which it was deleted. All in one program, which forks for each."""
    folder = tmp_path_factory.mktemp("cores")
    folders = [str(copied(folder / name, room)) for name, room in ROOMS.items()]
    paths = [path for room in ROOMS.values() for path in room.paths]
    rooms = tuple(path.removesuffix(".py").strip("/").replace("/", ".") for path in paths)
    modules = [name for name in modules_of("flash_mcp") if not name.startswith(rooms) and not name.endswith("__main__")]
    command = [sys.executable, "-c", CORE, ",".join(modules), *folders]
    variables = {**os.environ, "FLASH_HOME": str(folder / "home"), "PYTHONPATH": ""}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WAIT_S, check=False)
    answers = list(map(json.loads, done.stdout.splitlines()))
    assert len(answers) == len(ROOMS), done.stderr
    return dict(zip(ROOMS, answers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_the_core_goes_on_without_a_room_and_says_what_is_missing(room: str, without: dict[str, Any]) -> None:
    said, missing = without[room], ROOMS[room].points
    assert said["level"] == "warning" and all(f"{name} of {group}" in said["detail"] for group, name in missing)
    assert said["detail"].count(" of flash_mcp.") == len(missing)
    lacking = {name for group, name in missing if group == "flash_mcp.tools"}
    assert {*said["tools"]} == {*TOOLS} - lacking and all(name in said["instructions"] for name in lacking)
    assert {*said["commands"]} == {*COMMANDS} - {name for group, name in missing if group == "flash_mcp.commands"}


@pytest.mark.long
@pytest.mark.parametrize("room", sorted(ROOMS))
def test_the_cores_quick_tests_pass_without_a_room(room: str, tmp_path: Path) -> None:
    folder = copied(tmp_path / "core", ROOMS[room], *REPOSITORY)
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    variables.pop(reaper.VARIABLE, None)
    command = [sys.executable, "-m", "pytest", "--fast", "-q", "-p", "no:cacheprovider", f"--without={room}", *QUICK]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 500
