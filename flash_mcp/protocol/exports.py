"""What an export job asks of `worker.export`, and what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flash_mcp.protocol.result_model import ResultModel

ExportKind = Literal["merged", "adapter", "gguf-f16", "gguf-q8_0"]


class ExportJob(ResultModel):
    kind: ExportKind
    name: str
    """What the model is called in its files."""
    model: str
    """Base model: a catalog name, a hub id (with its commit, if known) or a folder."""
    adapter: Path | None = None
    """Folder of the adapter; None for the base model alone."""
    hub_id: str | None = None
    """Where others find the base model."""
    folder: Path
    """An empty folder to write to."""
    prompts: list[list[dict[str, str]]]
    """Messages whose greedy answers are compared."""


class Agreement(ResultModel):
    """Greedy answers of the written file, read back, against the model in memory."""

    tokens: int
    """Tokens that were compared."""
    equal: int
    """Those that the model in memory writes too; of a GGUF file, after the file's own before it."""


class Exported(ResultModel):
    base_digest: str
    """SHA-256 of the base model's weights."""
    agreement: Agreement | None = None
    """None for an adapter, which is copied."""
