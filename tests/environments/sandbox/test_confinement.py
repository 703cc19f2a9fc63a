"""The sandbox of environment code, attacked by code that an environment runs for real."""

import asyncio
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.sandbox import warden
from environments.sandbox.confinement import describe
from environments.sandbox.needs import PYTHON, WARDEN, Needs
from flash_mcp.protocol.paths import environments_dir
from flash_mcp.state.store import open_store
from tests.acts import ATTACKER
from tests.environments.sandbox.test_acts import ONLY_ROOT, POWERLESS
from tests.folders import allow, environment_folder
from tests.places import CALCULATOR, ROOT
from tests.waiting import WAIT_S, until
from tests.watch import is_running, outer_pid

pytestmark = [pytest.mark.slow, pytest.mark.linux]


class Attack:
    """Runs code where environment code runs."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host

    async def told(self, code: str) -> str:
        """What the code left in `told`."""
        episode = (await self.host.open("train", 0)).episode
        try:
            return (await self.host.step(episode, textwrap.dedent(code))).messages[0]["content"]
        finally:
            await self.host.close(episode)

    async def fault(self, code: str) -> EnvironmentFault:
        with pytest.raises(EnvironmentFault) as caught:
            await self.told(code)
        return caught.value

    def process(self, inner: str) -> psutil.Process:
        """The process that the code calls `inner`."""
        return psutil.Process(outer_pid(self.processes()[0].pid, int(inner)))

    def processes(self) -> list[psutil.Process]:
        """The warden, the namespace's first process, the one that runs the code, and all that it started."""
        warden = psutil.Process(self.host._children[-1]._transport.get_pid())
        return [warden, *warden.children(recursive=True)]


@asynccontextmanager
async def attack_on(folder: Path, needs: str = "", **options: object) -> AsyncGenerator[Attack]:
    environment_folder(folder, ATTACKER, needs=needs)
    async with await EnvironmentHost.start(folder, **options) as host:
        yield Attack(host)


async def all_ended(processes: list[psutil.Process]) -> None:
    await until(lambda: not any(is_running(process.pid) for process in processes))


REFUSED_IN_CONTAINERS = dict.fromkeys(("attributes", "process_tree", "proc", "kernel_memory"), "")
"""Protections that take a namespace or a cgroup."""


@pytest.fixture
def published(flash_home: Path) -> Path:
    """Where the attacker's folder lies once it was pushed, beside a database and another's environment."""
    open_store().add_environment(name="other", digest="0", path="/", size_bytes=0)
    other = environments_dir() / "other" / "0"
    other.mkdir(parents=True)
    (other / "environment.py").write_text("answers = [42]")
    return environments_dir() / "attacker" / "1"


@pytest.mark.hostile("state")
async def test_state_is_out_of_reach_though_the_environment_lies_within_it(published: Path, flash_home: Path) -> None:
    async with attack_on(published) as attack:
        assert not any({**attack.host.sandbox, **REFUSED_IN_CONTAINERS}.values()), describe(attack.host.sandbox)
        for path in (flash_home / "flash.db", flash_home / "environments" / "other" / "0" / "environment.py"):
            fault = await attack.fault(f"open({str(path)!r}).read()")
            if attack.host.sandbox["attributes"]:  # in a mount namespace there is no such file
                assert (fault.code, "Permission denied" in fault.what) == ("environment_access", True), fault.what
                assert "its own folder" in fault.what
            else:
                assert "No such file" in fault.what
        told = await attack.told(f"import os; told = os.system('cat {flash_home}/flash.db >/dev/null 2>&1')")
        assert told != "0"
        (flash_home.parent / "beside").touch()
        for hidden in (flash_home / "flash.db", flash_home / "environments" / "other", flash_home.parent / "beside"):
            names = f"import os; told = os.listdir({str(hidden.parent)!r})"
            if attack.host.sandbox["attributes"]:
                assert (await attack.fault(names)).code == "environment_access"
            else:
                assert hidden.name not in await attack.told(names), "only the way to its own folders is there"
        assert "Addition" in await attack.told("told = open('environment.py').read()")


