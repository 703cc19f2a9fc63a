"""The allow-list of system calls: what is not on it is refused, and what programs need works."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from environments.process.host import EnvironmentHost
from environments.sandbox.seccomp import allowed_calls
from tests import acts
from tests.folders import environment_folder
from tests.waiting import WAIT_S

pytestmark = pytest.mark.linux
HEADERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
UNFILTERED = {335, 336}
"""uretprobe and uprobe of x86_64: the kernel lets them past every filter, and kills what calls them itself."""
HIGHEST = 700  # above the numbers of all system calls that exist

UNLISTED = """
import ctypes, errno, json, sys
from environments.sandbox.kernel import PR_SET_NO_NEW_PRIVS, libc
from environments.sandbox.seccomp import filter_calls
libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
assert filter_calls(allow_sockets=True, allow_tcp=False, has_processes=True) == ""
told = {}
for number in json.loads(sys.argv[1]):
    result = libc.syscall(number, -1, -1, -1, -1, -1, -1)
    told[number] = "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
print(json.dumps(told))
"""


@pytest.mark.hostile("calls")
def test_every_call_that_is_not_on_the_list_is_refused() -> None:
    allowed = set(allowed_calls()[1].values())
    unlisted = sorted(set(range(HIGHEST)) - allowed - UNFILTERED)
    command = [sys.executable, "-c", UNLISTED, json.dumps(unlisted)]
    told = json.loads(subprocess.check_output(command, timeout=WAIT_S))
    expected = {str(n): "ENOSYS" if n == 435 or n > max(allowed) else "EPERM" for n in unlisted}
    assert told == expected


EMPTYING = """
import os, sys
from environments.sandbox.kernel import PR_SET_NO_NEW_PRIVS, libc
from environments.sandbox.seccomp import filter_calls
libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
options = {"allow_sockets": False, "allow_tcp": False, "has_processes": True}
assert filter_calls(**options, allow_truncate=False) == ""
path, own = sys.argv[1:]
for empty in (lambda: os.truncate(path, 0), lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
              lambda: os.open(path, os.O_ACCMODE | os.O_TRUNC)):
    try:
        empty()
    except PermissionError:
        print("refused")
with open(own, "w") as file:
    file.write("abc")
    file.truncate(1)
print(open(own).read())
"""


@pytest.mark.hostile("files")
def test_no_file_can_be_emptied_that_may_only_be_read_where_landlock_does_not_see_to_it(tmp_path: Path) -> None:
    path = tmp_path / "flash.db"
    path.write_text("all runs")
    command = [sys.executable, "-c", EMPTYING, path, tmp_path / "own"]
    assert subprocess.check_output(command, timeout=WAIT_S, text=True).split() == ["refused"] * 3 + ["a"]
    assert path.read_text() == "all runs"


@pytest.mark.skipif(platform.machine() != "x86_64" or not HEADERS.is_file(), reason="needs the kernel's headers")
def test_the_numbers_are_those_of_the_kernel() -> None:
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADERS.read_text())}
    calls = allowed_calls()[1]
    assert len(calls) > 250
    # An older kernel's headers do not know the newest calls.
    unknown = calls.keys() - numbers.keys()
    assert {name: number for name, number in calls.items() if name not in unknown} == {
        name: numbers[name] for name in calls.keys() - unknown
    }
    assert all(calls[name] > max(numbers.values()) for name in unknown)


PROGRAMS = {
    "threads": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    "a pool of processes": ("import multiprocessing as m\n"
        "with m.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]"),
    "shared memory": ("from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=9); block.buf[0] = 7; block.close(); block.unlink()"),
    "numbers": "import numpy; assert numpy.linalg.det(numpy.eye(300)) == 1",
    "coroutines and their programs": ("import asyncio\nasync def main():\n"
        "    done = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)\n"
        "    assert (await done.communicate(b'x'))[0] == b'x'\n    await asyncio.to_thread(time.sleep, 0)\n"
        "thread = __import__('threading').Thread(target=asyncio.run, args=(main(),)); thread.start(); thread.join()"),
    "a database": ("import sqlite3; base = sqlite3.connect(here + '/base'); base.execute('pragma journal_mode = wal')\n"
        "base.execute('create table t (x)'); base.commit(); base.close()"),
    "git": ("env = dict(os.environ, HOME=here, GIT_AUTHOR_NAME='a', GIT_AUTHOR_EMAIL='a@b', GIT_COMMITTER_NAME='a', "
        "GIT_COMMITTER_EMAIL='a@b')\n"
        "for line in ('init -q .', 'commit -q --allow-empty -m x', 'log --oneline', 'gc -q', 'status'):\n"
        "    subprocess.run(['git', *line.split()], cwd=here, env=env, check=True)"),
    "a shell with a pipe": "assert subprocess.check_output('seq 9 | sort -r | head -1', shell=True) == b'9\\n'",
    "an archive": ("line = 'tar czf a.tgz own && tar xzf a.tgz && cp -a own b && mv b c'\n"
        "subprocess.run(line, shell=True, cwd=here, check=True)"),
    "node": (
        "import shutil\ncode = \"require('fs').readFile('own', () => require('child_process').execSync('true'))\"\n"
        "if shutil.which('node'): subprocess.run(['node', '-e', code], cwd=here, check=True)"),
    "another Python": "subprocess.run([sys.executable, '-c', 'import ssl, json, concurrent.futures'], check=True)",
    "a pipe with a name, a lock and a timer": (
        "os.mkfifo(here + '/pipe'); fcntl.flock(open(own), fcntl.LOCK_EX); signal.setitimer(signal.ITIMER_PROF, 0)"),
    "a name, and a folder that compilers ask about": (
        "import getpass; assert getpass.getuser() == 'environment' and os.access(tempfile.gettempdir(), os.W_OK)"),
    "its own priority and limits": ("os.nice(0); os.sched_setaffinity(0, os.sched_getaffinity(0)); os.sched_yield()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)); os.getloadavg()"),
}  # fmt: skip


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
async def test_what_programs_need_works(tmp_path: Path) -> None:
    folder = environment_folder(tmp_path / "folder", acts.ATTACKER)
    async with await EnvironmentHost.start(Path(folder)) as started:
        told = {
            name: await acts.told(started, f"{acts.PRELUDE}\n{code}\ntold = 'done'") for name, code in PROGRAMS.items()
        }
    assert told == dict.fromkeys(PROGRAMS, "done")
