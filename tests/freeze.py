"""What users see of the package, as text files: `python -m tests.freeze` writes them anew under tests/golden/.

tools/      every tool as `tools/list` sends it
help/       `--help` of the program, of every command and of every sub-command
tables/     the generated tables of TRAINING.md
codes.json  error codes; flags.json: warning signs; server.json: instructions, resources and prompts
results/    calls of tools through a client, on a store of finished, failed, cancelled, running and queued runs
cli/        what commands print; report.html is the page that `report` writes
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, get_args

import anyio
from mcp import Client

from flash_mcp import cli, judge
from flash_mcp.errors import CODES
from flash_mcp.server import server
from tests.docs import tables

GOLDEN = Path(__file__).with_name("golden")
COMMAND = re.compile(r"^    ([a-z][\w-]*)", re.MULTILINE)


def frozen(folder: Path) -> dict[str, str]:
    """{path below tests/golden: text}; `folder` is empty, and holds the state directory of the calls."""
    with settings(folder):
        files = anyio.run(surface)
        files |= {f"help/{name}.txt": text for name, text in helps().items()}
        files |= {f"tables/{name}.md": text for name, text in tables().items()}
        files["codes.json"] = pretty(CODES)
        files["flags.json"] = pretty(get_args(judge.FlagName))
    return {name: f"{text.rstrip()}\n" for name, text in files.items()}


@contextlib.contextmanager
def settings(folder: Path) -> Generator[None, None, None]:
    """A state directory and a model cache below `folder`, and help 100 characters wide."""
    before = dict(os.environ)
    os.environ.update(FLASH_HOME=str(folder / "home"), FLASH_MODELS=str(folder / "models"), COLUMNS="100")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def pretty(body: Any) -> str:
    return json.dumps(body, indent=1, ensure_ascii=False)


def wire(model: Any) -> dict[str, Any]:
    """A message of the protocol as it is sent."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


# -- what clients see before they call --------------------------------------------------------------------------------


async def surface() -> dict[str, str]:
    """The server's own description, and every tool's."""
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        prompts = (await client.list_prompts()).prompts
        described = {
            "instructions": (client.instructions or "").splitlines(),
            "tools": [tool.name for tool in tools],
            "resources": [wire(resource) for resource in (await client.list_resources()).resources],
            "templates": [wire(template) for template in (await client.list_resource_templates()).resource_templates],
            "prompts": [wire(prompt) for prompt in prompts],
        }
        asked = {each.name: "SOME TEXT" for each in prompts[0].arguments or []}
        for message in (await client.get_prompt(prompts[0].name, asked)).messages:
            described["prompt"] = wire(message)["content"]["text"].splitlines()
    return {"server.json": pretty(described), **{f"tools/{tool.name}.json": pretty(wire(tool)) for tool in tools}}


def helps() -> dict[str, str]:
    """{command: its --help}; sub-commands are named COMMAND-SUBCOMMAND."""
    found = {"flash-mcp": help_of()}
    for command in COMMAND.findall(found["flash-mcp"]):
        found[command] = help_of(command)
        if "ACTION" in found[command]:
            for action in COMMAND.findall(found[command]):
                found[f"{command}-{action}"] = help_of(command, action)
    return found


def help_of(*words: str) -> str:
    code, text = command(*words, "--help")
    assert code == 0, text
    return text


def command(*words: str) -> tuple[int, str]:
    """Run a command in this process: its exit code, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = cli.main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, printed.getvalue()


def write() -> None:
    """Make tests/golden/ anew."""
    with tempfile.TemporaryDirectory() as folder:
        files = frozen(Path(folder).resolve())
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, text in files.items():
        path = GOLDEN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
