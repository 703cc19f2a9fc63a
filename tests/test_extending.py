"""A package that is none of ours brings an engine and an adapter (docs/extending.md)."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments import adapters, doors
from flash_mcp.state.targets import find_target, new_target
from flash_mcp.tools.registry import TOOLS
from tests.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
PACKAGES = ROOT / "tests/fixture_packages"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the package, as if it was installed here."""
    monkeypatch.syspath_prepend(PACKAGES)
    doors.brought.cache_clear()
    import lab  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    yield lab
    doors.brought.cache_clear()


@pytest.mark.slow
def test_a_target_of_another_packages_engine_is_proved_by_a_job(tmp_path: Path, flash_home: Path, lab: Any) -> None:
    notes, storage = tmp_path / "notes", tmp_path / "storage"
    notes.mkdir()
    storage.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-m", "flash_mcp.cli", "target", "add", "here", "--engine", "lab"]
    command += ["--address", str(notes), "--storage", str(storage), "--python", sys.executable]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = find_target(flash_home, "here")
    assert settings.engine == "lab" and settings.cards and settings.cards.count == 1
    assert len(list(notes.iterdir())) == 1


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert doors.OURS[adapters.ADAPTERS] == project["entry-points"][adapters.ADAPTERS]


def test_two_packages_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[flash_mcp.targets]\nlab = other:Launcher\nslow = nothing:Launcher\n")
    monkeypatch.syspath_prepend(tmp_path)
    doors.brought.cache_clear()
    with pytest.raises(Exception, match="several packages bring 'lab'"):
        new_target(tmp_path, "here", {"engine": "lab", "storage": "/s"})
    with pytest.raises(Exception, match=r"slow of flash_mcp.targets cannot be imported"):
        new_target(tmp_path, "here", {"engine": "slow", "storage": "/s"})


@pytest.mark.slow
def test_the_core_goes_on_without_what_lies_behind_the_doors(tmp_path: Path, flash_home: Path) -> None:
    """In a copy without the engines and adapters the tools are there, and a target says what is missing."""
    for name in ("flash_mcp", "environments", "worker"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    launch, adapted = tmp_path / "flash_mcp/supervisor/launch", tmp_path / "environments/adapters"
    gone = [launch / f"{name}.py" for name in ("api", "ray", "sky", "slurm")]
    gone += [adapted / f"{name}.py" for name in ("freesolo", "gym", "inspect_tasks", "mcp", "trl", "verifiers")]
    for path in gone:
        path.unlink()
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flash_mcp.cli", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=WAIT_S, check=False
        )

    helped = typed("--help").stdout
    assert all(name in helped for name in TOOLS)
    assert typed("env-test", "--folder", "environments/examples/calculator").returncode == 0
    added = typed("target", "add", "there", "--engine", "slurm", "--storage", "/s")
    assert added.returncode and "slurm of flash_mcp.targets cannot be imported" in added.stderr
