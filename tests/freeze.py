"""What users see of the package, as text files: `python -m tests.freeze` writes them anew under tests/golden/.

tools/      an outline of every tool as `tools/list` sends it (tests/outlines.py)
help/       `--help` of the program, of one tool and of one command whole; usages.txt: how each other one is called
flags.json  what to do about warning signs; server.json: instructions, resources and prompts
results/    calls of tools through a client, on a store of finished, failed, cancelled, running and queued runs
cli/        what commands print; report.html is the page that `report` writes"""

import contextlib
import io
import os
import random
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
from mcp import Client

from flash_mcp.cli import main as cli
from flash_mcp.server.mcp_server import server
from flash_mcp.supervisor.launch.devices import Device
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared import placing
from tests.frozen_calls import Names, flags, results
from tests.near_environments import near
from tests.outlines import pretty, tool_outline
from tests.samples import supervised

GOLDEN = Path(__file__).with_name("golden")
COMMAND = re.compile(r"^    ([a-z][\w-]*)", re.MULTILINE)

COMMANDS = {
    "status": ["status"], "status-improved": ["status", "run-improved"], "status-failed": ["status", "run-failed"],
    "rollouts": ["rollouts", "run-improved", "--best", "2"],
    "compare": ["compare", "run-eval-base", "--other", "run-eval-trained", "--flips", "1"],
    "catalog": ["catalog", "--kind", "models", "--contains", "360m"],
    "report": ["report", "run-improved", "--to", "FOLDER/page.html"], "unknown-run": ["status", "run-none"],
    "unknown-run-json": ["status", "run-none", "--json"], "unknown-option": ["train", "--step", "3"],
    "remove": ["remove", "run-improved", "--dry-run"],
}  # fmt: skip
"""What is printed of the store that the calls leave: {golden file: words after flash-mcp}."""


def frozen(folder: Path) -> dict[str, str]:
    """{path below tests/golden: text}; `folder` is empty, and holds the state directory of the calls."""
    with settings(folder):
        files = anyio.run(surface)
        files |= used(folder)
        files |= {f"help/{name}.txt": text for name, text in helps().items()}
        files["flags.json"] = pretty(flags())
    return {name: f"{text.rstrip()}\n" for name, text in files.items()}


def used(folder: Path) -> dict[str, str]:
    """What the tools and the commands say of a store in use."""
    names = Names(folder)
    with supervised():
        files = {f"results/{name}.json": text for name, text in anyio.run(results, folder, names).items()}
        for name, words in COMMANDS.items():
            code, text = command(*names.as_called(words))
            files[f"cli/{name}.txt"] = names.as_frozen(f"{code}\n{text}")
        page = (folder / "page.html").read_text(encoding="utf-8")
        # The policy has a digest of the style, which changes with it.
        page = re.sub(r"(?s)(?<=<style>).*?(?=</style>)", "", page)
        page = re.sub(r"(?=<(h\d|p|tr|svg|table|details|li|div)\b)", "\n", page)
        page = re.sub(r"\s*\n\s*(?=</|<td|<th\b|<span|<text)|\n\s*(?=\n)", "", page)  # a row of a table is a line
        files["cli/report.html"] = names.as_frozen(without_repeats(page))
    return files


def without_repeats(page: str) -> str:
    """The page with one rollout of each colour, one chart, and few rows of the recipe whole."""
    seen: set[str] = set()

    def shorten(found: re.Match[str]) -> str:
        if found["kind"] not in seen:
            seen.add(found["kind"])
            return found[0]
        return f"\n<!-- {found['title']} -->"

    page = re.sub(
        r'\n<article class="(?P<kind>[a-z]+)\d*">\s*<p.*?>(?P<title>.*?)</p>.*?</article>', shorten, page, flags=re.S
    )
    page = re.sub(
        r"\n<!-- <b>.*?-->|\n<tr><td>[a-z]+/[a-z_]+</td><td class=\"mono\">[^\n]*</td></tr>(?=\n)", "", page, flags=re.S
    )
    page = re.sub(r"\n<(?P<kind>figure)>.*?<title>(?P<title>.*?)</title>.*?</figure>", shorten, page, flags=re.S)
    return re.sub(r'\n<tr><td>[a-z_]+</td><td class="mono break">[^\n]*</td><td>recipe</td></tr>(?=\n)', "", page)


@contextlib.contextmanager
def settings(folder: Path) -> Generator[None, None, None]:
    """A state directory and a model cache below `folder`, help 120 characters wide, and the same ids of runs; models
    are placed on a machine of 16 GiB."""
    values = {"FLASH_HOME": str(folder / "home"), "FLASH_MODELS": str(folder / "models"), "COLUMNS": "120"}
    # Ids of runs decide between equals, and which names are near an unknown one: they are the same
    # each time.
    ids = patch("secrets.choice", random.Random(0).choice)
    unsynced = patch("os.fsync")  # nothing here has to survive the machine
    device = Device("cpu", "a processor", 16.0, 8.0, cores=2)
    machine = patch.multiple(placing, processor=lambda: device, gpus=list[Device], missing_packages=list[str])
    with patch.dict(os.environ, values), ids, unsynced, machine, near():
        yield


def wire(model: Any) -> dict[str, Any]:
    """A message of the protocol as it is sent."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


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
    return {"server.json": pretty(described), **{f"tools/{tool.name}.txt": tool_outline(wire(tool)) for tool in tools}}


def helps() -> dict[str, str]:
    """The help of the program, of a tool and of a command whole, and the usage of every other command and sub-command:
    its words and options. tools/ and docs/reference.md have the words of the tools."""
    shown = {name: help_of(*words) for name, words in {"flash-mcp": [], "compare": ["compare"]}.items()}
    tools, usages = {name.replace("_", "-") for name in TOOLS}, list[str]()
    for command in COMMAND.findall(shown["flash-mcp"]):
        if command in tools:
            continue
        text = help_of(command)
        usages.append(text.partition("\n\n")[0])
        actions = COMMAND.findall(text) if "ACTION" in text else []
        usages += [help_of(command, action).partition("\n\n")[0] for action in actions]
    return shown | {"wait": help_of("wait"), "usages": "\n".join(usages)}


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