@pytest.mark.hostile("state")
async def test_secrets_of_a_folder_that_a_push_leaves_out_are_out_of_reach(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows").write_text("42")
    (folder / ".env").write_text("JUDGE_KEY=secret")
    (tmp_path / "outside").write_text("")
    (folder / "link").symlink_to(tmp_path / "outside")
    async with attack_on(folder) as attack:
        for path in (".env", "link"):
            fault = await attack.fault(f"open({path!r})")
            assert "No such file" in fault.what or fault.code == "environment_access"
        assert await attack.told("told = open('data/rows').read()") == "42"
        assert "Addition" in await attack.told("told = open('environment.py').read()")


@pytest.mark.hostile("state")
async def test_state_behind_a_link_or_dots_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, link = tmp_path / "data", tmp_path / "link"
    (data / "state").mkdir(parents=True)
    (data / "state" / "flash.db").write_text("")
    (data / "rows").write_text("42")
    (data / "round").symlink_to(tmp_path)
    (data / "alias").symlink_to(data / "state")
    link.symlink_to(data / "state")
    monkeypatch.setenv("FLASH_READABLE", str(data))
    for home in (link, data / ".." / "data" / "state"):
        monkeypatch.setenv("FLASH_HOME", str(home))
        async with attack_on(tmp_path / "environment") as attack:
            fault = await attack.fault(f"open({str(data / 'state' / 'flash.db')!r})")
            assert "No such file" in fault.what or fault.code == "environment_access"
            assert await attack.told(f"told = open({str(data / 'rows')!r}).read()") == "42"


async def test_parts_of_the_state_may_lie_on_other_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, other, link = tmp_path / "state", tmp_path / "other", tmp_path / "link"
    state.mkdir()
    link.symlink_to(state)
    for name in ("environments", "scratch"):
        (other / name).mkdir(parents=True)
        (state / name).symlink_to(other / name)
    (state / "secret").write_text("planted")
    monkeypatch.setenv("FLASH_HOME", str(link))
    async with attack_on(link / "environments" / "attacker") as attack:
        assert "Addition" in await attack.told("told = open('environment.py').read()")
        code = "import tempfile; file = tempfile.NamedTemporaryFile('w+'); told = file.write('kept')"
        assert await attack.told(code) == "4"
        if not attack.host.sandbox["attributes"]:
            for place in (state, link):
                fault = await attack.fault(f"import os; os.stat({str(place / 'secret')!r})")
                assert "No such file" in fault.what


@pytest.mark.hostile("state")
async def test_it_writes_to_its_temporary_folder_alone_and_that_is_removed(tmp_path: Path, flash_home: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with attack_on(tmp_path / "environment") as attack:
        targets = (tmp_path / "environment" / "x", outside / "x", "/dev/x", "/etc/x", "/usr/x", Path.home() / "x")
        for target in map(str, targets):
            assert (await attack.fault(f"open({target!r}, 'w')")).code == "environment_access", target
        assert (await attack.fault("import os; os.remove('environment.py')")).code == "environment_access"
        code = """
            import os, subprocess, tempfile
            folder = tempfile.mkdtemp()
            open(os.path.join(folder, "x"), "w").write("kept")
            subprocess.run(["cp", "x", "y"], cwd=folder, check=True)
            told = folder + "|" + open(os.path.join(folder, "y")).read()
            os.mkdir(os.path.join(folder, "locked"))
            open(os.path.join(folder, "locked", "z"), "w").close()
            os.chmod(os.path.join(folder, "locked"), 0)
        """
        folder, content = (await attack.told(code)).split("|")
        assert content == "kept" and Path(folder).is_dir()  # noqa: ASYNC240
    assert not Path(folder).parent.exists() and list(outside.iterdir()) == []


async def test_a_folder_that_the_operator_names_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("42")
    read = f"told = open({str(tmp_path / 'data' / 'rows')!r}).read()"
    async with attack_on(tmp_path / "environment") as attack:
        (tmp_path / "environment" / "linked").symlink_to(tmp_path / "data")
        for refused in (read, "open('linked/rows')"):
            assert "FLASH_READABLE" in (await attack.fault(refused)).what
        assert (await attack.fault("open('rows')")).code == "environment_error"
    monkeypatch.setenv("FLASH_READABLE", str(tmp_path / "data"))
    async with attack_on(tmp_path / "environment") as attack:
        assert await attack.told(read) == "42"


@pytest.mark.hostile("state")
async def test_terminals_of_others_are_out_of_reach_and_its_own_work(tmp_path: Path) -> None:
    _, operators = os.openpty()
    async with attack_on(tmp_path) as attack:
        assert (await attack.fault(f"open({os.ttyname(operators)!r}, 'w')")).code.startswith("environment_")
        if attack.host.sandbox["attributes"]:
            pytest.skip(f"no terminals of its own: {attack.host.sandbox['attributes']}")
        code = "import os; one, other = os.openpty(); os.write(other, b'own'); told = os.read(one, 9)"
        assert await attack.told(code) == "b'own'"


@pytest.mark.hostile("state")
async def test_an_interpreter_in_the_users_home_does_not_open_that_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python3").symlink_to(Path(sys.executable).resolve())  # noqa: ASYNC240
    (home / "secret").write_text("")
    environment_folder(tmp_path / "folder", ATTACKER)
    server = [home / "bin" / "python3", "-c", AS_A_USER, tmp_path / "folder", f"open({str(home / 'secret')!r})"]
    repository = {"PYTHONPATH": str(CALCULATOR.parents[2])}
    told = subprocess.check_output(server, cwd=tmp_path, env=repository, timeout=WAIT_S)  # noqa: ASYNC221
    assert json.loads(told.splitlines()[-1])[1] == ["environment_access"]


async def test_a_virtual_environment_works_wherever_it_and_its_python_lie(tmp_path: Path) -> None:
    pythons = tmp_path / "home" / ".local" / "pythons"  # as uv keeps them: a link for each minor version
    pythons.mkdir(parents=True)
    (pythons / "cpython").symlink_to(sys.base_prefix)
    (tmp_path / "disk").mkdir()
    (tmp_path / "home" / "venvs").symlink_to("../disk/../disk")
    venv = tmp_path / "home" / "venvs" / "ours"
    (data := tmp_path / "disk" / "data").mkdir()
    (data / "rows").write_text("42")
    (tmp_path / "rows").symlink_to(data)
    python = pythons / "cpython" / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.check_call([python, "-m", "venv", "--without-pip", "--symlinks", venv])  # noqa: ASYNC221
    environment_folder(tmp_path / "folder", ATTACKER)
    code = f"""
import subprocess, sys
rows = open({str(tmp_path / "rows" / "rows")!r}).read()
told = [sys.prefix, rows, subprocess.check_output([sys.executable, "-c", ""])]
"""
    server = [venv / "bin" / "python", "-c", AS_A_USER, tmp_path / "folder", code]
    variables = {"PYTHONPATH": ROOT, "FLASH_READABLE": tmp_path / "rows", "FLASH_HOME": tmp_path / "state"}
    told = subprocess.check_output(server, cwd=tmp_path, env=variables, timeout=WAIT_S)  # noqa: ASYNC221
    assert json.loads(told.splitlines()[-1])[1] == [str([str(venv), "42", b""])]


@pytest.mark.hostile("state")
async def test_no_descriptor_of_the_host_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "private").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        async with attack_on(tmp_path / "environment") as attack:
            code = "import os; told = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1]]"
            assert "private" not in await attack.told(code)
            listed = "import subprocess; told = subprocess.check_output(['ls', '/proc/self/fd'], text=True).split()"
            assert await attack.told(listed) == "['0', '1', '2', '3']"  # 3 is the folder that ls reads


@pytest.mark.hostile("processes")
async def test_it_sees_its_own_processes_only(tmp_path: Path) -> None:
    listed = "import os; told = sorted(int(name) for name in os.listdir('/proc') if name.isdecimal())"
    async with attack_on(tmp_path) as attack:
        if why := attack.host.sandbox["process_tree"] or attack.host.sandbox["proc"]:
            pytest.skip(why)
        assert await attack.told(listed) == "[2]", "the first process can be traced by nobody"


RAW = "from ctypes import *; from socket import *; libc = CDLL(None, use_errno=True); "
RING = 'libc.syscall(425, 8, b"\\0" * 120)'  # io_uring_setup


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.hostile("network")
async def test_the_network_is_refused_and_the_refusal_says_how_to_ask(tmp_path: Path, listener: socket.socket) -> None:
    address = listener.getsockname()
    async with attack_on(tmp_path) as attack:
        for code in (
            f"import socket; socket.create_connection({address!r})",
            "import urllib.request; urllib.request.urlopen('http://example.com', timeout=5)",
        ):
            fault = await attack.fault(code)
            assert (fault.code, "network = true" in fault.what) == ("environment_network", True), fault.what
        # Past Python: the kernel refuses, whatever the program and the kind of socket.
        for code in ("AF_INET, SOCK_STREAM", "AF_INET6, SOCK_DGRAM", "AF_UNIX, SOCK_STREAM", "AF_NETLINK, SOCK_RAW"):
            assert await attack.told(f"{RAW}told = libc.socket({code}, 0), get_errno(), {RING}") == "(-1, 13, -1)"
        bash = f"import subprocess; told = subprocess.run(['bash', '-c', 'exec 3<>/dev/tcp/127.0.0.1/{address[1]}'])"
        assert "returncode=1" in await attack.told(bash)


@pytest.mark.hostile("network")
async def test_a_pair_of_sockets_reaches_nobody_else(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind(str(tmp_path / "socket"))
        async with attack_on(tmp_path / "environment") as attack:
            for kind in ("SOCK_DGRAM", "SOCK_RAW", "SOCK_DGRAM | SOCK_CLOEXEC"):
                pair = f"from socket import *; socketpair(AF_UNIX, {kind})[0].sendto(b'', {outside.getsockname()!r})"
                assert "Permission denied" in (await attack.fault(pair)).what
            for kind in ("SOCK_STREAM", "SOCK_SEQPACKET", "SOCK_STREAM | SOCK_NONBLOCK"):
                pair = f"from socket import *; a, b = socketpair(AF_UNIX, {kind}); a.send(b'x'); told = b.recv(1)"
                assert await attack.told(pair) == "b'x'"


def grant(home: Path, *names: str) -> None:
    allow(home, f"network = {json.dumps(names)}")


@pytest.mark.hostile("network")
async def test_an_environment_that_the_operator_names_gets_the_network_it_asks_for(tmp_path, flash_home, listener):
    grant(flash_home, "search")
    async with attack_on(tmp_path / "search", "network = true", known_as="search") as attack:
        assert "asks for it" in attack.host.sandbox["network"]
        assert await attack.told(f"import socket; told = socket.create_connection({listener.getsockname()!r})")
        listener.accept()[0].close()
        # Sockets of other families reach programs of this machine past any network.
        for code in ("AF_UNIX, SOCK_STREAM", "AF_NETLINK, SOCK_RAW", "40, SOCK_STREAM"):
            assert await attack.told(f"{RAW}told = libc.socket({code}, 0), get_errno()") == "(-1, 13)"
        pair = "from socket import *; a, b = socketpair(); a.send(b'x'); told = b.recv(1)"
        assert await attack.told(pair) == "b'x'"
        datagrams = "from socket import *; socketpair(AF_UNIX, SOCK_DGRAM)"
        assert "Permission denied" in (await attack.fault(datagrams)).what


@pytest.mark.hostile("network")
@pytest.mark.parametrize(
    ("granted", "known_as"),
    [
        ((), "search"), (("search",), "bob/search"), (("bob/search",), "search"), (("search",), "searching"),
        (("search",), ""),
    ],
)  # fmt: skip
async def test_no_environment_grants_itself_the_network(tmp_path, flash_home, granted: tuple[str, ...], known_as: str):
    grant(flash_home, *granted)
    with pytest.raises(EnvironmentFault) as caught:
        async with attack_on(tmp_path / "search", "network = true", known_as=known_as):
            pass
    assert caught.value.code == "network_not_granted" and f"not grant to {known_as!r}" in caught.value.what
    grant(flash_home, "*")
    async with attack_on(tmp_path / "search", "network = true", known_as=known_as):
        pass


@pytest.mark.hostile("resources")
async def test_a_memory_hog_gets_an_error_and_its_episode_alone_fails(tmp_path: Path) -> None:
    async with attack_on(tmp_path, "memory_gib = 0.5", concurrency=1) as attack:
        fault = await attack.fault("told = len(bytearray(3 << 30))")
        assert (fault.code, "memory_gib" in fault.what) == ("environment_memory", True), fault.what
        assert await attack.told("told = len(bytearray(1 << 20))") == "1048576"


@pytest.mark.hostile("resources")
async def test_many_processes_that_together_use_too_much_memory_are_ended(tmp_path: Path) -> None:
    hogs = """
        import subprocess, sys, time
        hog = "import time; held = bytearray(b'x' * (150 << 20)); time.sleep(60)"
        several = [subprocess.Popen([sys.executable, "-S", "-c", hog]) for _ in range(4)]
        time.sleep(60)
    """
    async with attack_on(tmp_path, "memory_gib = 0.4") as attack:
        fault = await attack.fault(hogs)
        assert (fault.code, "more memory" in fault.what) == ("environment_memory", True), fault.what
        assert await attack.told("told = 1") == "1"


@pytest.mark.hostile("resources")
@pytest.mark.parametrize("made", ["mmap.mmap(-1, size)", "mmap.mmap(file, size)"])
async def test_memory_that_is_shared_counts_once(tmp_path: Path, made: str) -> None:
    share = f"""
        import mmap, os, time
        size = SIZE << 20
        file = os.memfd_create("shared")
        os.ftruncate(file, size)
        held = {made}
        for _ in range(3):
            if children := os.fork() == 0:
                break
        for place in range(0, size, 4096):
            held[place] = 1
        time.sleep(2 if SIZE < 300 else 25)
        if children:
            os._exit(0)
        told = "fits"
    """
    async with attack_on(tmp_path, "memory_gib = 0.5") as attack:
        assert await attack.told(share.replace("SIZE", "250")) == "fits"
        assert (await attack.fault(share.replace("SIZE", "700"))).code == "environment_memory"


async def test_processes_that_end_while_their_memory_is_read_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_kib = 250 << 10
    alive = {1, 2, 3, 4}

    def read(pid: int, file: str, *names: str) -> int:
        if pid not in alive:
            return 0
        if file == "status":
            return shared_kib
        share = shared_kib // len(alive)
        if len(alive) > 1:
            alive.remove(pid)  # as soon as its share has been read
        return share

    monkeypatch.setattr(warden, "_kibibytes", read)
    assert not warden._uses_more({*alive}, 500 << 20) and warden._uses_more({*alive}, 200 << 20)


@pytest.mark.hostile("resources")
@pytest.mark.parametrize("name", ["\x0bRssAnon:-99999", "\rRssAnon:much"])
def test_the_name_of_a_process_takes_nothing_from_its_memory(name: str) -> None:
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout and process.stdout.readline()
        assert name.strip().encode() in Path(f"/proc/{process.pid}/status").read_bytes()[:40]
        assert 1000 < warden._resident(process.pid) < 10**6


@pytest.mark.hostile("scratch")
def test_packages_in_a_home_that_foreign_code_writes_to_do_not_run_outside_the_sandbox(tmp_path: Path) -> None:
    """Virtual environments have no such packages; the Python of a machine does."""
    variables = {"HOME": str(tmp_path)}
    python = cast("Any", sys)._base_executable
    where = [python, "-P", "-c", "import site; print(site.getusersitepackages())"]
    packages = Path(subprocess.check_output(where, env=variables, text=True, timeout=WAIT_S).strip())
    packages.mkdir(parents=True)
    (packages / "attacker.pth").write_text("import os; os.write(1, b'ran')\n")
    assert subprocess.check_output([python, "-P", "-c", ""], env=variables, timeout=WAIT_S) == b"ran"
    assert b"ran" not in subprocess.check_output([python, *PYTHON[1:], "this"], env=variables, timeout=WAIT_S)
    assert WARDEN[: len(PYTHON)] == PYTHON


@pytest.mark.hostile("resources")
@pytest.mark.parametrize("hoard", ["file", "sockets"])
async def test_memory_that_the_kernel_keeps_counts_where_a_cgroup_can_be_made(tmp_path: Path, hoard: str) -> None:
    code = f"""
        import os, socket, time
        if {hoard!r} == "file":
            file = os.memfd_create("hoard")
            for _ in range(400):
                os.write(file, bytes(1 << 20))
        held = []
        while {hoard!r} == "sockets" and len(held) < 4000:
            pair = socket.socketpair()
            held.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(1 << 16))
                except BlockingIOError:
                    pass
        time.sleep(2)
        told = "kept"
    """
    async with attack_on(tmp_path, "memory_gib = 0.25") as attack:
        if why := attack.host.sandbox["kernel_memory"]:
            pytest.skip(why)
        fault = await attack.fault(code)
        assert fault.code == "environment_memory", fault.what
        assert await attack.told("told = 1") == "1"


OF_VERSION_2 = """
import os, sys
from pathlib import Path
from environments.sandbox.warden import make_group
from environments.sandbox.kernel import checked, libc
MS_REC_PRIVATE = 0x4000 | 0x40000
libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None)
for line in Path("/proc/self/mountinfo").read_text().splitlines():  # version 1 would come first
    if " - cgroup " in line:
        libc.umount2(line.split()[4].encode(), 2)
place = Path(sys.argv[1])
checked(libc.mount(b"none", str(place).encode(), b"cgroup2", 0, None))
if "memory" not in (place / "cgroup.controllers").read_text().split():
    print("the memory controller of this kernel belongs to version 1")
    sys.exit()
(place / "cgroup.subtree_control").write_text("+memory")
group = make_group(32 << 20)
assert group.events == "memory.events", group
if (pid := os.fork()) == 0:
    assert group.enter()
    file = os.memfd_create("hoard")
    for _ in range(100):
        os.write(file, bytes(1 << 20))
    os._exit(0)
status = os.waitpid(pid, 0)[1]
assert os.WTERMSIG(status) == 9, status
assert group.has_killed()
group.remove()
assert not group.folder.exists()
"""


@pytest.mark.hostile("resources")
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="only root can mount cgroups")
async def test_a_cgroup_of_version_2_bounds_what_the_kernel_keeps(tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", OF_VERSION_2, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)  # noqa: ASYNC221
    assert done.returncode == 0, done.stderr
    if done.stdout:
        pytest.skip(done.stdout)


@pytest.mark.hostile("resources")
async def test_a_file_that_grows_too_large_is_an_error(tmp_path: Path) -> None:
    code = """
        import os, tempfile
        with open(os.path.join(tempfile.mkdtemp(), "x"), "wb") as stream:
            stream.truncate(64 << 20)
    """
    async with attack_on(tmp_path, "file_gib = 0.01") as attack:
        fault = await attack.fault(code)
        assert (fault.code, "file_gib" in fault.what) == ("environment_file_size", True), fault.what


@pytest.mark.hostile("resources")
async def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    bomb = """
        import os, sys, time
        mine = []
        try:
            while True:
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    time.sleep(600)
                mine.append(pid)
        except BlockingIOError as error:
            raise RuntimeError(f"stopped at {len(mine)}") from error
    """
    async with attack_on(tmp_path, "processes = 40", concurrency=8) as attack:
        fault = await attack.fault(bomb)
        assert (fault.code, "processes of its environment.toml" in fault.what) == ("environment_processes", True)
        assert 10 <= int(fault.what.partition("stopped at ")[2].partition(" ")[0]) <= 48
        bombs = attack.processes()
        assert len(bombs) >= 12
    await all_ended(bombs)


async def test_the_limits_are_one_hosts_own(tmp_path: Path) -> None:
    async with attack_on(tmp_path / "a", "processes = 30") as one, attack_on(tmp_path / "b", "processes = 30") as other:
        sleepers = "import subprocess; told = [subprocess.Popen(['sleep', '60']).pid for _ in range(20)]"
        assert await one.told(sleepers) and await other.told(sleepers)


@pytest.mark.hostile("resources")
async def test_what_it_prints_without_end_does_not_fill_the_log(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("environments.process.child_process.MAX_PRINTED_BYTES", 100_000)
    async with attack_on(tmp_path) as attack:
        flood = "import os\nfor _ in range(200): os.write(2, b'flood ' * 10_000)\n"
        assert "last words" in (await attack.fault(f"{flood}os.write(2, b'last words')\nos._exit(3)")).traceback
    printed = capfd.readouterr().err
    assert 100_000 <= len(printed) < 101_000 and "the rest is left out" in printed


@pytest.mark.hostile("resources")
async def test_an_answer_that_is_too_long_is_that_calls_error(tmp_path: Path) -> None:
    async with attack_on(tmp_path) as attack:
        assert "more than the 8,388,608 of one call" in (await attack.fault("told = 'x' * (9 << 20)")).what
        assert await attack.told("told = 1") == "1"


@pytest.mark.hostile("resources")
async def test_forged_replies_end_the_process_and_not_the_host(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("environments.process.child_process.MAX_LINE_BYTES", 1 << 20)
    forge = """
        import os, time
        while True:
            for number in range(3, 20):
                try:
                    os.write(number, {})
                except OSError:
                    pass
            time.sleep(0.001)
    """
    async with attack_on(tmp_path) as attack:
        assert "what is no reply" in (await attack.fault(forge.format("b'nonsense\\n'"))).what
        assert "longer than 1,048,576 bytes" in (await attack.fault(forge.format("b'x' * 65536"))).what
        assert await attack.told("told = 1") == "1"


@pytest.mark.hostile("resources")
@pytest.mark.parametrize(
    ("asked", "allowed", "named"),
    [
        ("memory_gib = 100000", "", "memory_gib = 100000 is more than the "),
        ("memory_gib = 2", "memory_gib = 1.5", "memory_gib = 2 is more than the 1.5 of this"),
        ("processes = 5000", "", "processes = 5000 is more than the 4096 of this machine"),
        ("file_gib = 65", "", "file_gib = 65 is more than the 64 of this machine"),
    ],
)
async def test_who_asks_for_more_than_the_operator_allows_is_refused_by_name(
    tmp_path: Path, flash_home: Path, asked: str, allowed: str, named: str
) -> None:
    allow(flash_home, allowed)
    with pytest.raises(EnvironmentFault) as caught:
        async with attack_on(tmp_path / "environment", asked):
            pass
    assert caught.value.code == "environment_invalid"
    assert named in caught.value.what and "settings.toml" in caught.value.what
    allow(flash_home, "memory_gib = 200000\nprocesses = 6000\nfile_gib = 66")
    async with attack_on(tmp_path / "environment", asked):
        pass


async def test_who_asks_for_nothing_gets_no_more_than_the_operator_allows(tmp_path: Path, flash_home: Path) -> None:
    allow(flash_home, "memory_gib = 0.5")
    async with attack_on(tmp_path / "environment", concurrency=1) as attack:
        assert (await attack.fault("told = len(bytearray(3 << 30))")).code == "environment_memory"


@pytest.mark.hostile("resources")
async def test_one_owner_does_not_take_all_places(tmp_path: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    allow(flash_home, "at_once = 3\nat_once_per_owner = 2")
    folder = environment_folder(tmp_path / "environment", "", returns="Echo()")

    def start(known_as: str) -> Coroutine[None, None, EnvironmentHost]:
        return EnvironmentHost.start(folder, known_as=known_as, place_timeout_s=0.2)

    async with AsyncExitStack() as held:
        first = await held.enter_async_context(await start("bob/a"))
        await held.enter_async_context(await start("bob/b"))
        with pytest.raises(EnvironmentFault, match="2 environments of bob run") as caught:
            await start("bob/c")
        assert caught.value.code == "environments_busy"
        await held.enter_async_context(await start("a"))
        with pytest.raises(EnvironmentFault, match=r"3 environments .*\(bob 2, local 1\)"):
            await start("b")
        waiting = asyncio.create_task(EnvironmentHost.start(folder, known_as="b", place_timeout_s=60))
        await asyncio.sleep(0)
        await first.stop()
        await held.enter_async_context(await waiting)


DAEMON = """
import os, subprocess, time
read, write = os.pipe()
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        time.sleep(600)
    os._exit(0)
told = os.read(read, 20).decode()
os.waitpid(middle, 0)
"""


@pytest.mark.hostile("leftovers")
@pytest.mark.parametrize("end", ["stop", "crash", "warden told to end"])
async def test_daemons_of_environment_code_end_with_it(tmp_path: Path, end: str) -> None:
    async with attack_on(tmp_path) as attack:
        daemon = attack.process(await attack.told(DAEMON))
        warden, first, *_ = processes = attack.processes()
        assert daemon in processes and daemon.ppid() == first.pid
        if end == "crash":
            await attack.fault("import os; os.abort()")
        if end == "warden told to end":
            warden.terminate()
    await all_ended(processes)


@pytest.mark.hostile("leftovers")
async def test_all_ends_with_a_warden_or_a_first_process_that_is_killed(tmp_path: Path) -> None:
    async with attack_on(tmp_path) as attack:
        if why := attack.host.sandbox["process_tree"]:
            pytest.skip(why)
        for victim in range(2):
            await attack.told(DAEMON)
            processes = attack.processes()
            assert len(processes) == 4
            processes[victim].kill()
            await all_ended(processes)
            await until(lambda: not attack.host._children[-1].alive)


@pytest.mark.hostile("unprotected")
@pytest.mark.parametrize("refused", ["landlock", "landlock,namespaces"])
@pytest.mark.parametrize("user", ["root", "another"])
async def test_no_code_runs_where_files_cannot_be_protected_unless_the_operator_says_so(
    tmp_path: Path, flash_home: Path, refused: str, user: str
) -> None:
    environment_folder(tmp_path / "folder", "print('it ran', flush=True)", returns="Echo()")
    refusing = [sys.executable, "-m", "tests.refusing", refused]
    if user == "another":
        if os.getuid() != 0 or not shutil.which("setpriv"):
            pytest.skip("only root can be another user")
        # It keeps the right to open root's files, where this Python may lie.
        powers = "-all,+dac_override"
        refusing = ["setpriv", "--reuid", "4242", "--inh-caps", powers, "--ambient-caps", powers, *refusing]
    elif os.getuid() != 0:
        pytest.skip("this is another user already")
    command = [*refusing, sys.executable, "-c", AS_A_USER, tmp_path / "folder"]
    told = subprocess.check_output(command, timeout=WAIT_S, text=True, cwd=ROOT)  # noqa: ASYNC221
    assert told.startswith("environment_unprotected "), told
    assert "Landlock" in told and "it ran" not in told
    if user == "another":
        return  # without powers it cannot start this Python
    allow(flash_home, "without_file_protection = true")
    told = subprocess.check_output(command, timeout=WAIT_S, text=True, cwd=ROOT)  # noqa: ASYNC221
    assert json.loads(told.splitlines()[-1])[0]["files"].startswith("this kernel has no Landlock"), told


@pytest.mark.hostile("unprotected")
@pytest.mark.parametrize("refused", ["mount", "pivot_root", "mount_setattr"])
async def test_where_no_root_of_its_own_can_be_had_landlock_keeps_files_out_of_reach(tmp_path: Path, refused: str):
    (tmp_path / "secret").touch()
    environment_folder(tmp_path / "folder", ATTACKER)
    attacks = [f"open({str(tmp_path / 'secret')!r})", "import os; told = os.getcwd()"]
    attacks += ["import os; told = os.listdir()", "import tempfile; told = tempfile.TemporaryFile().write(b'x')"]
    refusing = [sys.executable, "-m", "tests.refusing", refused]
    command = [*refusing, sys.executable, "-c", AS_A_USER, tmp_path / "folder", *attacks]
    told = subprocess.check_output(command, timeout=WAIT_S, cwd=ROOT)  # noqa: ASYNC221
    sandbox, told = json.loads(told.splitlines()[-1])
    assert "can be had" in sandbox["attributes"] and not sandbox["files"]
    assert told == ["environment_access", str(tmp_path / "folder"), "['environment.py']", "1"]


AS_A_USER = """
import asyncio, json, sys
from pathlib import Path
from environments.process.host import EnvironmentFault, EnvironmentHost
async def main():
    async with await EnvironmentHost.start(Path(sys.argv[1])) as host:
        told = []
        for code in sys.argv[2:]:
            episode = (await host.open("train", 0)).episode
            try:
                told.append((await host.step(episode, code)).messages[0]["content"])
            except EnvironmentFault as fault:
                told.append(fault.code)
        print(json.dumps([host.sandbox, told]))
try:
    asyncio.run(main())
except EnvironmentFault as fault:
    print(fault.code, fault.what, fault.traceback)
"""


FLED = """
import os, sys, time
def flee(depth):
    while depth:
        if os.fork():
            time.sleep(600)
        os.setsid()
        depth -= 1
    while True:  # as many as it may have, each of which starts another one when one ends
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            time.sleep(0.02)
"""


def left_of(mark: str) -> list[psutil.Process]:
    """Processes that have `mark` among their variables."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FLASH_MARK") == mark:
                found.append(process)
    return [process for process in found if is_running(process.pid)]


@pytest.mark.hostile("leftovers")
@ONLY_ROOT
@pytest.mark.parametrize("depth", [0, 100])
async def test_a_fork_bomb_ends_where_no_namespace_can_be_had(tmp_path: Path, depth: int) -> None:
    environment_folder(tmp_path / "folder", ATTACKER, needs=f"processes = {depth + 150}")
    bomb = f"""
import os
os.environ["FLASH_MARK"] = "x"
pid = os.fork()
if pid == 0:
    os.execv({sys.executable!r}, ["python", "-S", "-c", {FLED + f"flee({depth})"!r}])
import time
deadline = time.monotonic() + 25
while time.monotonic() < deadline:
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    names = [n for n in numbers if os.path.exists(f"/proc/{{n}}") and os.stat(f"/proc/{{n}}").st_uid == os.getuid()]
    if len(names) > {depth} + 100:
        break
    time.sleep(0.1)
told = len(names)
"""
    server = [*POWERLESS, sys.executable, "-c", AS_A_USER, tmp_path / "folder", bomb]
    done = subprocess.run(server, capture_output=True, text=True, timeout=WAIT_S, check=False)  # noqa: ASYNC221
    sandbox, (told,) = json.loads(done.stdout.splitlines()[-1])
    assert "no PID namespace can be had" in sandbox["process_tree"]
    assert int(told) > depth + 100, told
    assert "Traceback" not in done.stderr and left_of("x") == []


@pytest.mark.hostile("leftovers")
async def test_a_long_chain_of_processes_is_walked_without_recursion() -> None:
    """A chain of 1,150 once raised RecursionError; 150 do so where Python may recurse 100 deep."""
    chain = "import os, time\nfor _ in range(150):\n    if os.fork(): break\ntime.sleep(60)"
    top = subprocess.Popen([sys.executable, "-S", "-c", chain])  # noqa: ASYNC220
    usual = sys.getrecursionlimit()
    depth = len(inspect.stack())
    found: set[int] = set()
    try:
        async with asyncio.timeout(60):
            while len(found) < 150:
                sys.setrecursionlimit(depth + 100)
                found = warden._descendants(top.pid)
                sys.setrecursionlimit(usual)
                await asyncio.sleep(0.01)
    finally:
        sys.setrecursionlimit(usual)
        top.kill()
        top.wait()
        for pid in found:
            os.kill(pid, 9)


async def test_a_call_behind_the_walls_costs_what_it_cost_before(tmp_path: Path) -> None:
    """The walls are the kernel's: nothing is done for a call, but to search what it says for secrets."""
    environment_folder(tmp_path, "", returns="Echo()")
    async with await EnvironmentHost.start(tmp_path, secrets={"KEY": "a-secret-of-usual-length"}) as host:
        opening = await host.open("train", 0)
        text, seconds = "word " * 400, []
        for _ in range(200):
            begun = time.perf_counter()
            await host.step(opening.episode, text)
            seconds.append(time.perf_counter() - begun)
        assert min(seconds) < 0.02


def test_the_defaults_are_what_is_left_out() -> None:
    asked = {"network": True, "processes": 9}
    assert Needs().requested() == {} and Needs(**asked).requested() == asked
