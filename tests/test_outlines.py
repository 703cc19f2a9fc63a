"""An outline shows every change of a schema that a client could notice."""

import copy
import difflib
from typing import Any

import pytest

from tests.freeze import GOLDEN, frozen
from tests.outlines import tool_outline

TOOL: dict[str, Any] = {
    "name": "train",
    "title": "Train",
    "description": "Start a run. It returns at once.",
    "annotations": {"readOnlyHint": False},
    "inputSchema": {
        "type": "object",
        "properties": {
            "steps": {"type": "integer", "default": 20, "minimum": 1, "description": "Steps. All."},
            "loss": {"type": "string", "enum": ["grpo", "dapo"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}},
        },
        "required": ["loss"],
        "additionalProperties": False,
    },
    "outputSchema": {
        "type": "object",
        "properties": {
            "next": {"type": "string", "description": "What to do next. Always."},
            "metrics": {"type": "object", "additionalProperties": {"type": "number"}},
            "verdict": {"anyOf": [{"const": "contaminated"}, {"type": "string"}]},
        },
    },
}


def test_an_outline_has_every_field() -> None:
    assert (
        tool_outline(TOOL)
        == """\
Start a run. It returns at once.

annotations: {"readOnlyHint": false}
name: "train"
title: "Train"

arguments: object {}
  steps: integer = 20, minimum=1  # Steps. All.
  loss!: string, enum=["grpo", "dapo"]
  tags: array
    []: string, maxLength=9

result: object; next: string; metrics: object; {*}: number; verdict: any; |: any, const="contaminated"; |: string"""
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("description", "Start a run. It waits."),
        ("annotations.readOnlyHint", True),
        ("inputSchema.properties.steps.type", "number"),
        ("inputSchema.properties.steps.default", 21),
        ("inputSchema.properties.steps.minimum", 2),
        ("inputSchema.properties.steps.maximum", 99),
        ("inputSchema.properties.steps.description", "Steps. Some."),
        ("inputSchema.properties.loss.enum", ["grpo", "cispo"]),
        ("inputSchema.properties.tags.items.maxLength", 8),
        ("inputSchema.properties.more", {"type": "string"}),
        ("inputSchema.required", ["loss", "steps"]),
        ("inputSchema.additionalProperties", True),
        ("outputSchema.properties.metrics.additionalProperties.type", "integer"),
        ("outputSchema.properties.verdict.anyOf", [{"const": "contaminated"}]),
        ("outputSchema.required", ["next"]),
    ],
)
def test_a_change_of_a_schema_changes_its_outline(path: str, value: Any) -> None:
    tool = copy.deepcopy(TOOL)
    *parents, key = path.split(".")
    schema = tool
    for parent in parents:
        schema = schema[parent]
    assert schema.get(key) != value
    schema[key] = value
    assert tool_outline(tool) != tool_outline(TOOL)


NAMES = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return frozen(tmp_path_factory.mktemp("frozen"))


@pytest.mark.slow
def test_the_golden_files_are_those_that_are_made(found: dict[str, str]):
    assert sorted(found) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_users_see_has_changed(found: dict[str, str], name: str):
    golden = (GOLDEN / name).read_text(encoding="utf-8")
    lines = difflib.unified_diff(golden.splitlines(), found.get(name, "").splitlines(), f"golden/{name}", "now", n=1)
    changes = "\n".join(lines)
    if changes:
        pytest.fail(f"{name} has changed; if that is meant: python -m tests.freeze\n{changes}", pytrace=False)
