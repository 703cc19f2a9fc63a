"""Hands values of secrets from the server that received a `train` call to the supervisor, without
writing them to disk.

    vault = Vault(base); vault.open()     # the supervisor: keeps {run: {name: value}} in memory
    give(base, run_id, values)            # any server of the same user, once the run is there
    lacking(base, run_id, names)          # which of them the supervisor does not have
    give_surroundings(base)               # what this process's runs are to use

They communicate over a Unix socket in the state directory, and each checks that the other process
is of the same user. A request also carries the key that the supervisor wrote into a file there:
environment code may run as the same user, but cannot read the state directory. Values cannot be
read back: the supervisor passes them to the run's attempts only. When it ends they are lost, and a
run that needs them waits until they are given again. Variables in the supervisor's own environment
count as given. A `.env` file next to a run's config is read whenever its values are lacking. Keys
of stores come the same way, and are used once a store refuses those before."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from flash_mcp.exam import prompts
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.exams import KEY_VARIABLE, variable_of
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import Run

log = logging.getLogger(__name__)
NAME = "supervisor.sock"
KEY = "supervisor.key"
TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 1 << 20
SURROUNDINGS_S = 15.0
"""Time that the client of a run has to give its variables, before the supervisor's own are used."""
ENDED_S = 1.0
"""As `SURROUNDINGS_S`, where the client's process is not here any more."""
STORE = "store"
"""In a request, in place of a run: the values are keys of the targets' stores."""
SURROUNDINGS = "surroundings"
"""In a request, in place of a run: the values are the variables of `client`."""
EXAMS = "exams"
"""In a request, in place of a run: the values are keys of exams, which runs that take them use."""
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Vault:
    """The supervisor's side. Every method may be called from any thread."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._values: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._trouble = ""
        """Why there is none, as the log has it."""
        self._key = secrets.token_urlsafe(32)
        self._surroundings = {surroundings.CLIENT: surroundings.of(os.environ)}
        """Of each client that created runs."""
        self._asked_at: dict[str, float] = {}
        """When the variables of a client were first lacking."""
        self._used_keys = [store_keys()]
        """Keys of stores that this process has or had."""
        self._new_keys: dict[str, str] = {}
        """Others, as a later shell has them."""

    def open(self) -> None:
        """Take what servers give, in a thread of its own, until `close`. Each further call tries
        again what a full disk prevented. The caller holds the supervisor's lock.
        """
        if self._listener:
            return
        listener = socket.socket(socket.AF_UNIX)
        try:
            (self.base / NAME).unlink(missing_ok=True)  # a supervisor's that was killed
            write_private(self.base / KEY, self._key)
            with _address(self.base) as address:
                listener.bind(address)
            (self.base / NAME).chmod(0o600)
            listener.listen()
        except OSError as error:  # a full disk: runs without secrets go on
            if str(error) != self._trouble:
                log.warning("no secrets can be taken: %s", error)
            self._trouble = str(error)
            listener.close()
            return
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), name="vault", daemon=True).start()

    def close(self) -> None:
        if self._listener:
            for name in (NAME, KEY):
                (self.base / name).unlink(missing_ok=True)
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def values(self, run_id: str, names: Sequence[str]) -> dict[str, str]:
        """What is known of these; what is not is left out."""
        with self._lock:
            exams = self._values.get(EXAMS, {}).items()
            unlocked = {name: key for name, key in exams if key}
            values = {**os.environ, **unlocked, **self._values.get(run_id, {})}
        return {name: values[name] for name in names if name in values}

    def lacking(self, run_id: str, names: Sequence[str]) -> list[str]:
        values = self.values(run_id, names)
        return [name for name in names if name not in values]

    def run_ids(self) -> set[str]:
        with self._lock:
            return self._values.keys() - {EXAMS}

    @property
    def holds_exams(self) -> bool:
        """Whether it has what nobody gives again after its end."""
        with self._lock:
            return any(self._values.get(EXAMS, {}).values())

    def forget(self, run_id: str) -> None:
        with self._lock:
            self._values.pop(run_id, None)

    def surroundings(self, run: Run) -> dict[str, str] | None:
        """The variables of the client that created the run, and whose they are; None while that
        client may still give them.
        """
        own = {**surroundings.of(os.environ), surroundings.WHOSE: "the supervisor"}
        client = run.lineage.get("client")
        if not client:  # a model server, or a run of an earlier version
            return own
        with self._lock:
            if (values := self._surroundings.get(client)) is not None:
                self._asked_at.pop(client, None)
                return {**values, surroundings.WHOSE: surroundings.OF_CLIENT}
            asked_at = self._asked_at.setdefault(client, time.monotonic())
        wait_s = ENDED_S if surroundings.has_ended(client) else SURROUNDINGS_S
        if time.monotonic() - asked_at < wait_s:
            return None
        own[surroundings.WHOSE] += ", for the client that started the run has ended"
        return own

    def clients(self) -> set[str]:
        """Those that gave their variables."""
        with self._lock:
            return self._surroundings.keys() - {surroundings.CLIENT}

    def forget_clients(self, clients: Collection[str]) -> None:
        with self._lock:
            for client in clients:
                del self._surroundings[client]

    def take_store_keys(self) -> bool:
        """Use the keys of stores that a later shell has; whether there are any."""
        with self._lock:
            keys, self._new_keys = self._new_keys, {}
            if not keys:
                return False
            self._used_keys.append(keys)
        for name in STORE_KEYS:
            os.environ.pop(name, None)
        os.environ.update(keys)
        return True

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            # A thread for each: one that says nothing holds nobody up.
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            _check_peer(connection)
            request = _receive(connection)
            if not hmac.compare_digest(str(request["key"]).encode(), self._key.encode()):
                return
            if "texts" in request:  # a locked exam gets no answer
                exam = (request["exam"], request["names"][0].removeprefix(KEY_VARIABLE))
                key = bytes.fromhex(self.values("", request["names"])[request["names"][0]])
                found = prompts.rows(self.base, *exam, key, request["texts"])
                _send(connection, {"lacking": [""] * found})
                return
            if request["run_id"] == STORE:
                if request["values"] not in self._used_keys:
                    self._new_keys = request["values"]
            elif request["run_id"] == SURROUNDINGS:
                with self._lock:
                    self._surroundings[request["client"]] = request["values"]
            elif "values" in request:
                with self._lock:
                    self._values.setdefault(request["run_id"], {}).update(request["values"])
            _send(connection, {"lacking": self.lacking(request["run_id"], request["names"])})


def give(base: Path, run_id: str, values: Mapping[str, str]) -> bool:
    """Whether the supervisor has them now. One that has just been started is waited for."""
    deadline = time.monotonic() + TIMEOUT_S
    request = {"run_id": run_id, "names": list(values), "values": dict(values)}
    while (absent := _ask(base, request)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return not absent


def hand_over(base: Path, run: Run) -> None:
    """Give what `variables` has of the run's secrets: all of it if this process created the run,
    else what the supervisor lacks.
    """
    values = variables(run.env_files)
    absent = run.spec.secrets
    if run.lineage.get("client") != surroundings.CLIENT:
        absent = lacking(base, run.id, run.spec.secrets)
    values = {name: values[name] for name in absent if name in values}
    if values:
        give(base, run.id, values)


def variables(env_files: Sequence[str]) -> dict[str, str]:
    values = dict(os.environ)
    for file in env_files:
        try:
            pairs = dotenv_values(file, interpolate=False)
        except (OSError, ValueError):  # no UTF-8
            log.warning("%s cannot be read", file)
            continue
        for name, value in pairs.items():
            values.setdefault(name, value or "")
    return values


def give_surroundings(base: Path, timeout_s: float) -> None:
    """Let the runs that this process created use its variables. A supervisor that has just been
    started is waited for.
    """
    request: dict[str, Any] = {"run_id": SURROUNDINGS, "names": []}
    request |= {"client": surroundings.CLIENT, "values": surroundings.of(os.environ)}
    deadline = time.monotonic() + timeout_s
    while _ask(base, request) is None and time.monotonic() < deadline:
        time.sleep(0.05)


def store_keys() -> dict[str, str]:
    """The keys of stores in this process's environment."""
    return {name: os.environ[name] for name in STORE_KEYS if name in os.environ}


