"""What launchers share whose engine has an API over HTTP."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.surroundings import is_direct, use_proxies
from flash_mcp.state.targets import TargetSettings
from flash_mcp.supervisor.launch.base import Launch, Launcher, exported

OF_A_PROXY = (502, 503, 504)
"""What a proxy answers while it does not reach the engine's server."""


def commands(launch: Launch, output: str = "") -> list[str]:
    """What the job's shell runs; `output` is where its output goes if the launch has no log."""
    lines = ["cd /", *exported(launch.environment)]
    if launch.log:
        lines.append(f"mkdir -p {shlex.quote(str(launch.log.parent))}")
        output = f" >>{shlex.quote(str(launch.log))} 2>&1"
    return [*lines, f"exec {shlex.join(launch.command)} </dev/null{output}"]


class ApiLauncher(Launcher):
    """`address` is the URL of the engine's server, `token_file` holds its token. `resources` are
    what an attempt takes, in the engine's names. `tag` marks the jobs of one state directory.
    """

    engine: str
    root: str
    """The path of its API."""
    unreachable: str
    """What to check if it does not answer."""

    def __init__(
        self,
        address: str,
        capacity: int = 1,
        resources: Mapping[str, Any] | None = None,
        token_file: str | None = None,
        tag: str = "",
    ) -> None:
        self.url = address.rstrip("/") + self.root
        self.capacity = capacity
        self.resources = dict(resources or {})
        self.token_file = token_file
        self.tag = tag

    @classmethod
    def of(cls, settings: TargetSettings, tag: str = "") -> Self:
        of_target = (settings.address, settings.slots, settings.resources, settings.token_file)
        return cls(*of_target, tag)

    @classmethod
    def check(cls, settings: TargetSettings) -> None:
        if not settings.address:
            raise ValueError(f"{cls.engine} needs an address, the URL of its server")
        if settings.owners:
            raise ValueError(f"owners are for sbatch: {cls.engine} does not take them")

    def ask(self, method: str, path: str, body: Any, timeout_s: float) -> httpx.Response:
        """FlashError(target_unreachable | target_refused)."""
        try:
            token = ""
            if self.token_file:
                token = Path(self.token_file).read_text().strip()
        except OSError as error:
            what = f"no token of {self.engine}: {error}"
            fix = "correct token_file in targets.toml"
            raise FlashError("target_refused", what, fix=fix) from error
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        use_proxies()
        options: Any = {"headers": headers, "timeout": timeout_s}
        options["trust_env"] = not is_direct(self.url)
        try:
            answer = httpx.request(method, self.url + path, json=body, **options)
        except httpx.TransportError as error:
            what = f"{self.engine} does not answer at {self.url}: {error or type(error).__name__}"
            raise FlashError("target_unreachable", what, fix=self.unreachable) from error
        if answer.status_code in (401, 403):
            what = f"{self.engine} refused: {answer.text[:200]}"
            fix = "name a file with its token: token_file in the target"
            raise FlashError("target_refused", what, fix=fix)
        if answer.is_redirect or answer.status_code in OF_A_PROXY:
            raise self._no_answer_of_its_own(answer)
        return answer

    def json_of(self, answer: httpx.Response) -> Any:
        """FlashError(target_unreachable) if it is no JSON, such as a page for a login."""
        try:
            return answer.json()
        except ValueError as error:
            raise self._no_answer_of_its_own(answer) from error

    def _no_answer_of_its_own(self, answer: httpx.Response) -> FlashError:
        kind = answer.headers.get("Content-Type", "no type")
        what = f"{answer.url} answered {answer.status_code} with {kind}, not as {self.engine} does"
        return FlashError("target_unreachable", what, fix=self.unreachable)
