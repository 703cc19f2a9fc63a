"""Prints which of the tools in a file (the result of tools/list) which client's own converter refuses.

Runs in the environment that scripts/test-clients makes, which has these clients."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.strict_schema import ensure_strict_json_schema  # pyright: ignore[reportMissingImports]
from google.genai import _mcp_utils  # pyright: ignore[reportMissingImports]
from langchain_core.utils.function_calling import convert_to_openai_tool  # pyright: ignore[reportMissingImports]
from mcp import types

CONVERTERS: dict[str, Callable[[Any], object]] = {
    "google-genai": lambda tool: _mcp_utils.mcp_to_gemini_tool(types.Tool(**tool)),
    "openai-agents, strict": lambda tool: ensure_strict_json_schema(copy.deepcopy(tool["inputSchema"])),
    "langchain": lambda tool: convert_to_openai_tool(
        {"title": tool["name"], "description": tool["description"], **tool["inputSchema"]}, strict=True
    ),
}

tools = json.loads(Path(sys.argv[1]).read_text())
for client, convert in CONVERTERS.items():
    for tool in tools:
        try:
            convert(tool)
        except Exception as error:
            sys.stdout.write(f"{client} refuses {tool['name']}: {error!r:.200}\n")
sys.stdout.write(f"{len(tools)} tools, {len(CONVERTERS)} converters\n")
