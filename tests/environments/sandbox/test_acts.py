"""Hostile acts against the sandbox: each is tried where environment code runs, and must be refused.

All acts of a place run in one process of an environment. The places: this user, root in a container
that may make no namespace, and a user without rights."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import acts
from tests.folders import environment_folder
from tests.places import CALCULATOR, TESTS
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.linux]
POWERLESS = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
"""Root in a container that may make no namespace."""
UNPROTECTED = [sys.executable, "-m", "tests.refusing", "landlock,namespaces"]
WITHOUT_RIGHTS = ["setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups"]
ONLY_ROOT = pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can be another user")

EVERY_USERS_PYTHON = pytest.mark.skipif(
    os.system("/usr/bin/python3 -c 'import tomllib' 2>/dev/null") != 0,
    reason="needs a Python from 3.11 on that every user may run",
)


@dataclass(frozen=True)
class Told:
    """What came of each act: "done", or the name of the error."""

    sandbox: dict[str, str]
    acts: dict[str, str]
    faults: dict[str, str]
    open: dict[str, str]
    has_victim: bool  # whether another process of the user still runs

    def done(self) -> dict[str, str]:
        """The acts that were not refused though the protection that they need works."""
        return {
            name: found
            for name, found in self.acts.items()
            if not acts.is_refused(name, found) and not self.sandbox.get(acts.NEEDS.get(name, ""))
        }


@contextmanager
def at_stake(base: Path, before: list[str]) -> Generator[dict[str, object]]:
    """What the acts are after: files of the server's user and a process of it."""
    hidden, state = base / "hidden", base / "home" / "state"
    hidden.mkdir(parents=True)
    state.parent.mkdir(exist_ok=True)
    state.write_text("planted")
    state.with_name("state.link").symlink_to("/planted")
    secret, program, link = hidden / "secret", hidden / "program", hidden / "link"
    secret.write_text("planted")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    link.symlink_to("/planted")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared, socket.create_server(("127.0.0.1", 0)):
        victim = subprocess.Popen([*before, "sleep", "600"])
        names = {
            "HIDDEN": str(hidden), "SECRET": str(secret), "PROGRAM": str(program), "LINK": str(link),
            "STATE": str(state), "SHARED": shared.name, "VICTIM": victim.pid,
        }  # fmt: skip
        try:
            yield names
            names["has_victim"] = victim.poll() is None
        finally:
            victim.kill()
            victim.wait()


def tried(base: Path, before: list[str], python: list[str], *more: str, **variables: str) -> Told:
    # As a version that was pushed: within the state directory.
    folder = environment_folder(base / "home" / "environments" / "folder", acts.ATTACKER, needs="processes = 200")
    with at_stake(base, before if before == WITHOUT_RIGHTS else []) as names:
        command = [*before, *python, folder, json.dumps(names), *more]
        env = {**os.environ, "FLASH_HOME": str(base / "home"), **variables}
        done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return Told(has_victim=bool(names["has_victim"]), **json.loads(done.stdout))


OURS = [sys.executable, "-m", "tests.acts"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return tried(tmp_path_factory.mktemp("acts"), [], OURS, "faults")


KINDS = {
    "files": acts.FILES, "surroundings": acts.MOUNTS, "rights": acts.PROCESSES, "machine": acts.MACHINE,
    "sockets": acts.NETWORK,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.hostile(kind)) for kind, names in KINDS.items() for name in names]
)
def test_an_act_is_refused(told: Told, name: str) -> None:
    if why := told.sandbox.get(acts.NEEDS.get(name, "")):
        pytest.skip(why)
    assert acts.is_refused(name, told.acts[name]) and told.has_victim, told.acts[name]


@pytest.mark.hostile("odd ends")
@pytest.mark.parametrize("name", acts.FAULTS)
def test_an_odd_end_is_the_environments_fault(told: Told, name: str) -> None:
    code, _, what = told.faults[name].partition(": ")
    assert code in ("environment_error", "environment_timeout"), (code, what)


@pytest.mark.hostile("open", is_open=True)
@pytest.mark.parametrize("name", acts.OPEN)
def test_an_open_act_is_still_open(told: Told, name: str) -> None:
    """So that bench/faults.md says what is true."""
    assert told.open[name] == "done"


@ONLY_ROOT
def test_the_same_acts_are_refused_where_no_namespace_can_be_had(tmp_path: Path) -> None:
    told = tried(tmp_path, POWERLESS, OURS)
    assert "no PID namespace can be had" in told.sandbox["process_tree"]
    assert (told.done(), told.has_victim) == ({}, True)


@ONLY_ROOT
@EVERY_USERS_PYTHON
def test_the_same_acts_of_a_user_without_rights_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        base.chmod(0o755)
        # The state directory lies beside the package: its names must stay hidden all the same.
        shutil.copytree(CALCULATOR.parents[1], base / "environments")
        shutil.copy(TESTS / "acts.py", base)
        python = ["/usr/bin/python3", str(base / "acts.py")]
        (base / "home").mkdir()
        os.chown(base / "home", 4242, 4242)
        told = tried(base, WITHOUT_RIGHTS, python, PYTHONPATH=folder, HOME=f"{folder}/home")
    assert told.done() == {}


@ONLY_ROOT
def test_the_acts_on_files_succeed_where_nothing_protects_them(tmp_path: Path) -> None:
    """Else they would be refused for being wrong calls."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "settings.toml").write_text("[environments]\nwithout_file_protection = true\n")
    told = tried(tmp_path, UNPROTECTED, OURS)
    done = {name for name in acts.FILES if told.acts[name] == "done"}
    assert len(done) > 10, told.acts
