"""curve, report, export and wait: looking at one run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

from flash_mcp.cli.output import answer, render, say, to_json
from flash_mcp.cli.parsing import JSON, Arguments, Command, Group, option
from flash_mcp.cli.tool_commands import stay
from flash_mcp.judgement import curve as drawing
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.exports import ExportKind
from flash_mcp.state.store import open_store

RUN_ID = option("run_id", "run id, as returned by train", "RUN_ID")


def curve(arguments: Arguments) -> None:
    """Draw a run's reward curve in the terminal or as a picture.

    Shows mean reward and success of the training rollouts, and held-out evaluations."""
    points = open_store().curve(arguments.run_id)
    if arguments.png is not None:
        _write(arguments.png, drawing.png(points), "--png")
    if arguments.json:
        say(to_json(dataclasses.asdict(points)))
    else:
        say(str(arguments.png or drawing.terminal(points)))


def report(arguments: Arguments) -> None:
    """Write a run as one HTML page: health, curves, rollouts, lineage, values.

    The page needs no network and no other file."""
    from flash_mcp.pages.report import html  # noqa: PLC0415

    out = arguments.out or Path(f"{arguments.run_id}.html")
    _write(out, html(open_store(), arguments.run_id).encode(), "--out")
    answer(arguments, {"path": str(out.absolute())}, str(out))


def _write(path: Path, content: bytes, option: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        fix = f"choose a file that you may write with {option}"
        what = f"cannot write there: {error}"
        raise FlashError("invalid_argument", what, path=path, fix=fix) from error


def export(arguments: Arguments) -> None:
    """Write a checkpoint as files that other programs read, with a model card.

    merged: safetensors with tokenizer and chat template. gguf-f16 and gguf-q8_0: one file for
    llama.cpp. adapter: PEFT, for the base model. All but the adapter are read back, and greedy
    answers are compared."""
    from flash_mcp.cli import export as exports  # noqa: PLC0415

    written = None
    if arguments.push_to and arguments.to:
        written = exports.found(arguments.to.absolute())
    if written is None:
        written = exports.export(open_store(), arguments.reference, arguments.format, arguments.to)
    if arguments.push_to:
        written = exports.pushed(written, arguments.push_to)
    body: dict[str, Any] = {"folder": str(written.folder)}
    if written.result:
        body |= written.result.model_dump()
    if written.pushed:
        body["pushed"] = written.pushed
    body["warnings"] = written.warnings
    answer(arguments, body, "\n".join(render(body)))


def wait(arguments: Arguments) -> int:
    """Return when a run has ended; the exit code says how.

    0 succeeded, 3 failed, 4 cancelled, 5 --timeout-s passed. Prints the run's report."""
    return stay(arguments.run_id, arguments.json, timeout_s=arguments.timeout_s, quiet=True)


COMMANDS: dict[str, Command | Group] = {
    "wait": Command(
        wait,
        ("flash-mcp wait run-2f9k1c8d --timeout-s 3600",),
        (RUN_ID, option("--timeout-s", "stop waiting after S seconds", "S", type=float), JSON),
    ),
    "curve": Command(
        curve,
        ("flash-mcp curve run-2f9k1c8d --png curve.png",),
        (RUN_ID, option("--png", "write a picture instead", "FILE", type=Path), JSON),
    ),
    "report": Command(
        report,
        ("flash-mcp report run-2f9k1c8d --out report.html",),
        (
            RUN_ID,
            option("--out", "file to write (default ./RUN_ID.html)", "FILE", type=Path),
            JSON,
        ),
    ),
    "export": Command(
        export,
        ("flash-mcp export run-2f9k1c8d@60 --format gguf-q8_0 --to calculator",),
        (
            option("reference", "RUN_ID, or RUN_ID@STEP (default: the newest)", "RUN[@STEP]"),
            option(
                "--format",
                "merged (default), adapter, gguf-f16 or gguf-q8_0",
                choices=get_args(ExportKind),
                default="merged",
            ),
            option("--to", "new folder (default ./RUN-STEP-FORMAT)", "FOLDER", type=Path),
            option("--push-to", "upload it to this private model at the hub", "OWNER/NAME"),
            JSON,
        ),
    ),
}
