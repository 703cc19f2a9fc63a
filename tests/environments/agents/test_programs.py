"""Programs of several rollouts in one environment: what a hostile one learns of the others."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from environments.agents import command as commands
from environments.agents.command import model_variables
from environments.process.host import EnvironmentHost
from environments.sandbox.landlock import knows_ports
from tests.environments.sandbox.test_acts import POWERLESS
from tests.folders import environment_folder
from tests.places import ROOT
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.linux]
PROGRAMS = """
import sys
import tempfile
from environments import EnvironmentCommand
class Sample(EnvironmentCommand):
    dataset = [TaskExample({}, "", id="victim.py"), TaskExample({}, "", id="attacker.py")]
    def __init__(self):
        with open(os.path.join(tempfile.gettempdir(), "written"), "w") as file:
            file.write("answers")
        open(os.path.join(tempfile.gettempdir(), "prompt"), "w").close()
    def command(self, example):
        return [sys.executable, f"{os.path.dirname(__file__)}/{example.id}"]
    def files(self, example):
        return ["client", os.path.join(tempfile.gettempdir(), "prompt")]
"""
CLIENT = """
import ctypes, glob, http.client, json, os, signal, socket, sys, tempfile
from pathlib import Path
from urllib.parse import urlsplit
ENVIRONMENT = os.path.dirname(__file__)
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
    "where its descriptors lead": "os.readlink(f'/proc/{VICTIM}/fd/1')",
    "what its descriptors read": "open(f'/proc/{VICTIM}/fd/1').read()",
    "its folder by its process": "os.listdir(f'/proc/{VICTIM}/cwd/')",
    "its memory by a system call": "vm_read(VICTIM)",
    "tracing it": "trace(VICTIM)",
    "a signal": "os.kill(VICTIM, 0)",
    "its end": "os.kill(VICTIM, signal.SIGKILL)",
    "the server's environment": "open(f'/proc/{SERVER}/environ').read()",
    "the server's memory": "open(f'/proc/{SERVER}/mem', 'rb').read(0)",
    "the server's descriptors": "os.listdir(f'/proc/{SERVER}/fd')",
    "the server's pipes": "[open(f'/proc/{SERVER}/fd/{number}') for number in range(3, 9)]",
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
    "the answers": "open(ENVIRONMENT + '/datasets/eval.jsonl').read()",
    "the answers by a link": "open(ENVIRONMENT + '/linked/eval.jsonl').read()",
    "the answers beside it": "open(ENVIRONMENT + '/tasks.jsonl').read()",
    "the answers in the environment's code": "open(ENVIRONMENT + '/environment.py').read()",
    "the answers by its process": "open('/proc/self/root' + ENVIRONMENT + '/tasks.jsonl').read()",
    "another program beside it": "open(ENVIRONMENT + '/victim.py').read()",
    "the names beside it": "os.listdir(ENVIRONMENT)",
    "what the operator lets the environment read": "open(ENVIRONMENT + '/../readable/rows').read()",
    "the names in that": "os.listdir(ENVIRONMENT + '/../readable')",
    "a file that the environment wrote": "open(os.path.dirname(os.path.dirname(ROOM)) + '/written').read()",
    "the environment's temporary folder": "os.listdir(os.path.dirname(os.path.dirname(ROOM)))",
    "inherited descriptors": "inherited()",
}
"""What an attacker tries with a victim that runs, whose process and room it knows. An act that is
refused raises OSError."""
SHOWN_BY_PROC = {"all processes", "its command line", "its descriptors", "the server's descriptors"}
"""Where no /proc of its own can be had: who runs, with which arguments, and the numbers of open files."""
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
source = open(ENVIRONMENT + "/attacker.py").read(9)
sys.path.insert(0, ENVIRONMENT + "/client")
import declared
open(os.path.dirname(os.path.dirname(ROOM)) + "/prompt").close()
found["itself"] = [source, os.listdir(f"/proc/{{os.getpid()}}/cwd/"), os.kill(os.getpid(), 0), declared.NAME]
end(reason=json.dumps(found))
"""
)


@asynccontextmanager
async def programs(folder: Path, **sources: str) -> AsyncGenerator[EnvironmentHost]:
    environment_folder(folder, PROGRAMS, needs="endpoint = true")
    (folder / "datasets").mkdir()
    (folder / "datasets" / "eval.jsonl").write_text("{}")
    (folder / "linked").symlink_to(folder / "datasets")
    (folder / "tasks.jsonl").write_text("{}")
    (folder / "client").mkdir()
    (folder / "client" / "declared.py").write_text("NAME = 'declared'")
    readable = folder.parent / "readable"
    readable.mkdir()
    (readable / "rows").write_text("{}")
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_READABLE", str(readable))
        async with await EnvironmentHost.start(folder) as host:
            yield host


async def played(folder: Path) -> dict[str, Any]:
    """What became of each act; and what the victim told at its end."""
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
        return {**found, "victim": (await host.score(victim)).reason, "sandbox": host.sandbox}


PLAY = """
import asyncio, json, sys
from pathlib import Path
from tests.environments.agents.test_programs import played
print(json.dumps(asyncio.run(played(Path(sys.argv[1])))))
"""


@pytest.fixture(scope="module", params=["namespaces", "container"])
def attack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("attack") / "environment"
    if request.param == "namespaces":
        return asyncio.run(played(folder))
    if os.getuid() != 0 or not shutil.which("setpriv") or not knows_ports():
        pytest.skip("only root can give powers up, and agents without namespaces need Linux 6.7")
    command = [*POWERLESS, sys.executable, "-c", PLAY, folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "no PID namespace can be had" in told["sandbox"]["process_tree"]
    return told


@pytest.mark.hostile("sessions")
@pytest.mark.parametrize("act", ACTS)
def test_a_program_learns_nothing_of_another_rollouts(attack: dict[str, Any], act: str) -> None:
    if act in SHOWN_BY_PROC and attack["sandbox"]["proc"]:
        assert attack[act] == "done", "docs/security.md says so"
        return
    assert attack[act] in ("PermissionError", "ProcessLookupError", "FileNotFoundError", "OSError")


@pytest.mark.hostile("sessions")
@pytest.mark.parametrize("act", REQUESTS)
def test_a_key_opens_no_other_session(attack: dict[str, Any], act: str) -> None:
    assert attack[act] == (401 if "key" in act and "response" not in act else 404)


def test_the_model_is_where_the_packages_of_frameworks_look_for_it() -> None:
    variables = model_variables("http://localhost:1/v1", "a key", "policy")
    names = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE")
    assert {variables[name] for name in names} == {"http://localhost:1/v1"}


def test_a_command_may_hold_a_text_that_is_too_long_for_a_path() -> None:
    assert commands._opened([sys.executable, "-c", "pass", "/" + "x" * 300], [], "/") == [sys.executable]


def test_who_attacks_and_who_is_attacked_work_as_before(attack: dict[str, Any]) -> None:
    source, listed, signalled, declared = attack["itself"]
    assert source == "\nimport c" and listed and signalled is None
    assert declared == "declared", "a folder that it declares is read, and so is a file elsewhere"
    assert attack["victim"].startswith("sk-") and "tmp/secret" in attack["victim"]
