"""The control plane where nothing of Linux is: it imports, serves, and says what it cannot do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

from tests.folders import allow, environment_folder
from tests.places import ROOT, TESTS
from tests.teams import text_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow
IMPORT_ALL = """
import importlib, os, pkgutil, sys
import environments, flash_mcp
from environments.sandbox.kernel import libc
assert sys.platform == "freebsd14" and not hasattr(os, "O_PATH") and not hasattr(libc, "prctl")
for room in (flash_mcp, environments):
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        if ".examples" not in module.name:
            importlib.import_module(module.name)
"""


@pytest.fixture
def variables(tmp_path: Path, flash_home: Path) -> dict[str, str]:
    """Those of a process without Linux. The processes that it starts are such ones too."""
    python = tmp_path / "python"
    path = f"{TESTS / 'no_linux'}{os.pathsep}${{PYTHONPATH}}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" FLASH_PYTHON="$0" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return {
        **os.environ,
        "PYTHONPATH": f"{TESTS / 'no_linux'}",
        "FLASH_PYTHON": str(python),
        "FLASH_HOME": str(flash_home),
    }


def test_every_module_of_the_control_plane_imports(variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_doctor_says_in_one_line_what_is_missing(variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", "flash_mcp.cli", "doctor"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    [line] = [line for line in done.stdout.splitlines() if " sandbox: " in line]
    assert line.startswith("PROBLEM") and "freebsd14" in line and "no environment loads" in line
    assert "--ssh" in done.stdout


async def test_it_serves_and_refuses_foreign_code_until_the_operator_trusts_it(variables, tmp_path, flash_home) -> None:
    folder = str(environment_folder(tmp_path / "folder", "", returns="Echo()"))
    server = StdioServerParameters(command=sys.executable, args=["-m", "flash_mcp.cli", "serve"], env=variables)
    async with Client(server) as client:
        assert "no runs yet" in text_of(await client.call_tool("status", {}))
        assert "cores" in text_of(await client.call_tool("catalog", {"kind": "devices"}))
        refused = text_of(await client.call_tool("env_test", {"folder": folder}))
        assert "environment_unprotected" in refused and "freebsd14" in refused
        allow(flash_home, "without_file_protection = true")
        tried = text_of(await client.call_tool("env_test", {"folder": folder}))
        assert '"train_tasks":6' in tried and "freebsd14 has no Landlock" in tried
