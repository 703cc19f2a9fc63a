"""Secrets: from the server to environment code by way of memory alone, and out of all that a run leaves behind."""

import base64
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from environments.untrusted_text import Redactor
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.run_folder import RunFolder
from flash_mcp.protocol.spec import resolve, validate
from flash_mcp.server.mcp_server import server
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.supervisor import process, secrets
from flash_mcp.supervisor.process import is_supervised
from tests.folders import environment_folder
from tests.places import ROOT, TESTS
from tests.samples import queued_run
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
SECRET = 'pl4nted/"sécret"+value=42'
SUPERVISE = """
import sys
from pathlib import Path
from flash_mcp.supervisor.launch.local import LocalLauncher
from flash_mcp.supervisor.attempt import Timeouts
from flash_mcp.supervisor.loop import Supervisor, supervise

timeouts = Timeouts(poll_s=0.02, leave_s=2.0, idle_exit_s=60.0)
worker = (sys.executable, sys.argv[2])
supervise(Path(sys.argv[1]), lambda base: Supervisor(
    base, launcher=LocalLauncher(base / "attempts", gpus=[]), worker=worker, timeouts=timeouts))
"""
LEAKY = """
import base64, os, subprocess, sys, tempfile, threading
KEY = os.environ["PLANTED_KEY"]
B64 = [base64.b64encode(b"x" * n + KEY.encode() + b"yz").decode() for n in range(3)]
WAYS = [KEY, f"in {KEY} the midst", repr(KEY), *B64, base64.encodebytes(b"-" * 50 + KEY.encode()).decode(),
        base64.urlsafe_b64encode(KEY.encode()).decode(), KEY.encode().hex(), KEY[:6] + "\\n    " + KEY[6:]]
LOCK = threading.Lock()
print("loaded with", KEY, *WAYS, flush=True)
open(os.path.join(tempfile.mkdtemp(), "key"), "w").write(KEY)

class Sample(Echo):
    def __init__(self):
        self.dataset = tasks(3 * len(WAYS))
    def start_episode(self, example):
        self.way, self.how = WAYS[self.dataset.index(example) % len(WAYS)], self.dataset.index(example) // len(WAYS)
        return [{"role": "user", "content": f"prompt {self.way}"}]
    def step_episode(self, example, messages, assistant_response):
        with LOCK:  # half a line of one episode and half of another may be most of a secret, which no search finds
            sys.stderr.write("half a line " + self.way[:5]); sys.stderr.flush()
            sys.stderr.write(self.way[5:] + "\\n"); sys.stderr.flush()
            subprocess.run(["echo", self.way])
        if self.how == 1: raise ValueError(self.way) from KeyError({self.way: [self.way]})
        return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": self.way, self.way: self.way}])
    def score_episode(self, example, episode):
        if self.how == 2: return RewardResult(score=0.1, error=self.way)
        return RewardResult(score=0.5, reason=self.way, metrics=[RewardMetric(self.way, score=1.0)])
"""


@pytest.fixture
async def client() -> AsyncGenerator[Client]:
    async with Client(server) as connected:
        yield connected


@pytest.fixture
def supervisor(flash_home: Path) -> Iterator[Path]:
    """A supervisor that was started before any secret was set; the path of its log."""
    with supervisor_of(flash_home, str(TESTS / "environment_worker.py")) as log:
        yield log


@contextmanager
def supervisor_of(flash_home: Path, worker: str) -> Generator[Path]:
    flash_home.mkdir(mode=0o700)
    log = flash_home / "supervisor.log"
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, str(flash_home), worker], stdout=stream, stderr=stream,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    wait_for(lambda: is_supervised(flash_home) and (flash_home / secrets.NAME).exists())
    yield log
    child.kill()
    child.wait()


