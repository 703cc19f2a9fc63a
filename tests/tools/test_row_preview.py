"""Rows to learn, shown with what is learnt of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.tools.shared.rows import preview_of
from tests.calls import call
from tests.samples import push_echo


def row(*said: tuple[str, str], prompt: int = 1, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in said], "prompt_messages": prompt, **more}


def test_what_is_learnt_of_a_row_stands_between_brackets():
    rows = [row(("user", "hi"), ("assistant", "yo")) for _ in range(18)]
    context = row(
        ("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), prompt=4
    )
    unlearnt = row(("user", "x" * 700), ("assistant", "no"), ("user", "c"), ("assistant", "yes"))
    unlearnt["messages"][1]["weight"] = 0
    shown = preview_of([*rows, context, unlearnt])
    assert shown is not None and shown.by.startswith("estimated from characters (for any model)")
    assert (shown.rows, shown.tokens_about) == (20, {"median": 1, "p95": 202, "longest": 202})
    assert shown.shortest == shown.typical == "user: hi\nassistant: [[yo]]"
    assert "assistant: no\nuser: c\nassistant: [[yes]]" in shown.longest and len(shown.longest) < 1000
    only = preview_of([context])
    assert only is not None and "assistant: b\nuser: c\nassistant: [[d]]" in only.longest
    thought = row(("user", "a"), ("assistant", "b"))
    thought["messages"][1]["reasoning_content"] = "hm"
    seen = preview_of([thought])
    assert seen is not None and seen.longest == "user: a\nassistant: [[<think>hm</think> b]]"
    assert preview_of([]) is None


@pytest.mark.usefixtures("no_supervisor")
async def test_rows_are_shown_before_they_are_trained_on(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {n}?", "answer": f"It is {n}."}) for n in range(12)))
    dry = await call("curate", runs=[str(path)], dry_run=True)
    assert dry["preview"]["rows"] == 12 and "[[It is " in dry["preview"]["typical"]
    push_echo(tmp_path / "echo")
    plan = await call(
        "train", environment="echo", algorithm="sft", dataset=str(path), validate_only=True, max_length=32
    )
    assert "[[It is " in plan["preview"]["longest"] and "cut" not in plan["preview"]
    assert plan["preview"]["columns_used"] == ["question", "answer"]
