"""The rows of docs/models.md, each tried again: three always, the others with `scripts/test --long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_mcp.protocol.base_models import NEEDS_GPU
from tests.model_rows import ARCHITECTURES
from tests.models import run_row, stored_rows

QUICK = ("qwen3_5", "gemma3", "qwen3_moe")
"""A wrapper with a state, a wrapper with two kinds of attention, a mixture of experts."""


def test_the_page_has_a_row_for_each_architecture() -> None:
    assert list(stored_rows()) == list(ARCHITECTURES)


def test_train_refuses_each_no_of_the_page() -> None:
    refused = [name for name, verdict in stored_rows().items() if verdict.startswith("no")]
    assert refused == list(NEEDS_GPU)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ARCHITECTURES]
)
def test_an_architecture_does_what_its_row_says(name: str, tmp_path: Path) -> None:
    row = run_row(name, tmp_path)
    log = (tmp_path / f"{name}.log").read_text()[-2000:]
    assert row.verdict == stored_rows()[name], f"{row.failed} {log}"
