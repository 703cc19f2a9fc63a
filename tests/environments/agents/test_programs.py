"""Programs of several rollouts in one environment: what a hostile one learns of the others."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from environments.process.host import EnvironmentHost
from tests.folders import environment_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Landlock is Linux's"),
]
PROGRAMS = """
import sys
from environments import EnvironmentCommand


class Sample(EnvironmentCommand):
    dataset = [TaskExample({}, "", id="victim.py"), TaskExample({}, "", id="attacker.py")]

    def command(self, example):
        return [sys.executable, f"{os.path.dirname(__file__)}/{example.id}"]
"""
CLIENT = """
import ctypes, glob, http.client, json, os, signal, socket, sys, tempfile
from pathlib import Path
from urllib.parse import urlsplit

KEY = os.environ["OPENAI_API_KEY"]
url = urlsplit(os.environ["OPENAI_BASE_URL"])


def ask(key=KEY, path="/v1/responses", method="POST", **fields):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    body = json.dumps({"model": "policy", "input": "x", **fields})
    connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return answer.status, said


def end(**fields):
    Path(os.environ["FLASH_REWARD_FILE"]).write_text(json.dumps({"score": 1.0, **fields}))
"""
VICTIM = (
    CLIENT
    + """
home = Path(os.environ["HOME"])
for folder in (".", home, os.environ["TMPDIR"]):
    Path(folder, "secret").write_text(KEY)
Path("/dev/shm/secret").write_text(KEY)
first = ask()[1]
told = json.dumps([os.getpid(), os.getppid(), str(home.parent), first["id"]])
ask(input=told, previous_response_id=first["id"])
end(reason=Path("secret").read_text() + str(list(Path(tempfile.gettempdir()).iterdir())))
"""
)
ACTS: dict[str, str] = {
    "its environment": "open(f'/proc/{VICTIM}/environ').read()",
    "its command line": "open(f'/proc/{VICTIM}/cmdline').read()",
    "its memory": "open(f'/proc/{VICTIM}/mem', 'rb').read(0)",
    "its descriptors": "os.listdir(f'/proc/{VICTIM}/fd')",
    "its folder by its process": "os.listdir(f'/proc/{VICTIM}/cwd/')",
    "its memory by a system call": "vm_read(VICTIM)",
    "tracing it": "trace(VICTIM)",
    "a signal": "os.kill(VICTIM, 0)",
    "its end": "os.kill(VICTIM, signal.SIGKILL)",
    "the server's environment": "open(f'/proc/{SERVER}/environ').read()",
    "the server's memory": "open(f'/proc/{SERVER}/mem', 'rb').read(0)",
    "the server's pipes": "os.listdir(f'/proc/{SERVER}/fd')",
    "the server's memory by a system call": "vm_read(SERVER)",
    "tracing the server": "trace(SERVER)",
    "the server's end": "os.kill(SERVER, signal.SIGKILL)",
    "the names of rooms": "os.listdir(os.path.dirname(ROOM))",
    "the names in its room": "os.listdir(ROOM)",
    "its working folder": "open(f'{ROOM}/work/secret').read()",
    "its home": "open(f'{ROOM}/home/secret').read()",
    "its temporary folder": "open(f'{ROOM}/tmp/secret').read()",
    "its reward": "open(f'{ROOM}/work/reward.json', 'w')",
    "its files": "os.unlink(f'{ROOM}/work/secret')",
    "the length of its files": "os.truncate(f'{ROOM}/work/secret', 0)",
    "its files under another name": "os.rename(f'{ROOM}/work/secret', 'secret')",
    "a link to its files": "[os.link(f'{ROOM}/work/secret', 'linked'), open('linked').read()]",
    "a symbolic link": "[os.symlink(f'{ROOM}/work', 'there'), open('there/secret').read()]",
    "a room beside its own": "os.mkdir(os.path.dirname(ROOM) + '/more')",
    "the names in shared memory": "os.listdir('/dev/shm')",
    "all processes": "others()",
    "the answers": "open(os.path.dirname(__file__) + '/datasets/eval.jsonl').read()",
    "the answers by a link": "open(os.path.dirname(__file__) + '/linked/eval.jsonl').read()",
    "inherited descriptors": "inherited()",
}
"""What an attacker tries with a victim that runs, whose process and room it knows. An act that is
refused raises OSError."""
REQUESTS = {
    "no key": 'ask(key="")',
    "a key of its own choice": 'ask(key="sk-" + "0" * 48)',
    "the start of its own key": "ask(key=KEY[:-1])",
    "the victim's response with its own key": "ask(previous_response_id=RESPONSE)",
    "reading the victim's response": 'ask(path=f"/v1/responses/{RESPONSE}", method="GET")',
}
ATTACKER = (
    CLIENT
    + f"""
