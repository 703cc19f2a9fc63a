import inspect
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import environments
from environments.adapters.gym import GymEnvironment
from environments.agents import dialects
from environments.agents.server import DIALECTS
from environments.process.host import EnvironmentHost
from flash_mcp.cli.main import parser_for
from flash_mcp.cli.parsing import check_known
from flash_mcp.protocol.errors import CODES
from flash_mcp.protocol.extensions import ExportKind
from flash_mcp.protocol.spec import RECIPES, RunSpec, default_of
from flash_mcp.server.mcp_server import INSTRUCTIONS
from flash_mcp.tools.news import FLAG_LETTERS
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared import playbook
from tests import hostile
from tests.docs import ARCHITECTURE, FAULTS, NEXT, PLAYBOOK, REFERENCE, SECURITY, filled, wrapped
from tests.folders import allow
from tests.freeze import command
from tests.places import AGENT_CALCULATOR, ROOT

PROSE = re.compile(r"<!-- (fields|codes|tools) -->.*?<!-- /\1 -->|```.*?```", re.DOTALL)
NAME = re.compile(r"`([a-z][a-z0-9_]*)(?:=[^`]*|\([^`]*\))?`")


def literals(annotation: Any) -> set[str]:
    """Every text that a type allows by name."""
    if typing.get_origin(annotation) is typing.Literal:
        return {value for value in get_args(annotation) if isinstance(value, str)}
    return {name for part in get_args(annotation) for name in literals(part)}


def fields_of(model: type[BaseModel]) -> set[str]:
    """Names of a result's fields, of its parts, and of the values that they may have."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        names |= {name} | literals(field.annotation)
        for part in _models(field.annotation):
            names |= fields_of(part)
    return names


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def known_names() -> set[str]:
    """Every name that a reader can meet in a tool, a result, a run or an environment."""
    names = {*TOOLS, *RunSpec.model_fields, *CODES, *FLAG_LETTERS, "false", "true"}
    names |= set(get_args(ExportKind))
    for tool in TOOLS.values():
        names |= {*tool.signature.parameters, *fields_of(tool.signature.return_annotation)}
        for parameter in tool.signature.parameters.values():
            names |= literals(parameter.annotation)
    kinds = (
        environments.EnvironmentAgent, environments.EnvironmentCommand, environments.EnvironmentToolUse,
        environments.EnvironmentSingleTurn, environments.JudgeRubric,
    )  # fmt: skip
    for kind in kinds:
        names |= set(dir(kind))
    names |= set(inspect.signature(GymEnvironment).parameters)
    names |= set(inspect.signature(environments.EnvironmentAgent.run).parameters)
    names |= {*dialects.ROLES, "auto", "context_length_exceeded", "previous_response_id"}
    for path, dialect in DIALECTS.items():
        names |= dialect.honoured | dialect.of_the_run | {*dialect.neutral}
        names |= {f"/v1{path}", "count_tokens"}
    return names | {"load_environment", "self", "id", "score", "format", "parsed", "valid", "tool", "tool_calls"}


@pytest.mark.parametrize(
    "text",
    [PLAYBOOK.read_text(), REFERENCE.read_text(), playbook.loop("it"), INSTRUCTIONS],
    ids=["playbook", "reference", "prompt", "intro"],
)
def test_every_name_in_the_text_exists(text: str):
    assert set(NAME.findall(PROSE.sub("", text))) - known_names() == set()


def test_the_instructions_name_only_tools_that_exist():
    order = re.search(r"Order of work: (.*?)\n(?:train returns)", INSTRUCTIONS, re.DOTALL)
    assert order is not None
    mentioned = set(re.findall(r"\b(?:env_\w+|catalog|train|status|rollouts|deploy|chat)\b", order[1]))
    assert mentioned <= set(TOOLS) and len(mentioned) >= 8


@pytest.mark.parametrize(
    "page",
    [ARCHITECTURE, REFERENCE, NEXT, *(pytest.param(page, marks=pytest.mark.slow) for page in (FAULTS, SECURITY))],
)
def test_the_generated_tables_are_up_to_date(page: Path, request: pytest.FixtureRequest, monkeypatch):
    items, config = request.session.items, request.config
    is_part = any(map(config.getoption, ("keyword", "markexpr", "lf"))) or "::" in "".join(config.args)
    if not is_part and hostile.marked() <= {item.path for item in items}:  # else another process collects them
        monkeypatch.setattr(hostile, "found_by_pytest", lambda: hostile.counts(items))
    assert filled(page) == page.read_text(), "run: python -m tests.docs"


@pytest.mark.parametrize("page", [PLAYBOOK, REFERENCE], ids=["playbook", "reference"])
def test_every_flag_field_code_and_tool_is_explained(page: Path):
    names = FLAG_LETTERS if page == PLAYBOOK else [*RunSpec.model_fields, *CODES, *TOOLS]
    text = page.read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_playbook_is_short_and_leads_to_its_sections_alone():
    """It is read over MCP and in a starter, where no other page of the repository is."""
    assert len(PLAYBOOK.read_bytes()) < 36_000 and len(playbook.first_page().encode()) < 11_000
    sections = playbook.sections()
    links = set(re.findall(r"\]\(([^)]*)\)", PLAYBOOK.read_text()))
    assert links <= {f"#{name}" for name in sections}
    pages = [playbook.first_page(), *sections.values()]
    for path in (ROOT / "flash_mcp").rglob("*.py"):
        pages.append(path.read_text().replace("{ADDRESS}", playbook.ADDRESS))
    named = re.findall(r"(?:flash://playbook|playbook.ADDRESS})/([a-z-]+)", "".join(pages))
    assert {"environment", "rows", "sample", "evaluate", "reading-a-run"} <= {*named} <= {*sections}


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_schema_of_train_shows_every_default_and_its_text_repeats_none():
    """The defaults that depend on the algorithm are in the text, from the recipes."""
    properties = TOOLS["train"].arguments.model_json_schema()["properties"]
    for name in RunSpec.model_fields:
        stated = [f"{shown(recipe[name])} ({by})" for by, recipe in RECIPES.items() if name in recipe]
        if stated:
            assert properties[name]["description"].endswith(f"Default: {', '.join(stated)}.")
        else:
            default = default_of(name)
            assert properties[name]["default"] == (None if default in ([], {}) else default)
            assert "efault:" not in properties[name]["description"] or name == "max_length"


def example_files(folder: Path) -> Path:
    """The playbook's example, written to a folder."""
    blocks = re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", PLAYBOOK.read_text(), re.DOTALL)
    for name, body in blocks:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(body)
    return folder


