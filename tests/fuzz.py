"""Calls every tool with arguments made up from its schema, right ones and wrong ones mixed.

    python -m tests.fuzz --cases 5000

Whatever is given, the answer is a result that follows the schema or a coded error that says what to do; the client
never sees a traceback, and a refused call leaves nothing behind. Prints how often each tool answered what."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client
from mcp_types import CallToolResult
from mcp_types import Tool as ListedTool

from flash_mcp.protocol.errors import CODES
from flash_mcp.server.mcp_server import server
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared.truncation import RESULT_CHARACTERS, to_text
from tests.samples import ENVIRONMENT, finished_run, queued_run, supervised

Json = dict[str, Any]
Outcomes = Counter[tuple[str, str]]
NOT_STATE = ("flash.db", "logs", "supervisor.lock", "exports")
"""An export that fails keeps what its process printed, for the next call."""
WAITS_S = 0.02
USER_CODE = {"environment_invalid", "environment_error", "environment_timeout"}
"""Errors that quote the traceback of the user's own code."""

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(lambda text: text.lstrip("/~"))
EDGES = [0, -1, 2**31, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 10**400]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
TINY = [5e-324, 1e-320, 2.2e-308, -1e-320, 1.7e308]
TEXTS = ["", "a\0b", "x" * 100_000, "s3://x", "file:///x", "..", "a/../b", "x" * 256, "\u202e", "٣", "nul", "-x"]
"""Those that systems read otherwise than people do, are too long, or no text."""
REFERENCES = ("model", "init_from_adapter", "teacher", "dataset", "resume", "base", "other", "environment")
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
JUNK = st.one_of(
    st.none(), st.booleans(), NUMBERS, TEXT, st.lists(TEXT, max_size=2), st.dictionaries(TEXT, TEXT, max_size=2)
)


def values(schema: Json, known: list[str]) -> st.SearchStrategy[Any]:
    """Values that a schema allows; texts are now and then those that mean something."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values(option, known) for option in schema["anyOf"]])
    match schema.get("type"):
        case "integer":
            least, most = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
            common = st.integers(max(least, -3), max(least, min(most, 100)))
            return st.one_of(common, common, st.sampled_from([least, most, *EDGES]))
        case "number":
            bounds = [schema[name] for name in BOUNDS if name in schema]
            common = st.floats(schema.get("minimum", 0), schema.get("maximum", 3), allow_nan=False)
            return st.one_of(common, common, st.sampled_from([*bounds, *EDGES, *TINY]))
        case "boolean":
            return st.booleans()
        case "string":
            return st.one_of(st.sampled_from(known), TEXT, TEXT, st.sampled_from(TEXTS))
        case "array":
            return st.lists(values(schema.get("items", {}), known), max_size=3)
        case "object" if "properties" in schema:
            return st.fixed_dictionaries({name: values(part, known) for name, part in schema["properties"].items()})
        case "object":
            return st.one_of(st.just({"environment.py": ENVIRONMENT}), st.dictionaries(TEXT, TEXT, max_size=3))
        case _:
            return JUNK


def argument(name: str, schema: Json, known: list[str]) -> st.SearchStrategy[Any]:
    if name.endswith("_s"):  # do not wait for real
        return st.one_of(st.just(WAITS_S), st.just(-1), st.just(1e9), TEXT)
    right = values(schema, known)
    return st.one_of(right, right, right, JUNK)


def edged(tool: ListedTool, right: Json, known: list[str]) -> list[tuple[str, Json]]:
    """Calls that are right but for one argument, which is at an edge of its type."""
    properties, required = tool.input_schema["properties"], tool.input_schema.get("required", [])
    common = {name: right.get(name, "echo") for name in required}
    if "wait_s" in properties:
        common["wait_s"] = WAITS_S
    results: list[tuple[str, Json]] = []
    for name, schema in properties.items():
        if not name.endswith("_s"):
            results += [(tool.name, {**common, name: value}) for value in edges(schema)]
            results += [(tool.name, {**common, name: f"{run}@{10**30}"}) for run in known[:1] if name in REFERENCES]
    return results


def edges(schema: Json) -> list[Any]:
    """Values at the edges of each type that a schema names."""
    if "anyOf" in schema:
        return [value for option in schema["anyOf"] for value in edges(option)]
    bounds = [schema[name] for name in BOUNDS if name in schema]
    match schema.get("type"):
        case "integer":
            return [*bounds, *EDGES]
        case "number":
            return [*bounds, *EDGES, *TINY]
        case "string" if "enum" not in schema:
            return TEXTS
        case "array":
            return [[value] for value in edges(schema.get("items", {}))]
        case "object":
            return [{"x": value} for value in (*EDGES, *TINY, *TEXTS)] + [{text: "x"} for text in TEXTS]
        case _:
            return []


@st.composite
def calls(draw: st.DrawFn, tool: ListedTool, known: list[str]) -> tuple[str, Json]:
    """A tool's name and arguments: most of the required ones, some of the others, seldom one that it does not have."""
    properties, required = tool.input_schema["properties"], tool.input_schema.get("required", [])
    optional = [name for name in properties if name not in required]
    chosen = [name for name in required if draw(st.integers(0, 19))]
    chosen += draw(st.lists(st.sampled_from(optional), max_size=5, unique=True)) if optional else []
    arguments = {name: draw(argument(name, properties[name], known)) for name in chosen}
    if "wait_s" in properties:
        arguments.setdefault("wait_s", WAITS_S)  # the default would wait for what never comes
    if not draw(st.integers(0, 19)):
        arguments[draw(TEXT.filter(lambda name: name not in properties))] = draw(JUNK)
    return tool.name, arguments