def offer_store_keys(base: Path) -> None:
    """Let the supervisor take this process's keys of stores, once its own are refused."""
    if keys := store_keys():
        _ask(base, {"run_id": STORE, "names": [], "values": keys})


def lacking(base: Path, run_id: str, names: Sequence[str]) -> list[str]:
    """Which of `names` the supervisor does not have for the run; all, where none answers."""
    lacking = _ask(base, {"run_id": run_id, "names": list(names)}) if names else []
    return list(names) if lacking is None else lacking


def count_rows(base: Path, exam: str, exam_id: str, texts: Sequence[str]) -> int:
    """How many texts ask what the exam asks. FlashError(exam_locked)."""
    names = [variable_of(exam_id)]
    request = {"run_id": EXAMS, "names": names, "exam": exam, "texts": list(texts)}
    if (found := _ask(base, request)) is None:
        raise missing(exam, names)
    return len(found)


def missing(run_id: str, names: Sequence[str]) -> FlashError:
    """The error that a run shows while it waits for secrets."""
    if names[0].startswith(KEY_VARIABLE):
        what = "the exam is locked, and the look waits"
        fix = "its operator runs `flash-mcp exam unlock NAME`; a cancelled look is not spent"
        return FlashError("exam_locked", what, run_id=run_id, fix=fix)
    what = (
        f"the run waits for the secrets {', '.join(names)}: they were lost when the supervisor "
        "ended, for they are never written to disk"
    )
    fix = (
        "start the server, or `flash-mcp wait`, with them in its environment: it hands them over "
        "within seconds; or cancel the run"
    )
    return FlashError("secret_missing", what, run_id=run_id, fix=fix)


def _ask(base: Path, request: dict[str, Any]) -> list[str] | None:
    try:
        with socket.socket(socket.AF_UNIX) as connection, _address(base) as address:
            connection.settimeout(TIMEOUT_S)
            connection.connect(address)
            _check_peer(connection)
            _send(connection, {"key": (base / KEY).read_text(), **request})
            return _receive(connection)["lacking"]
    except (OSError, ValueError, KeyError):
        log.info("no supervisor takes secrets at %s", base / NAME)
        return None


@contextlib.contextmanager
def _address(base: Path) -> Generator[str, None, None]:
    """The socket's path, short: the kernel takes 107 bytes, and a state directory may lie deep."""
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{NAME}"
    finally:
        os.close(folder)


def _check_peer(connection: socket.socket) -> None:
    """PermissionError unless the same user is at the other end."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    if struct.unpack("3i", credentials)[1] != os.getuid():
        raise PermissionError("another user's process is at the other end")


def _send(connection: socket.socket, body: dict[str, Any]) -> None:
    connection.sendall(json.dumps(body).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON. TimeoutError if it is not whole in time, however it trickles in."""
    deadline = time.monotonic() + TIMEOUT_S
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_REQUEST_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(1 << 16)
        if not part:
            break
        line += part
    return json.loads(line)