async def test_the_playbooks_example_environment_works(tmp_path: Path, flash_home: Path):
    allow(flash_home, 'network = ["*"]', "memory_gib = 16")
    async with await EnvironmentHost.start(example_files(tmp_path)) as host:
        assert host.splits == {"train": 2, "eval": 1}
        assert await host.gold("train", 0) == [{"role": "assistant", "content": "<answer>7</answer>"}]
        rewards = []
        for answer in ("<answer>7</answer>", "<answer>8</answer>", ""):
            episode = (await host.open("train", 0)).episode
            assert (await host.step(episode, answer)).done
            score = await host.score(episode)
            rewards.append((score.reward, score.success))
        assert rewards == [(1.0, True), (0.2, False), (0.0, False)]


# What the examples import, as small as they need it. scripts/hubs plays them with the packages.
STAND_INS = {
    "gem": """
        GAMES = ["game:GuessTheNumber-v0-easy"]

        class Game:
            def reset(self, seed=None): return "Guess.", {}
            def step(self, action): return "Right.", 1.0, True, False, {}

        def make(name):
            assert name in GAMES
            return Game()
    """,
    "echo_env": """
        from types import SimpleNamespace as EchoAction

        class EchoEnv:
            def __init__(self, base_url): assert base_url
            async def reset(self, **kwargs): return {"observation": "Guess.", "reward": None, "done": False}
            async def step(self, action):
                return {"observation": action.message, "reward": 1.0, "done": True}
            async def close(self): pass
    """,
}


@pytest.mark.parametrize("imported", STAND_INS)
async def test_the_playbooks_wrapped_objects_work(tmp_path: Path, imported: str):
    (source,) = [body for body in wrapped().values() if f"{imported} " in body.replace("\n", " ")]
    (tmp_path / "environment.py").write_text(source)
    (tmp_path / f"{imported}.py").write_text(textwrap.dedent(STAND_INS[imported]))
    async with await EnvironmentHost.start(tmp_path) as host:
        opening = await host.open("train", 0)
        assert opening.messages == [{"role": "user", "content": "Guess."}]
        assert (await host.step(opening.episode, "7")).done and (await host.score(opening.episode)).success


def test_every_example_in_python_runs_in_a_test():
    text = "".join(path.read_text() for path in (PLAYBOOK, *ROOT.glob("docs/*.md")))
    # The client of docs/agents.md runs in the tests of the gateway, that of docs/use.md in tests/test_client.py.
    assert text.count("```python") == len(wrapped()) + 4 == len(STAND_INS) + 4


@pytest.mark.slow
async def test_the_agent_of_the_text_answers(tmp_path: Path):
    text = (ROOT / "docs/agents.md").read_text()
    (source,) = re.findall(r"## Train the agent.*?```python\n(.*?)```\n\nThe agent", text, re.DOTALL)
    example_files(tmp_path)
    (tmp_path / "environment.toml").write_text("endpoint = true\n")
    (tmp_path / "environment.py").write_text(source)
    (tmp_path / "agent.py").write_text(AGENT_CALCULATOR.read_text())
    async with await EnvironmentHost.start(tmp_path) as host:
        opening = await host.open("train", 0)
        assert (await host.step(opening.episode, "7")).done and (await host.score(opening.episode)).success