async def call(client: Client, tool: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """(structured result, all of it as text)."""
    result = await client.call_tool(tool, arguments)
    return result.structured_content or {}, json.dumps(result.model_dump(mode="json"), ensure_ascii=False)


async def ended(client: Client, run_id: str) -> tuple[dict[str, Any], str]:
    for _ in range(60):
        result, text = await call(client, "status", run_id=run_id, wait_s=2, detail="detailed")
        assert "run" in result, text
        if result["run"]["state"] in ("succeeded", "failed"):
            return result, text
    raise AssertionError(text)


def traces(data: bytes) -> list[str]:
    """How the secret stands in the data, if it does. Line breaks, escaped ones too, and indentation are passed over."""
    raw = SECRET.encode()
    forms = {"plain": raw, "escaped": json.dumps(SECRET)[1:-1].encode(), "hex": raw.hex().encode()}
    for offset in range(3):
        coded = base64.b64encode(b"x" * offset + raw)
        inner = coded[4 if offset else 0 : len(coded) // 4 * 4 - 4]
        forms |= {f"base64 at {offset}": inner, f"urlsafe at {offset}": inner.replace(b"+", b"-").replace(b"/", b"_")}
    joined = b"".join(line.strip() for line in data.replace(b"\\n", b"\n").split(b"\n"))
    return [name for name, form in forms.items() if form in data or form in joined]


async def test_a_planted_secret_is_nowhere_in_what_a_run_leaves_behind(
    client: Client, supervisor: Path, flash_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    assert traces(SECRET.encode()) and traces(base64.b64encode(b"-" + SECRET.encode())), "the search finds nothing"
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    folder = str(environment_folder(tmp_path / "leaky", LEAKY))
    said: list[str] = []
    named = {"secrets": ["PLANTED_KEY"]}
    wanted = {"environment": "leaky", "steps": 1}
    for tool, arguments in (
        ("env_test", {"folder": folder}),
        ("env_push", {"name": "leaky", "folder": folder}),
        ("train", {**wanted, "validate_only": True}),
        ("train", {**wanted, "idempotency_key": "k", "accept_failed_gate": True}),
    ):
        result, text = await call(client, tool, **arguments, **named)
        said.append(text)
    run_id = result["run_id"]
    outcome, text = await ended(client, run_id)
    assert outcome["run"]["state"] == "succeeded", text
    said.append(text)
    for which in ("worst", "best"):
        said.append((await call(client, "rollouts", run_id=run_id, which=which, limit=3))[1])
    said += [(await call(client, tool, **args))[1] for tool, args in (("status", {}), ("catalog", {}))]

    rows = list(RunFolder(open_store().run(run_id).folder).rollouts(1))
    assert len(rows) == 30
    for row in rows:  # every way of telling it was tried, and noticed
        assert "[secret]" in json.dumps([row["messages"], row["reason"], row["error"]]), row
        assert "[secret]" in json.dumps(row["messages"][0]), row
    assert any("[secret]" in name for row in rows for name in row["metrics"])
    places = {str(path): path.read_bytes() for path in flash_home.rglob("*") if path.is_file()}  # noqa: ASYNC240
    assert {"flash.db", "log.1", "supervisor.log", "1.1.jsonl"} <= {Path(path).name for path in places}
    places |= {f"tool result {n}": text.encode() for n, text in enumerate(said)}
    places["stderr of the server"] = "".join(capfd.readouterr()).encode()
    assert {place: found for place, data in places.items() if (found := traces(data))} == {}
    for row in open_store().query("SELECT * FROM rollouts"):
        assert not traces(json.dumps(dict(row), default=str).encode())


async def test_a_run_whose_secret_was_lost_says_so_and_goes_on_when_a_server_has_it(
    client: Client, supervisor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the machine: the run is in the database, and the value is in no memory."""
    monkeypatch.delenv("PLANTED_KEY", raising=False)
    folder = environment_folder(tmp_path / "e", "", returns="Echo()")
    environment = open_store().add_environment(name="e", digest="0123456789abcdef", path=str(folder), size_bytes=1)
    resolved = resolve(validate({"environment": "e", "steps": 1, "secrets": ["PLANTED_KEY"]}))
    run_id = queue.enqueue(open_store(), resolved, environment)[0].id
    other_id = queue.enqueue(open_store(), resolve(validate({"environment": "e", "steps": 1})), environment)[0].id
    assert (await ended(client, other_id))[0]["run"]["state"] == "succeeded"  # nobody waits behind it
    waiting, _ = await call(client, "status", run_id=run_id)
    assert waiting["run"]["state"] == "queued"
    (warning,) = waiting["run"]["warnings"]
    assert warning.startswith(f"[secret_missing run_id={run_id}] the run waits for the secrets PLANTED_KEY")
    assert "start the server" in warning

    monkeypatch.setenv("PLANTED_KEY", SECRET)
    still, _ = await call(client, "status", run_id=run_id)
    assert still["run"]["warnings"] == [warning]  # a reader hands nothing over
    process.ensure_supervised(open_store())
    assert "warnings" not in (await call(client, "status", run_id=run_id))[0]["run"]
    assert (await ended(client, run_id))[0]["run"]["state"] == "succeeded"


def test_a_run_uses_the_variables_of_the_client_that_created_it(flash_home: Path, tmp_path: Path, monkeypatch):
    worker = tmp_path / "worker.py"
    seen = tmp_path / "seen.json"
    worker.write_text(f"import json, os\njson.dump(dict(os.environ), open({str(seen)!r}, 'x'))")
    own = {"HF_TOKEN": SECRET, "no_proxy": "second", "UV_INDEX_TEAM_PASSWORD": SECRET, "OPENAI_API_KEY": "second"}
    first = {"HF_ENDPOINT": "http://first", "HF_TOKEN": "first", "https_proxy": "http://first", "WANDB_API_KEY": "1"}
    for name, value in (first | {"OPENAI_API_KEY": "first", "KEPT": "first"}).items():
        monkeypatch.setenv(name, value)
    with supervisor_of(flash_home, str(worker)):
        for name in first:
            monkeypatch.delenv(name)
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        queued_run(tmp_path / "environment", secrets=["OPENAI_API_KEY"])
        process.ensure_supervised(open_store())
        variables = wait_for(lambda: seen.exists() and json.loads(seen.read_text() or "{}"))
    assert (
        own | {"KEPT": "first", "FLASH_VARIABLES_OF": "the client that started the run"}
    ).items() <= variables.items()
    assert not first.keys() - own.keys() & variables.keys()
    places = {path: path.read_bytes() for path in flash_home.rglob("*") if path.is_file()}
    assert {path: found for path, data in places.items() if (found := traces(data))} == {}


def test_the_supervisors_variables_are_used_where_the_client_is_gone(flash_home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://supervisor")
    vault = secrets.Vault(flash_home)
    run = queued_run(tmp_path / "environment")
    here = dataclasses.replace(run, lineage={"client": f"{os.getpid()}-another"})
    gone = dataclasses.replace(run, lineage={"client": "gone"})
    assert vault.surroundings(here) is vault.surroundings(gone) is None  # it may still give them
    monkeypatch.setattr(secrets, "ENDED_S", 0.0)
    assert vault.surroundings(here) is None
    monkeypatch.setattr("os.environ", {**os.environ, **(vault.surroundings(gone) or {})})
    used = ", with HF_ENDPOINT=http://supervisor of the supervisor, for the client that started the run has ended"
    assert surroundings.said("HF_ENDPOINT", "HF_TOKEN") == used


@pytest.mark.hostile("secrets")
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can be another user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a Python that every user may run")
def test_another_user_gets_no_answer_even_where_the_folder_lets_it_in(supervisor: Path, flash_home: Path) -> None:
    (flash_home / secrets.NAME).chmod(0o666)
    flash_home.chmod(0o755)
    ask = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(f'/proc/self/fd/{sys.argv[1]}/%s')\n"
    key = (flash_home / secrets.KEY).read_text()
    ask += f's.sendall(b\'{{"key": "{key}", "run_id": "r", "names": []}}\\n\'); print(s.recv(100))'
    folder = os.open(flash_home, os.O_RDONLY)
    command = ["/usr/bin/python3", "-c", ask % secrets.NAME, str(folder)]
    answers = [
        subprocess.run([*before, *command], pass_fds=[folder], capture_output=True, text=True, check=False).stdout
        for before in ([], ["setpriv", "--reuid", "4242", "--clear-groups"])
    ]
    os.close(folder)
    assert answers[0] == "b'{\"lacking\": []}\\n'\n"
    assert answers[1] in ("b''\n", "")  # closed in its face, or reset


@pytest.mark.hostile("secrets")
@pytest.mark.parametrize("key", [None, "", "x" * 43, 7, ["x"], "schlüssel"])
def test_who_cannot_read_the_state_directory_changes_no_secret(tmp_path: Path, key: Any) -> None:
    """Environment code runs as the same user."""
    held = secrets.Vault(tmp_path)
    held.open()
    with closing(held):
        assert secrets.give(tmp_path, "run-1", {"KEY": "a"})
        assert (tmp_path / secrets.KEY).stat().st_mode & 0o077 == 0
        forged = {"run_id": "run-1", "names": ["KEY"], "values": {"KEY": "forged"}}
        if key is not None:
            forged["key"] = key
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / secrets.NAME))
            connection.sendall(json.dumps(forged).encode() + b"\n")
            assert connection.recv(100) == b""
        assert held.values("run-1", ["KEY"]) == {"KEY": "a"}
        assert secrets.lacking(tmp_path, "run-1", ["KEY"]) == []  # it still answers


@pytest.mark.hostile("secrets")
def test_one_that_says_nothing_holds_up_nobody_and_gets_no_more_time_for_each_letter(tmp_path: Path, monkeypatch):
    held = secrets.Vault(tmp_path)
    held.open()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as slow, closing(held):
        silent.connect(str(tmp_path / secrets.NAME))
        assert secrets.give(tmp_path, "run-1", {"KEY": "a"})
        monkeypatch.setattr(secrets, "TIMEOUT_S", 0.5)
        slow.connect(str(tmp_path / secrets.NAME))
        with pytest.raises(OSError):
            for _ in range(10_000):
                slow.sendall(b" ")
                time.sleep(0.05)  # a letter comes before any time limit of one read


def test_values_are_the_runs_own_and_gone_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY", raising=False)
    held = secrets.Vault(tmp_path)
    held.open()
    with closing(held):
        assert secrets.lacking(tmp_path, "run-1", ["KEY"]) == ["KEY"]
        assert secrets.give(tmp_path, "run-1", {"KEY": "a"}) and secrets.give(tmp_path, "run-2", {"KEY": "b"})
        assert (held.values("run-1", ["KEY"]), held.values("run-2", ["KEY"])) == ({"KEY": "a"}, {"KEY": "b"})
        held.forget("run-1")
        assert secrets.lacking(tmp_path, "run-1", ["KEY"]) == ["KEY"]
        assert secrets.lacking(tmp_path, "run-2", ["KEY"]) == []
    assert secrets.lacking(tmp_path, "run-2", ["KEY"]) == ["KEY"] and not any(tmp_path.iterdir())


def test_text_that_comes_in_pieces_is_redacted_across_them() -> None:
    redactor = Redactor(["0123456789abcdef"])
    for size in (1, 3, 50):
        text, rest, told = "before 0123456789abcdef after\n" * 20, "", ""
        for start in range(0, len(text), size):
            piece, rest = redactor.split(rest + text[start : start + size])
            told += piece
        assert told + redactor.text(rest) == "before [secret] after\n" * 20


def test_words_are_left_alone_where_a_secret_is_short_or_resembles_the_protocol() -> None:
    assert Redactor(["no"]).value({"number": 1, "no": "no"}) == {"number": 1, "no": "no"}
    assert Redactor(["value"]).value(["a value", 1, None]) == ["a [secret]", 1, None]
