"""gateway: a program of the user's plays the rollouts of a run, outside the sandbox."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httpx
from anyio.to_thread import run_sync

from environments.agents.command import REWARD_FILE, model_variables
from environments.tools import as_object
from flash_mcp.cli.follow import ENDED
from flash_mcp.cli.install import TOKEN
from flash_mcp.cli.output import visible
from flash_mcp.extensions.gateway.relay import worker_of
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json, text_of
from flash_mcp.state.store import open_store

PROMPT = "{prompt}"
ASK_S = 60.0
"""What a request for a task, or one with a result, may take."""
AGAIN_S = 2.0
"""After how long it asks again, where there is no task or no answer."""
UNREACHABLE_S = 300.0
"""For how long a server that has answered may be unreachable."""
URL_FIX = "--url is the address at which `flash-mcp serve --http` is reached"
SHOWN_BYTES = 1000
"""Of what a program wrote that failed."""


class Player:
    """Plays the rollouts of one run. `state` is the run's; `dropped` had no result, or too late."""

    def __init__(
        self, run_id: str, program: Sequence[str], at_once: int, url: str | None, token: str | None
    ) -> None:
        """FlashError(invalid_argument) if there is no such program, no token for the server, or
        nothing is to be played at once.
        """
        if at_once < 1:
            fix = "leave --at-once out, or pass a number from 1 on"
            raise FlashError("invalid_argument", f"--at-once is {at_once}", fix=fix)
        self.state = ""
        self.played = 0
        self.dropped = 0
        self._run_id = run_id
        self._program = program
        self._at_once = at_once
        self._url = (url or "").rstrip("/").removesuffix("/mcp")
        self._token = token or os.environ.get(TOKEN, "")
        self._answered_at = -math.inf
        if shutil.which(program[0]) is None:
            what = f"there is no program {program[0]!r:.200}"
            fix = "name one that this shell finds, after --: flash-mcp gateway RUN_ID -- python ..."
            raise FlashError("invalid_argument", what, fix=fix)
        if self._url and not self._token:
            fix = f"put one into {TOKEN}, or pass --token, which other users of this machine see"
            what = "a server at --url asks for a token"
            raise FlashError("invalid_argument", what, url=self._url, fix=fix)

    async def play(self) -> None:
        async with httpx.AsyncClient(timeout=ASK_S, trust_env=bool(self._url)) as http:
            try:
                async with asyncio.TaskGroup() as players:
                    for _ in range(self._at_once):
                        players.create_task(self._play(http))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None

    async def _play(self, http: httpx.AsyncClient) -> None:
        while self.state not in ENDED:
            task = await self._task(http)
            if task is None:
                await asyncio.sleep(AGAIN_S)
                continue
            result: Json = {"error": "the program that played it was stopped"}
            try:
                result = await self._result(task)
            finally:
                await self._end(http, task, result)

    async def _task(self, http: httpx.AsyncClient) -> Json | None:
        """A task, if there is one now. Also notes the run's state."""
        url = f"{self._url}/gateway/{self._run_id}/tasks"
        token = self._token
        if not self._url:
            run, where = await run_sync(lambda: worker_of(open_store(), self._run_id))
            self.state = run.state
            if where is None:
                return None
            url = f"http://127.0.0.1:{secrets.choice(where['ports'])}/tasks"
            token = where["key"]
        try:
            reply = await http.post(url, headers={"Authorization": f"Bearer {token}"})
            if reply.status_code == HTTPStatus.TOO_MANY_REQUESTS or reply.is_server_error:
                raise httpx.TransportError(f"HTTP {reply.status_code}")
        except httpx.TransportError as error:
            # The run's worker has just ended, or the server starts again.
            if self._url and time.monotonic() - self._answered_at > UNREACHABLE_S:
                what = f"the server does not answer: {error!r:.200}"
                raise FlashError("unresponsive", what, url=self._url, fix=URL_FIX) from error
            return None
        self._answered_at = time.monotonic()
        if not reply.is_success:
            raise _refusal(reply)
        body: Json = reply.json()
        self.state = body.get("state", self.state)
        return body["task"]

    async def _end(self, http: httpx.AsyncClient, task: Json, result: Json) -> None:
        headers = {"Authorization": f"Bearer {task['api_key']}"}
        why = result.get("error")
        try:
            reply = await http.post(f"{task['base_url']}/result", headers=headers, json=result)
            if reply.status_code == HTTPStatus.BAD_REQUEST:
                await self._end(http, task, {"error": f"it is no result: {reply.text:.300}"})
                return
            if not reply.is_success and why is None:
                why = f"it came too late: HTTP {reply.status_code} {reply.text:.300}"
        except httpx.TransportError as error:
            why = why or f"the run's worker has ended: {error!r:.200}"
        self.played += why is None
        self.dropped += why is not None
        if why is not None:
            sys.stderr.write(visible(f"{task['task_id']} is dropped: {why}\n"))

    async def _result(self, task: Json) -> Json:
        """What the program makes of a task: the body of POST /result."""
        prompt = text_of(task["messages"][-1])
        program = [word.replace(PROMPT, prompt) for word in self._program]
        env = {**os.environ, **model_variables(task["base_url"], task["api_key"], task["model"])}
        env.pop(TOKEN, None)
        with tempfile.TemporaryDirectory(prefix="flash-gateway-") as folder:
            reward = Path(folder, "reward.json")
            env[REWARD_FILE] = str(reward)
            try:
                process = await asyncio.create_subprocess_exec(
                    *program, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, start_new_session=True
                )
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno != errno.E2BIG:
                    raise
                return {"error": f"the prompt cannot be an argument of the program: {error}"}
            try:
                shown = {name: task[name] for name in ("task_id", "split", "messages")}
                async with asyncio.timeout(task["limit_s"]):
                    output, errors = await process.communicate(json.dumps(shown).encode())
                if process.returncode == 0:
                    return _outcome(reward, output)
            except TimeoutError:
                return {"error": f"the program took longer than {task['limit_s']:g} s"}
            except ValueError as error:
                return {"error": f"what the program wrote to {REWARD_FILE} is no JSON: {error}"}
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        wrote = (output + errors)[-SHOWN_BYTES:].decode(errors="replace").strip()
        return {"error": f"the program's exit code was {process.returncode}; it wrote: {wrote}"}


def _outcome(reward: Path, output: bytes) -> Json:
    """Its own reward, or what it printed. ValueError if the reward is no JSON."""
    with suppress(FileNotFoundError):
        return as_object(json.loads(reward.read_text()))
    return {"answer": output.decode(errors="replace").strip()}


def _refusal(reply: httpx.Response) -> FlashError:
    with suppress(LookupError, TypeError, ValueError):
        return FlashError.from_dict(reply.json()["error"]["data"])
    what = f"the server answered HTTP {reply.status_code} {reply.text:.300}"
    return FlashError("invalid_argument", what, fix=URL_FIX)