def test_the_playbooks_example_config_is_complete(tmp_path: Path):
    """A short first run that is evaluated before and after, so that it gets a verdict."""
    config = example_files(tmp_path) / "configs/rl.toml"
    spec = RunSpec(**tomllib.loads(config.read_text()))
    assert (spec.environment, spec.algorithm, spec.steps) == ("sums", "grpo", 20)
    assert spec.eval_before and spec.eval_after


def test_every_place_that_the_architecture_names_exists():
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", ARCHITECTURE.read_text()))
    assert len(named) > 30
    roots = (ROOT, ROOT / "flash_mcp")
    assert {place for place in named if not any((root / place).exists() for root in roots)} == set()


def test_the_architecture_names_every_room():
    rooms: set[str] = set()
    for package in ("flash_mcp", "environments", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            rooms.add(str(path.parent.relative_to(ROOT)))
    unnamed = {room for room in rooms if f"`{room}/`" not in ARCHITECTURE.read_text()}
    unnamed = {room for room in unnamed if not room.startswith("environments/examples")}
    assert unnamed == {"flash_mcp"}  # its rooms are named


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
FENCE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("serve", "deploy", "gateway", "train", "evaluate", "tournament", "target add", "target check", "install",
             "certify calculator")  # fmt: skip
"""Commands that go on, need a cluster, or change the configuration of the machine's own agents."""
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and path.stem != "__init__")
WITH_HELP = {"bench", "crash", "demo", "gpu-check", "hubs", "loop", "scale"}
TESTED_ELSEWHERE = {
    "density.py": "tests/test_scripts.py", "function_sizes.py": "tests/test_scripts.py",
    "lint": "tests/test_scripts.py", "next_pins.py": "tests/test_next_pins.py",
    "pack_gpu.py": "tests/test_pack_gpu.py",
}  # fmt: skip


def blocks(page: Path, program: str) -> list[list[str]]:
    """The commands of the page's blocks that run the program: its words, without comments."""
    lines = [line for body in FENCE.findall(page.read_text()) for line in body.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if not line.endswith("\\")]
    return [each[1:] for each in words if each and each[0].endswith(program)]


def mentions(program: str) -> list[tuple[str, list[str]]]:
    """(page, words) of the commands within the text of all pages."""
    spans = re.compile(rf"`(?:npx \S+ )?(?:\S*/)?{program}((?: [^`]+)?)`")
    return [(page.name, shlex.split(span)) for page in PAGES for span in spans.findall(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_its_blocks_run(page: Path, tmp_path: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(flash_home))
    monkeypatch.chdir(tmp_path)  # they write files
    Path("environments").symlink_to(ROOT / "environments")
    for words in blocks(page, "flash-mcp"):
        check_known(*parser_for(words).parse_known_args(words))
        if not " ".join(words).startswith(ELSEWHERE):
            code, text = command(*words)
            assert code == 0, (words, text)


@pytest.mark.slow
def test_the_commands_within_the_text_exist_with_their_options() -> None:
    named = mentions("flash-mcp")
    assert len(named) > 25
    for page, words in named:
        options = [word for word in words if word.startswith("--")]
        code, text = command(*words[:1], "--help")
        if "ACTION" in text and words[1:]:
            code, text = command(*words[:2], "--help")
        assert code == 0 and [each for each in options if each not in text] == [], (page, words)


def test_scripts_in_the_text_exist_and_know_their_options() -> None:
    for page in PAGES:
        for name, rest in re.findall(r"\bscripts/([\w.-]+)([^`\n]*)", page.read_text()):
            assert name.rstrip(".") in SCRIPTS, (page.name, name)
            script = (ROOT / "scripts" / name.rstrip(".")).read_text()
            module = re.search(r"python\"? -m ([\w.]+) \"\$@\"", script)
            if module and module[1] != "pytest":
                place = ROOT / module[1].replace(".", "/")
                place = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
                script += place.read_text()
            for option in re.findall(r" (--[a-z-]+)", rest.partition("#")[0]):
                assert option in script or option == "--last-failed", (page.name, name, option)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one, with scripts that find everything installed."""
    for path in ROOT.iterdir():
        if path.name != "scripts":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("install", "peers"):
        (tmp_path / "scripts" / name).write_text("#!/bin/sh\n")
    return tmp_path


@pytest.mark.slow
def test_every_script_starts(checkout: Path) -> None:
    for name in WITH_HELP:
        done = subprocess.run(
            [f"scripts/{name}", "--help"], cwd=checkout, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "usage: " in done.stdout, (name, done.stderr)
    shell = {*SCRIPTS} - WITH_HELP - {*TESTED_ELSEWHERE}
    assert shell == {
        "frameworks", "install", "models", "peers", "test", "test-clients", "test-engines",
    }  # fmt: skip
    for name in shell:  # they fetch packages
        subprocess.run(["sh", "-n", ROOT / "scripts" / name], check=True)
    for name, test in TESTED_ELSEWHERE.items():
        assert name.partition(".")[0] in (ROOT / test).read_text()