def state(home: Path, work: Path) -> set[str]:
    """All that a call could leave behind, in words."""
    store = open_store()
    tables = ("runs", "environments", "deployments", "events", "checkpoints", "evals")
    rows = {f"{table}: {row}" for table in tables for row in store.query(f"SELECT * FROM {table}")}
    files = {str(path) for path in home.rglob("*") if not path.relative_to(home).parts[0].startswith(NOT_STATE)}
    return rows | files | {str(path) for path in work.rglob("*")}


def judged(name: str, result: CallToolResult) -> str:
    """The outcome in a word: `ok`, or the code of the error. AssertionError where it is neither."""
    (block,) = result.content
    text = getattr(block, "text", "")
    if not result.is_error:
        assert json.loads(text) == result.structured_content
        assert text == to_text(result.structured_content) and len(text) <= RESULT_CHARACTERS
        assert list(json.loads(text))[-1] == "next"
        return "ok"
    code = text.removeprefix("[").partition("]")[0].partition(" ")[0]
    assert code in CODES, f"{name}: {text}"
    assert code != "internal", f"{name}: {text}"
    assert "Fix: " in text, f"{name}: {text}"
    assert code in USER_CODE or "Traceback" not in text, f"{name}: {text}"
    return code


def fuzz(cases: int, folder: Path, *, seed: int | None = None) -> Outcomes:
    """Make at least `cases` calls, as many of each tool, on a state directory with an environment and two runs in
    it; FLASH_HOME is that directory."""
    outcomes: Outcomes = Counter()
    home, work = Path(os.environ["FLASH_HOME"]), folder / "work"
    work.mkdir()
    known = [finished_run(folder).id, queued_run(folder / "environment").id, "echo", str(folder / "environment")]
    before_here = Path.cwd()
    os.chdir(work)
    try:
        with (
            supervised(),
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(Client(server)) as client,
        ):
            tools = portal.call(client.list_tools).tools

            limits = settings(
                max_examples=-(-cases // len(tools)), deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip

            def one(call: tuple[str, Json]) -> None:
                name, arguments = call
                before = state(home, work)
                outcome = judged(name, portal.call(client.call_tool, name, arguments))
                left = set() if outcome == "ok" else state(home, work) ^ before
                assert not left, f"{name} left behind: {left}"
                outcomes[name, outcome] += 1
                for path in work.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

            right: Json = {"run_id": known[0], "deployment": "d", "base": known[0], "other": known[0]}
            for tool in tools:
                odd = st.sampled_from(edged(tool, right, known))
                test = limits(given(st.one_of(calls(tool, known), odd))(one))
                (hypothesis.seed(seed)(test) if seed is not None else test)()
    finally:
        os.chdir(before_here)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None)
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FLASH_HOME"] = f"{scratch}/home"
        outcomes = fuzz(given_.cases, Path(scratch), seed=given_.seed)
    for name in sorted({name for name, _ in outcomes}):
        found = ", ".join(f"{code} {count}" for (tool, code), count in sorted(outcomes.items()) if tool == name)
        sys.stdout.write(f"{name}: {found}\n")
    sys.stdout.write(f"{outcomes.total()} calls\n")


if __name__ == "__main__":
    main()
