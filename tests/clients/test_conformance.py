"""The MCP conformance suite, the inspector and a scanner, against the product's server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.server.mcp_server import server
from flash_mcp.tools.registry import TOOLS
from tests.clients.helpers import INSPECTOR, INSTALLED, PROGRAMS, SERVE, inspect, listening, needs, run
from tests.ports import free_port
from tests.samples import finished_run, supervised

HERE = Path(__file__).parent
REVISIONS = ("2025-11-25", "2026-07-28")
EXTENSION = {
    "lifecycle": {"sep-2663-tasks-get-status-failed"},  # none of ours ever fails on the level of the protocol
    "capability-negotiation": set[str](),
    "wire-fields": set[str](),
    "request-state-removal": set[str](),
    "request-headers": set[str](),
    "dispatch-and-envelope": set[str](),
}
"""Scenarios of the tasks extension, and the checks of them that ask for what we have not."""
CONFORMANCE = PROGRAMS / "conformance"
CONVERTERS = INSTALLED / "converters" / "bin" / "python"
SCANNER = INSTALLED / "scanner" / "bin" / "mcp-scanner"
TOOL_ERROR = 5
MANY = ("--requests-per-minute", "100000", "--unauthenticated")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The address of the product's server, as its command starts it."""
    port = free_port()
    with listening([*SERVE, "--http", "--port", str(port), *MANY], port, tmp_path_factory.mktemp("product")) as address:
        yield f"{address}/mcp"


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The address of the product's server with the suite's tools mounted on it."""
    port = free_port()
    command = [sys.executable, "-m", "tests.clients.fixtures", str(port)]
    with listening(command, port, tmp_path_factory.mktemp("mounted")) as address:
        yield f"{address}/mcp"


def conformance(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run([CONFORMANCE, "server", "--url", address, *options])


@needs(CONFORMANCE)
@pytest.mark.parametrize("revision", REVISIONS)
def test_the_product_fails_only_where_the_suite_needs_tools_of_its_own(revision: str, product: str):
    baseline = HERE / f"baseline.{revision}.yml"
    ended = conformance(product, "--suite", "all", "--spec-version", revision, "--expected-failures", str(baseline))
    assert ended.returncode == 0, ended.stdout
    assert "Baseline check passed" in ended.stdout


@needs(CONFORMANCE)
@pytest.mark.parametrize("revision", REVISIONS)
def test_every_requirement_is_met_once_the_suites_tools_are_mounted(revision: str, mounted: str):
    ended = conformance(mounted, "--requirements", revision)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.partition("=== SUMMARY ===")[2].count("✓") >= 30, ended.stdout


@needs(CONFORMANCE)
@pytest.mark.parametrize("scenario", EXTENSION)
def test_the_tasks_extension_conforms(scenario: str, mounted: str, tmp_path: Path):
    options = ("--scenario", f"tasks-{scenario}", "--spec-version", "2026-07-28", "--force", "-o", str(tmp_path))
    ended = conformance(mounted, *options)
    (file,) = tmp_path.rglob("checks.json")
    found = json.loads(file.read_text())
    assert len(found) >= 3, ended.stdout
    assert {check["id"] for check in found if check["status"] in ("FAILURE", "WARNING")} == EXTENSION[scenario]


@needs(INSPECTOR)
@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_the_strictest_check_of_schemas_finds_nothing(era: str):
    ended = inspect("--method", "tools/list", "--strict", "--protocol-era", era)
    assert ended.returncode == 0, ended.stdout
    assert [tool["name"] for tool in printed(ended)["result"]["tools"]] == list(TOOLS)


@needs(INSPECTOR)
def test_the_inspector_sees_results_and_errors(tmp_path: Path):
    run_id = finished_run(tmp_path).id
    with supervised():
        status = inspect("--method", "tools/call", "--tool-name", "status", "--tool-arg", f"run_id={run_id}")
        refused = inspect("--method", "tools/call", "--tool-name", "status", "--tool-arg", f"runid={run_id}")
    assert status.returncode == 0, status.stdout
    assert printed(status)["result"]["structuredContent"]["run"]["verdict"]["outcome"] == "improved"
    assert refused.returncode == TOOL_ERROR, refused.stdout
    assert "did you mean 'run_id'?" in refused.stdout


def printed(ended: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a client printed, among what was said on stderr."""
    start = re.search(r"^[\[{]", ended.stdout, re.MULTILINE)
    assert start is not None, ended.stdout
    return json.JSONDecoder().raw_decode(ended.stdout[start.start() :])[0]


@needs(CONVERTERS)
async def test_every_family_of_clients_can_convert_every_tool(tmp_path: Path):
    tools = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in await server.list_tools()]
    listed = tmp_path / "tools.json"
    listed.write_text(json.dumps(tools))
    assert run([CONVERTERS, HERE / "converters.py", listed]).stdout == f"{len(TOOLS)} tools, 3 converters\n"


@needs(SCANNER)
def test_the_scanner_finds_nothing():
    command, *arguments = SERVE
    ended = run(
        [SCANNER, "--analyzers", "yara,schema", "--raw", "stdio", "--stdio-command", command,
         *(f"--stdio-arg={argument}" for argument in arguments)]
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    scanned = {tool["tool_name"]: tool for tool in printed(ended)}
    assert set(scanned) == set(TOOLS) and [tool for tool in scanned.values() if not tool["is_safe"]] == []
    assert {tuple(tool["findings"]) for tool in scanned.values()} == {("schema_analyzer", "yara_analyzer")}
