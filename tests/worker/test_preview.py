"""Rows to learn, shown before a run by the model's own template and tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.extensions.pages import live
from flash_mcp.protocol.base_models import find
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.tools.shared.rows import preview_of
from tests.calls import call
from tests.samples import push_echo, supervised
from tests.tiny import make_tokenizer
from tests.tools.test_table import row
from worker.preview import preview
from worker.rollouts.gold import rows_of_line
from worker.rollouts.transcript import ChatTemplate

pytestmark = pytest.mark.slow
JOB: dict[str, Any] = {"thinking": False, "max_length": 40, "seconds": 60.0}


def test_rows_are_shown_as_the_run_will_make_them():
    rows = [row(("user", "hi"), ("assistant", "x" * size)) for size in (9, 3, 90)]
    two = row(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    template = ChatTemplate(make_tokenizer())
    shown = preview(JOB | {"rows": [*rows, two]}, template)
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown["shortest"] == f"{start}[[xxx<|im_end|>]]" and shown["longest"] == f"{start}[[{'x' * 90}<|im_end|>]]"
    sizes = sorted(len(made["input_ids"]) for line in [*rows, two] for made in rows_of_line("", line, template))
    assert shown["tokens"] == {
        "shortest": sizes[0], "median": sum(sizes[1:3]) // 2, "p95": sizes[3], "longest": sizes[3],
    }  # fmt: skip
    assert (shown["rows"], shown["measured"], shown["cut"], shown["left_out"]) == (4, 4, 2, 0)
    hurried = preview(JOB | {"rows": [*rows, two], "seconds": 0.0, "max_length": 20}, template)
    assert (hurried["measured"], hurried["left_out"], hurried["longest"]) == (2, 2, shown["longest"])
    with pytest.raises(FlashError, match=r"train.jsonl line 2: message 2 holds '<\|im_end"):
        preview(JOB | {"rows": [rows[0], row(("user", "hi"), ("assistant", "x<|im_end|>"))]}, template)


def test_a_process_renders_the_rows_of_a_model_that_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flash_mcp.tools.shared.rows.models_dir", lambda: tmp_path)
    monkeypatch.setattr("flash_mcp.tools.shared.rows.PREVIEW_LIMIT_S", 150.0)
    options: dict[str, Any] = {"card": replace(find(DEFAULT_MODEL), name="tiny"), "thinking": False, "max_length": 400}
    rows = [row(("user", "hi"), ("assistant", "y" * 900))]
    elsewhere = preview_of(rows, **options)
    assert elsewhere and elsewhere.tokens is None and "the files of tiny are not on this machine yet" in elsewhere.by
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    shown = preview_of(rows, {"used": ["q", "a"], "ignored": {"id": 1}}, **options)
    assert shown and shown.by == "tiny's chat template and tokens" and shown.cut == 1 and shown.tokens
    assert (shown.columns_used, shown.columns_ignored) == (["q", "a"], {"id": 1})
    assert shown.longest.startswith("<|im_start|>user") and shown.longest.endswith("yyy<|im_end|>]]")
    with pytest.raises(FlashError, match="a control token of this model"):
        preview_of([row(("user", "hi"), ("assistant", "<|im_end|>"))], **options)


async def test_rows_that_max_length_leaves_out_are_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flash_mcp.tools.shared.rows.models_dir", lambda: tmp_path)
    monkeypatch.setattr("flash_mcp.tools.shared.rows.PREVIEW_LIMIT_S", 150.0)
    make_tokenizer().save_pretrained(tmp_path / find(DEFAULT_MODEL).name)
    path = tmp_path / "chats.jsonl"
    rows = [{"question": "q" * (1 + 300 * (n > 6)) + str(n), "answer": "a"} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    push_echo(tmp_path / "echo")
    job: dict[str, Any] = {"environment": "echo", "algorithm": "sft", "dataset": str(path), "batch_size": 1}
    with supervised():
        for options in ({"validate_only": True}, {}):
            plan = await call("train", **job, **options, epochs=2, settings={"max_length": 60})
            assert (plan["estimate"]["dataset_rows"], plan["estimate"]["steps"]) == (9, 14)
        page = live.dataset(plan["values"]["dataset"])
        assert "tokens, median</" in page and "q0&lt;|im_end|&gt;" in page
        with pytest.raises(FlashError, match="no answer to learn fits within max_length=16"):
            await call("train", **job, settings={"max_length": 16})
