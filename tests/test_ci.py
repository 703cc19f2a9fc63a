"""What CI runs (.ci/run), tries again, and leaves out."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.test_scripts import toy_run

TESTS = """
echo tries >>tries
if [ $(wc -l <tries) -gt {failures} ]; then exit 0; fi
mkdir -p .pytest_cache/v/cache
echo '  "a.py::shaky": true' >.pytest_cache/v/cache/lastfailed
exit 1"""
"""A command that fails so many times, as pytest does."""
BOTH = "echo scripts/test-engines --quick; echo tests/a.py; echo tests/b.py"


def ci(
    folder: Path,
    failures: int = 0,
    *,
    lint: str = "",
    until: int = 18 * 60,
    touched: str = "echo tests/a.py",
    engines: str = "echo ENGINES $1",
    long: str = "echo LONG $*",
) -> tuple[int, str]:
    """Runs .ci/run beside such scripts, and returns its status and what it prints."""
    run = (ROOT / ".ci" / "run").read_text()
    commands = {
        ".ci/run": run.replace("until=$((began + 18 * 60))", f"until=$((began + {until}))"),
        ".venv/bin/python": touched, "scripts/install": "", "scripts/lint": lint,
        "scripts/test": f'case "$*" in *--long*) {long};; *) {TESTS.format(failures=failures)};; esac',
        "scripts/test-engines": engines,
    }  # fmt: skip
    for name, command in commands.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{command}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run([".ci/run"], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_ci_names_what_passed_only_at_the_second_try(tmp_path: Path) -> None:
    status, output = ci(tmp_path, failures=1, touched=BOTH)
    assert status == 0 and output.endswith("\nPASSED ONLY AT THE SECOND TRY\na.py::shaky\n")
    assert "ENGINES --quick\nLONG tests/a.py tests/b.py --long --until=" in output


@pytest.mark.parametrize(("failures", "expected"), [(0, 0), (2, 1)])
def test_ci_passes_or_fails_without_that_block(tmp_path: Path, failures: int, expected: int) -> None:
    status, output = ci(tmp_path, failures)
    assert status == expected and "PASSED ONLY AT THE SECOND TRY" not in output
    assert ("\nLONG tests/a.py --long" in output) == (expected == 0)
    assert "ENGINES" not in output  # nothing calls for them


def test_ci_runs_what_is_called_for_in_what_is_left_of_its_time(tmp_path: Path) -> None:
    status, output = ci(tmp_path / "late", until=1, touched=BOTH)
    late = ["scripts/test-engines --quick", "scripts/test tests/a.py tests/b.py --long"]
    assert status == 0
    assert output.splitlines()[-2:] == [f"NOT RUN, for no time was left: {command}" for command in late]
    assert ci(tmp_path / "fails", engines="exit 2", touched=BOTH)[0] == 2
    assert ci(tmp_path / "untyped", lint="exit 1") == (1, "")
    status, output = ci(tmp_path / "hangs", engines="exit 124", touched=BOTH)
    assert status == 0 and "\nLONG" in output
    assert output.endswith("NOT FINISHED within the time: scripts/test-engines --quick\n")
    again = f'(case "$*" in *--last-failed*) exit 124;; *) {TESTS.format(failures=9)};; esac); exit $?'
    assert ci(tmp_path / "hangs when tried again", long=again)[0] == 1
    cut = """mkdir -p .pytest_cache/v/flash; printf '[\\n  "tests/a.py::b"\\n]' >.pytest_cache/v/flash/not_run"""
    status, output = ci(tmp_path / "cut", long=cut)
    assert status == 0 and output.endswith("NOT RUN, for no time was left: tests/a.py::b\n")


@pytest.mark.slow
@pytest.mark.parametrize(("until", "outcome", "names"), [("inf", "1 passed", []), ("0", "1 skipped", ["::test_a"])])
def test_a_test_that_would_start_too_late_is_named(tmp_path: Path, until: str, outcome: str, names: list[str]) -> None:
    cache = tmp_path / "cache"
    toy = "import pytest\n@pytest.mark.slow\ndef test_a(): ..."
    with toy_run(tmp_path, toy, f"--until={until}", f"--override-ini=cache_dir={cache}") as run:
        assert outcome in run.communicate()[0]
    not_run = cache / "v" / "flash" / "not_run"
    left_out = json.loads(not_run.read_text()) if not_run.exists() else []
    assert left_out == [f"test_toy.py{name}" for name in names]


class Repository:
    """A repository in which .ci/touched.py is asked what to run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, 1_700_000_000
        self.git("init", "--initial-branch=main")

    def git(self, *words: str) -> None:
        dates = {f"GIT_{who}_DATE": f"{self.seconds} +0000" for who in ("AUTHOR", "COMMITTER")}
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@b", *words]
        subprocess.run(command, cwd=self.folder, check=True, env={**os.environ, **dates}, capture_output=True)

    def commit(self, path: str, lines: int = 1, *, hours: int) -> None:
        """Commit a file, so many hours after the commit before."""
        self.seconds += hours * 3600
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text("a\n" * lines)
        self.git("add", ".")
        self.git("commit", "--message=a")

    def touched(self, *arguments: str, **variables: str) -> list[str]:
        command = [sys.executable, ROOT / ".ci" / "touched.py", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()


MAP = runpy.run_path(str(ROOT / ".ci" / "touched.py"))
CALLS_FOR = {folder: tests.replace(MAP["ENGINES"], "").split() for folder, tests in MAP["CALLS_FOR"].items()}
FILES = {path for paths in CALLS_FOR.values() for path in paths}


def test_what_came_since_the_last_landing_calls_for_its_tests(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.commit("worker/a.py", hours=0)
    repository.commit("flash_mcp/state/a.py", hours=24)
    first = [*dict.fromkeys(CALLS_FOR["flash_mcp/state/"])]
    assert repository.touched() == first  # the newest four hours, whatever the clock says now
    repository.commit("docs/a.md", 99, hours=1)
    repository.commit("tests/test_bench.py", 9, hours=1)
    repository.commit("worker/node.py", 3, hours=1)
    assert repository.touched() == [MAP["ENGINES"], "tests/test_bench.py", *first]
    assert repository.touched(CI_BASE="HEAD~1") == [MAP["ENGINES"]] and repository.touched(CI_BASE="HEAD") == []
    with pytest.raises(subprocess.CalledProcessError) as unknown:
        repository.touched(CI_BASE="gone")
    assert "CI_BASE=gone names no commit" in unknown.value.stderr
    repository.git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert repository.touched() == [MAP["ENGINES"], "tests/test_bench.py", *first]
    repository.commit("scripts/test-engines", 2, hours=9)
    assert repository.touched(CI_BASE="HEAD~1") == [MAP["ENGINES"]]
    repository.commit("bench/a.py", hours=9)
    repository.git("update-ref", "refs/remotes/origin/main", "HEAD~3")  # HEAD is of a branch
    assert repository.touched() == [MAP["ENGINES"], *CALLS_FOR["bench/"]]
    repository.commit("pyproject.toml", hours=9)
    assert {*repository.touched(CI_BASE="HEAD~1")} == {*repository.touched("--all")}


def test_all_is_run_where_no_landing_is_known(tmp_path: Path) -> None:
    everything = {MAP["ENGINES"], *FILES}
    repository = Repository(tmp_path)
    assert {*repository.touched()} == everything
    repository.commit("docs/a.md", hours=0)
    assert {*repository.touched()} == {*repository.touched("--all")} == everything


def test_every_file_of_long_tests_is_called_for() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    long = {path for path, text in files.items() if "mark.long" in text or "grids import" in text}
    assert long - FILES == {"tests/test_ci.py"} and long >= FILES
    assert all((ROOT / folder).exists() for folder in CALLS_FOR)
    extensions = [path for package in ("flash_mcp", "worker") for path in (ROOT / package / "extensions").glob("[!_]*")]
    assert {str(path.relative_to(ROOT)) for path in extensions} <= {folder.strip("/") for folder in CALLS_FOR}
