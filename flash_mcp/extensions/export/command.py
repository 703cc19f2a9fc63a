"""export: write a checkpoint as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from flash_mcp.cli.output import answer
from flash_mcp.cli.parsing import JSON, Arguments, Command, option
from flash_mcp.protocol.extensions import ExportKind
from flash_mcp.state.store import open_store


def export(arguments: Arguments) -> None:
    """Write a checkpoint as files that other programs read, with a model card.

    merged: safetensors with tokenizer and chat template. gguf-f16 and gguf-q8_0: one file for
    llama.cpp. adapter: PEFT, for the base model. All but the adapter are read back, and greedy
    answers are compared."""
    from flash_mcp.extensions.export import files  # noqa: PLC0415

    store = open_store()
    reference, kind = arguments.reference, arguments.format
    written = None
    if arguments.push_to and arguments.to:
        written = files.written_before(store, reference, kind, arguments.to.absolute())
    if written is None:
        written = files.export(store, reference, kind, arguments.to)
    body: dict[str, Any] = {"folder": str(written.folder)}
    if written.result:
        body |= written.result.model_dump()
    if arguments.push_to:
        body["pushed"] = files.push(written.folder, arguments.push_to)
    body["warnings"] = written.warnings
    answer(arguments, body)


COMMAND = Command(
    export,
    ("flash-mcp export run-2f9k1c8d@60 --format gguf-q8_0 --to calculator",),
    (
        option("reference", "RUN_ID, or RUN_ID@STEP (default: the newest)", "RUN[@STEP]"),
        option(
            "--format",
            f"{', '.join(get_args(ExportKind))}; default merged",
            choices=get_args(ExportKind),
            default="merged",
        ),
        option("--to", "new folder (default ./RUN-STEP-FORMAT)", "FOLDER", type=Path),
        option("--push-to", "upload it to this private model at the hub", "OWNER/NAME"),
        JSON,
    ),
)
