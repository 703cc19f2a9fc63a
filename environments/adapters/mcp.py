"""A server of the Model Context Protocol whose tools a model learns to call.

    server = McpServer(["python", "server.py"], Path(__file__).parent)
    server.tools                            # OpenAI function schemas
    server.call("add", {"a": 1, "b": 2})    # "3"

The server is a program in the environment's sandbox, spoken to over its standard input and output.
Calls wait for one another."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from environments.base import Json
from environments.tools import ToolsEnded

PROTOCOL = "2025-06-18"
TIMEOUT_S = 10.0
STDERR_BYTES = 600  # how much of the end of what a server wrote to standard error an error repeats
NO_METHOD = {"code": -32601, "message": "this client serves no requests"}


class McpError(RuntimeError):
    """The server refused a request or reported a failure of its tool."""


class McpTimeout(McpError, ToolsEnded):
    """The server did not answer in time: one that hangs fails the calls of every rollout."""


class McpServer:
    """A running server, until `close` or the process ends. Each answer has `timeout_s` seconds."""

    def __init__(self, command: Sequence[str], folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        bin_folder = Path(sys.executable).parent
        program = sys.executable if command[0] == "python" else command[0]
        path = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self._process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._timeout_s = timeout_s
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._stderr_tail = b""
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        self._lock = threading.Lock()
        self._requests = 0
        client = {"name": "flash-mcp", "version": "1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        try:
            self._request("initialize", hello)
            self._send({"method": "notifications/initialized"})
            page: Json | None = {}
            self.tools: list[Json] = []
            while page is not None:
                result = self._request("tools/list", page)
                for tool in result["tools"]:  # as the function schemas of OpenAI's API
                    body = {"name": tool["name"], "description": tool.get("description") or ""}
                    body["parameters"] = tool["inputSchema"]
                    self.tools.append({"type": "function", "function": body})
                cursor = result.get("nextCursor")
                page = {"cursor": cursor} if cursor else None
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text that the tool returns. Raises McpError, of which McpTimeout is one, or
        ToolsEnded if the server has ended.
        """
        result = self._request("tools/call", {"name": name, "arguments": arguments})
        parts = cast("list[Json]", result.get("content", []))
        text = "\n".join(part["text"] for part in parts if part.get("type") == "text")
        if result.get("isError"):
            raise McpError(text or "the tool failed")
        return text

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            while line := lines.readline():
                self._lines.put(line)
        self._lines.put(b"")

    def _read_stderr(self) -> None:
        """Keep its end for an error, and copy all of it to our own standard error."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while chunk := os.read(stream.fileno(), 65536):
                self._stderr_tail = (self._stderr_tail + chunk)[-STDERR_BYTES:]
                with suppress(OSError):
                    os.write(2, chunk)

    def _ended(self) -> ToolsEnded:
        what = f"the MCP server ended, with exit code {self._process.wait()}"
        self._stderr_reader.join(timeout=1.0)  # a process of the server may hold the pipe open
        if tail := self._stderr_tail.decode(errors="replace").strip():
            # The last line comes first: the beginning of a long message is what is always shown.
            what += f": {tail.splitlines()[-1]:.200}\nIts standard error ended with:\n{tail}"
        return ToolsEnded(what)

    def _request(self, method: str, parameters: Json) -> Json:
        with self._lock:
            self._requests += 1
            number = self._requests
            self._send({"id": number, "method": method, "params": parameters})
            ends = time.monotonic() + self._timeout_s
            while message := self._next_message(method, ends):
                if "method" in message and "id" in message:
                    is_ping = message["method"] == "ping"
                    answer: Json = {"result": {}} if is_ping else {"error": NO_METHOD}
                    self._send({"id": message["id"], **answer})
                elif message.get("id") == number:
                    if "error" in message:
                        raise McpError(f"{method}: {message['error'].get('message')}")
                    return message["result"]
        raise self._ended()

    def _next_message(self, method: str, ends: float) -> Json | None:
        """None at the end. Lines that are no messages are passed over. McpTimeout at `ends`."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                what = f"{method}: the MCP server did not answer in {self._timeout_s:g} s"
                raise McpTimeout(f"{what}. In the sandbox it has no network") from None
            if not line:
                self._lines.put(line)
                return None
            with suppress(ValueError):
                message: Any = json.loads(line)
                if isinstance(message, dict):
                    return cast("Json", message)

    def _send(self, message: Json) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