VICTIM, SERVER, ROOM, RESPONSE = json.loads(ask()[1]["output"][0]["content"][0]["text"])
libc = ctypes.CDLL(None, use_errno=True)


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return "done"


def vm_read(pid):
    class Part(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))
    own = ctypes.create_string_buffer(1)
    # Nothing is mapped at 1: who may read gets EFAULT, who may not EPERM.
    parts = ctypes.byref(Part(ctypes.addressof(own), 1)), 1, ctypes.byref(Part(1, 1)), 1
    if libc.process_vm_readv(pid, *parts, 0) < 0 and ctypes.get_errno() != 14:
        raise OSError(ctypes.get_errno(), "refused")


def trace(pid):
    checked(libc.ptrace(16, pid, None, None))  # PTRACE_ATTACH


def others():
    found = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    if not found:
        raise ProcessLookupError


def inherited():
    if len(os.listdir("/proc/self/fd")) == 4:  # one of them lists
        raise OSError("none")


found = {{}}
os.kill(-1, signal.SIGTERM)  # whom it does not reach is no error
for name, act in {ACTS!r}.items():
    try:
        eval(act)
        found[name] = "done"
    except OSError as error:
        found[name] = type(error).__name__
for name, request in {REQUESTS!r}.items():
    found[name] = eval(request)[0]
source = open(os.path.dirname(__file__) + "/victim.py").read(9)
found["itself"] = [source, os.listdir(f"/proc/{{os.getpid()}}/cwd/"), os.kill(os.getpid(), 0)]
end(reason=json.dumps(found))
"""
)


@asynccontextmanager
async def programs(folder: Path, **sources: str) -> AsyncGenerator[EnvironmentHost]:
    environment_folder(folder, PROGRAMS)
    (folder / "environment.toml").write_text("endpoint = true\n")
    (folder / "datasets").mkdir()
    (folder / "datasets" / "eval.jsonl").write_text("{}")
    (folder / "linked").symlink_to(folder / "datasets")
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    async with await EnvironmentHost.start(folder) as host:
        yield host


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each act; and what the victim told at its end."""

    async def play() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("attack")
        async with programs(folder, victim=VICTIM, attacker=ATTACKER) as host:
            victim = (await host.open("train", 0)).episode
            await host.answer_call(victim, 0, "a0")
            told = await host.next_call(victim)
            assert not isinstance(told, str)
            attacker = (await host.open("train", 1)).episode
            await host.answer_call(attacker, 0, told.messages[-1]["content"])
            assert await host.next_call(attacker) == "done"
            found = json.loads((await host.score(attacker)).reason or "")
            await host.answer_call(victim, 1, "a1")
            assert await host.next_call(victim) == "done"
            return {**found, "victim": (await host.score(victim)).reason}

    return asyncio.run(play())


@pytest.mark.hostile("sessions")
@pytest.mark.parametrize("act", ACTS)
def test_a_program_learns_nothing_of_another_rollouts(attack: dict[str, Any], act: str) -> None:
    assert attack[act] in ("PermissionError", "ProcessLookupError", "FileNotFoundError", "OSError")


@pytest.mark.hostile("sessions")
@pytest.mark.parametrize("act", REQUESTS)
def test_a_key_opens_no_other_session(attack: dict[str, Any], act: str) -> None:
    assert attack[act] == (401 if "key" in act and "response" not in act else 404)


def test_who_attacks_and_who_is_attacked_work_as_before(attack: dict[str, Any]) -> None:
    source, listed, signalled = attack["itself"]
    assert source == "\nimport c" and listed and signalled is None
    assert attack["victim"].startswith("sk-") and "tmp/secret" in attack["victim"]
