"""Plays short programs after the quickstarts of agent frameworks in the sandbox, against a scripted model.

    scripts/frameworks              installs the packages, plays all, and prints a table
    scripts/frameworks --only dspy  those of one framework
    scripts/frameworks --write      puts the table into docs/hubs.md

The model calls each tool once, fills in each schema that it is held to, and else says ANSWER."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

from environments.agents.calls import AgentCall
from environments.process import requirements
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.settings import FILE as SETTINGS_FILE
from tests import hubs
from tests.places import ROOT

FOLDER = Path(__file__).parent
QUICKSTARTS = FOLDER / "quickstarts"
FRAMEWORKS = sorted(path.name for path in QUICKSTARTS.iterdir() if path.is_dir())
"""Each has packages of its own: not all can be installed together."""
DOCUMENT = ROOT / "docs" / "hubs.md"
ANSWER = "The answer is 12."
CODE = "Thoughts: I know it.\n<code>\nfinal_answer(12)\n</code>"
SCRIPTS = {
    "smolagents/code_agent": [CODE],
    "smolagents/with_litellm": [CODE],
    "dspy/predict": ["[[ ## reasoning ## ]]\nBoth show one.\n\n[[ ## answer ## ]]\n12.0\n\n[[ ## completed ## ]]"],
    "dspy/react": [
        "[[ ## next_thought ## ]]\nI add.\n\n[[ ## next_tool_name ## ]]\nevaluate_math\n\n"
        '[[ ## next_tool_args ## ]]\n{"expression": "5+7"}\n\n[[ ## completed ## ]]',
        "[[ ## next_thought ## ]]\nDone.\n\n[[ ## next_tool_name ## ]]\nfinish\n\n"
        "[[ ## next_tool_args ## ]]\n{}\n\n[[ ## completed ## ]]",
        "[[ ## reasoning ## ]]\nSeen.\n\n[[ ## answer ## ]]\n12.0\n\n[[ ## completed ## ]]",
    ],
}
"""What the model says in each call, where a framework reads a form of its own. The last is repeated."""
TIMEOUT_S = 300.0
AT_ONCE = 4


@dataclass
class Outcome:
    """How a quickstart went. `failure` is "" if it ended as it should."""

    name: str
    calls: int = 0
    failure: str = ""
    refusals: dict[str, int] = field(default_factory=dict[str, int])


def names(framework: str) -> list[str]:
    return sorted(path.stem for path in (QUICKSTARTS / framework).glob("*.py"))


def write_environment(framework: str, folder: Path) -> None:
    """An environment whose tasks are the framework's quickstarts."""
    shutil.copytree(QUICKSTARTS / framework, folder / "quickstarts")
    for file in ("environment.py", "environment.toml"):
        shutil.copy(FOLDER / file, folder)
    (folder / "quickstarts" / requirements.FILE).rename(folder / requirements.FILE)


def use_home() -> None:
    """Packages are kept where scripts/hubs keeps its own."""
    os.environ["FLASH_HOME"] = str(hubs.HOME)
    hubs.HOME.mkdir(parents=True, exist_ok=True)
    (hubs.HOME / SETTINGS_FILE).write_text(hubs.SETTINGS)


def is_installed(framework: str) -> bool:
    return hubs.is_installed(QUICKSTARTS / framework)


class Model:
    """The scripted model of one rollout."""

    def __init__(self, name: str) -> None:
        self._script = SCRIPTS.get(name, [])
        self._called: set[str] = set()

    def answer(self, call: AgentCall) -> tuple[str, list[dict[str, Any]]]:
        """Its text and its calls of tools."""
        if self._script:
            return self._script[min(call.number, len(self._script) - 1)], []
        options = call.options
        tools = {tool["function"]["name"]: tool["function"] for tool in call.tools}
        new = [name for name in tools if name not in self._called]
        name = options.tool_name
        if options.tool_choice == "required":
            name = name or (new or [*tools])[0]
        elif options.tool_choice == "auto" and new:
            name = new[0]
        if name is not None:
            self._called.add(name)
            arguments = json.dumps(sample(tools[name].get("parameters", {})))
            function = {"name": name, "arguments": arguments}
            return "", [{"id": f"call{call.number:05}", "type": "function", "function": function}]
        if options.json_schema == {"type": "object"}:
            return json.dumps({"setup": "Why?", "punchline": "Because."}), []
        if options.json_schema is not None:
            return json.dumps(sample(options.json_schema)), []
        return ANSWER, []


def sample(schema: Any, root: Any = None) -> Any:
    """A value that fits the JSON schema."""
    root = root or schema
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return sample(found, root)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return sample(schema[several][0], root)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: sample(value, root) for name, value in fields.items()}
    if kind == "array":
        return [sample(schema.get("items", {"type": "string"}), root)]
    return {"string": "Paris", "integer": 12, "number": 12.0, "boolean": True}.get(kind)


async def play(host: EnvironmentHost, index: int, name: str) -> Outcome:
    """One rollout of a quickstart."""
    outcome = Outcome(name)
    model = Model(name)
    try:
        opening = await host.open("train", index)
        call: Any = opening.call
        while isinstance(call, AgentCall):
            outcome.calls += 1
            text, calls = model.answer(call)
            await host.answer_call(opening.episode, call.number, text, calls)
            call = await host.next_call(opening.episode)
        score = await host.score(opening.episode)
    except EnvironmentFault as fault:
        outcome.failure = fault.what
        return outcome
    outcome.refusals = score.refusals
    if score.reward != 1.0:
        outcome.failure = score.reason or "it failed"
    return outcome


async def play_all(framework: str) -> list[Outcome]:
    """The quickstarts of a framework, some at a time."""
    with tempfile.TemporaryDirectory() as folder:
        write_environment(framework, Path(folder))
        async with await EnvironmentHost.start(Path(folder), timeout_s=TIMEOUT_S) as host:
            tasks = [task for task, _ in await host.tasks("train")]
            assert tasks == names(framework)
            places = asyncio.Semaphore(AT_ONCE)

            async def one(index: int, task: str) -> Outcome:
                async with places:
                    outcome = await play(host, index, f"{framework}/{task}")
                print(outcome.name, outcome.failure or "works", file=sys.stderr, flush=True)
                return outcome

            return list(await asyncio.gather(*starmap(one, enumerate(tasks))))


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table of docs/hubs.md."""
    lines = ["| package | quickstart | requests | result |", "|---|---|---|---|"]
    for outcome in outcomes:
        framework, _, title = outcome.name.partition("/")
        required = (QUICKSTARTS / framework / requirements.FILE).read_text().split()
        package, version = required[0].split("==")
        result = "works" if not outcome.failure else "fails"
        if outcome.refusals:
            said = ", ".join(f"{what} ({count})" for what, count in outcome.refusals.items())
            result = f"{result}; refused on the way: {said}"
        name = f"{package.partition('[')[0]} {version}"
        lines.append(f"| {name} | {title.replace('_', ' ')} | {outcome.calls} | {result} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    use_home()
    outcomes: list[Outcome] = []
    for framework in [options.only] if options.only else FRAMEWORKS:
        outcomes += asyncio.run(play_all(framework))
    print(table(outcomes))
    for outcome in outcomes:
        if outcome.failure:
            print(f"\n{outcome.name}:\n{outcome.failure}")
    if options.write:
        hubs.write(table(outcomes), DOCUMENT, "frameworks")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
