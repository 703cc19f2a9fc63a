"""What developers run: the fast tests, and the limits on functions."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests import reaper
from tests.places import ROOT, TESTS
from tests.scale import strikes
from tests.scale.rehearsal import ENGINES
from tests.waiting import wait_for


@pytest.mark.slow
def test_the_fast_tests_are_collected_without_torch_and_vllm() -> None:
    """While they run, the fixture no_torch keeps both from being imported."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "no_torch"), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/protocol/test_spec.py::" in done.stdout and "tests/worker/" not in done.stdout


@pytest.mark.parametrize("module", ["torch", "vllm"])
def test_a_fast_test_and_its_processes_can_import_neither(module: str) -> None:
    with pytest.raises(ImportError):
        __import__(module)
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    assert "not marked slow" in done.stderr


def toy_run(folder: Path, tests: str, *options: str) -> subprocess.Popen[str]:
    """A pytest of `tests` with our settings and fixtures, as if nobody ran it within a test."""
    (folder / "test_toy.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", f"--rootdir={folder}"]
    command += ["-p", "tests.conftest", *(options or ["-p", "no:cacheprovider"]), folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(reaper.VARIABLE)
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


LEAK = """
import pytest
import socket

@pytest.mark.slow
def test_leaks():
    cycle = [socket.socket()]
    cycle.append(cycle)

@pytest.mark.slow
def test_is_sound():
    pass
"""


@pytest.mark.slow
def test_what_is_left_open_fails_the_test_that_left_it(tmp_path: Path) -> None:
    with toy_run(tmp_path, LEAK) as run:
        output = run.communicate()[0]
    assert "ERROR test_toy.py::test_leaks - Failed: ResourceWarning(" in output and "2 passed, 1 error" in output


HANGS = """
import pytest
import subprocess
from pathlib import Path

@pytest.mark.slow
def test_hangs():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path("child").write_text(f"{child.pid}.")
    child.wait()
"""


@pytest.mark.slow
def test_what_a_killed_run_started_ends_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with toy_run(tmp_path, HANGS) as run:
        wait_for(lambda: child.exists() and child.read_text().endswith("."))
        run.kill()
    wait_for(lambda: not psutil.pid_exists(int(child.read_text()[:-1])))


def sizes(folder: Path, body: str) -> str:
    """Returns what scripts/function_sizes.py says of one module."""
    for name in ("scripts", "worker"):
        (folder / name).mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "function_sizes.py", folder / "scripts")
    (folder / "worker" / "a.py").write_text(f"class A:\n    def f(self, x):\n{body}")
    command = [sys.executable, "scripts/function_sizes.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr


def test_a_function_that_is_too_long_or_too_complex_is_named(tmp_path: Path) -> None:
    name = "worker/a.py::A.f"
    docstring, long = '        """One.\n\n        Two.\n        """\n', "        x += 1\n" * 81
    complex_ = "        x = x if x else 1\n" * 25
    assert sizes(tmp_path, docstring + long).startswith(f"{name}: a body of 81 lines, complexity 1;")
    assert sizes(tmp_path, complex_).startswith(f"{name}: a body of 25 lines, complexity 26;")
    assert sizes(tmp_path, docstring + "        x += 1\n" * 80) == ""


def test_a_package_that_is_denser_than_the_limits_is_named(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "density.py", tmp_path / "scripts")
    why, vague = "rows = 1  # why", "found = 1  # noqa: F1"
    sources = {
        "environments": [],
        "flash_mcp": [
            *[vague] * 4, *[why] * 12, *["x = [y for y in z]"] * 22, *["x = 1 if y else 2"] * 15
        ],
        "worker": [vague] * 5,
    }  # fmt: skip
    for package, lines in sources.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("\n".join([*lines, *["rows = 1"] * (1000 - len(lines))]))

    def faults() -> list[str]:
        command = [sys.executable, "scripts/density.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr.splitlines()

    dense, vague_names = faults()
    assert dense.startswith("flash_mcp: 15.0 conditional expressions in 1,000 lines, at most 14;")
    assert vague_names.startswith("worker: 5.0 vague names") and "found" in vague_names
    path = tmp_path / "flash_mcp" / "a.py"
    path.write_text(path.read_text().replace("# why", "# type: ignore").replace(" if y else 2", ""))
    uncommented, _ = faults()
    assert uncommented.startswith("flash_mcp: 0.0 comments in 1,000 lines, at least 12;")


def test_the_faults_of_a_rehearsal_are_of_all_kinds_and_those_of_its_seed() -> None:
    for engine in ENGINES:
        faults = strikes.plan(engine, 0, 30)
        counts = Counter(fault.kind for fault in faults)
        assert set(counts) == {*strikes.KINDS} - (set() if engine == "slurm" else {*strikes.ONLY_SLURM})
        assert max(counts.values()) - min(counts.values()) <= 1
        assert faults == strikes.plan(engine, 0, 30) != strikes.plan(engine, 1, 30)
        assert not any("{" in strikes.shown(engine, kind) for kind in counts)


@pytest.mark.slow
def test_style_imports_and_sizes_are_clean() -> None:
    """Types take a minute: .ci/run has scripts/lint check them before it runs any test."""
    done = subprocess.run(
        ["scripts/lint", "--style"], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False,
        timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
