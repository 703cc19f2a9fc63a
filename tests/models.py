"""Trains, syncs, saves and exports a tiny model of each architecture, and writes docs/models.md.

    scripts/models [ROW...]

Each row runs in a process of its own. What a row says was tried here, on a CPU, with random
weights; the first failure of a step is in its words."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flash_mcp.protocol.errors import FlashError
from tests.forked import Forked
from tests.model_rows import ARCHITECTURES, make_model
from worker.process import PROCESS_SETTINGS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
LENGTH = 256
RANK = 8
ROW_S = 900.0
COLUMNS = ("architecture", "trains", "pass", "merged sync", "adapter sync", "sft", "export", "GGUF")
ON_A_CPU = {
    "has no attribute 'float32'": "needs Triton",
    "has no attribute 'bfloat16'": "needs Triton",
    "support only width of 4": "vLLM on a CPU: convolutions of width 4 only",
}
"""What vLLM's CPU build says -> what it means."""


@dataclass
class Row:
    """What was seen of one architecture. Each step has a word or a number, or why it failed."""

    name: str
    layers: list[str] = field(default_factory=list)
    """The kinds of layers that get an adapter."""
    steps: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """yes, slow (a prompt is computed for each completion), or no."""
        needed = {"load", "pass", "sft", "export"} & set(self.failed)
        if needed or {"merged", "adapter"} <= set(self.failed):
            return "no"
        return "slow" if self.steps["pass"] == "rows" else "yes"

    @property
    def why(self) -> str:
        """Of a no."""
        steps = ("load", "pass", "sft", "export", "merged", "adapter")
        return next(self.failed[step] for step in steps if step in self.failed)

    def cells(self) -> list[str]:
        def cell(step: str) -> str:
            return self.steps.get(step) or self.failed.get(step, "-")

        verdict = f"no: {self.why}" if self.verdict == "no" else self.verdict
        steps = ("pass", "merged", "adapter", "sft", "export", "gguf")
        return [f"`{self.name}`", verdict, *map(cell, steps)]


def try_row(name: str, folder: Path) -> Row:
    """Every step with a new tiny model in `folder`."""
    import torch  # noqa: PLC0415  the page's checks need none
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    from worker.model import precision_of  # noqa: PLC0415
    from worker.model_files import config_of  # noqa: PLC0415
    from worker.training.packing import way_of  # noqa: PLC0415
    from worker.training.policy import load_policy  # noqa: PLC0415

    row = Row(name)
    base = make_model(name, folder / "base")
    dtype = precision_of(config_of(base))
    if dtype == torch.bfloat16:
        make_model(name, base, dtype=dtype)

    def attempt(step: str, action: Callable[[], str]) -> None:
        try:
            row.steps[step] = action()
        except Exception as error:
            row.failed[step] = _reason(error)

    loaded: list[PeftModel] = []

    def load() -> str:
        loaded.append(load_policy(base, rank=RANK, alpha=16, seed=0, dtype=dtype))
        return "loads"

    attempt("load", load)
    if not loaded:
        return row
    policy = loaded[0]
    names = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    row.layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
    attempt("pass", lambda: str(way_of(policy.get_base_model())))
    attempt("sft", lambda: _fine_tune(policy, base, folder))
    tokenizer = AutoTokenizer.from_pretrained(base)
    # Before vLLM, which decorates some of transformers' classes: they make no model afterwards.
    for step, kind in (("export", "merged"), ("gguf", "gguf-f16")):
        attempt(step, lambda kind=kind: _export(kind, policy, base, folder))
    for way in ("merged", "adapter"):
        attempt(way, lambda way=way: _sync(way, policy, tokenizer, base, dtype))
        gc.collect()
    return row


def _sync(way: Any, policy: Any, tokenizer: Any, base: Path, dtype: Any) -> str:
    from worker.engine.vllm import VllmEngine  # noqa: PLC0415
    from worker.handshake import differing_layers, shake  # noqa: PLC0415

    engine = VllmEngine(
        base, max_length=LENGTH, max_num_seqs=4, lora_rank=RANK, sync=way,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    agreement = shake(engine, policy, tokenizer, LENGTH)
    if not agreement.is_same_model:
        raise FlashError("model_unsupported", f"without an adapter off by {agreement.base:.2g} nats")
    if not agreement.holds:
        layers = differing_layers(engine, policy, tokenizer, LENGTH)
        what = f"off by {agreement.noisy:.2g} nats: {', '.join(layers)}"
        raise FlashError("model_unsupported", what)
    exact = max(agreement.base, agreement.noisy) < 1e-4
    return "=" if exact else f"{agreement.noisy:.2g} nats (bf16)"


def _fine_tune(policy: Any, base: Path, folder: Path) -> str:
    """Three steps, and a second attempt that goes on to five."""
    from worker.training.packing import way_of  # noqa: PLC0415

    way = way_of(policy.get_base_model())
    from flash_mcp.protocol.run_folder import RunFolder  # noqa: PLC0415
    from tests.worker.test_sft import tune  # noqa: PLC0415

    run = RunFolder(folder / "run")
    for steps in (3, 5):
        tune(run, base, folder, steps, way=way, dtype=policy.dtype)
    if run.checkpoints.steps() != [1, 2, 3, 4, 5]:
        raise ValueError(f"checkpoints of {run.checkpoints.steps()}")
    return "ok"


def _export(kind: Any, policy: Any, base: Path, folder: Path) -> str:
    import torch  # noqa: PLC0415

    from flash_mcp.protocol.exports import ExportJob  # noqa: PLC0415
    from worker.adapter import save_adapter  # noqa: PLC0415
    from worker.export import export  # noqa: PLC0415

    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.05)
    adapter = folder / "adapter"
    save_adapter(policy, adapter)
    target = folder / kind
    target.mkdir(exist_ok=True)
    prompts = [[{"role": "user", "content": "What is 3 + 4?"}]]
    job = ExportJob(kind=kind, name="tiny", model=str(base), adapter=adapter, folder=target, prompts=prompts)
    agreement = export(job).agreement
    assert agreement
    if agreement.equal != agreement.tokens:
        raise ValueError(f"{agreement.equal} of {agreement.tokens} tokens equal")
    return "ok"


def _reason(error: Exception) -> str:
    """One line of an error, without paths."""
    text = getattr(error, "what", "") or f"{type(error).__name__}: {error}"
    if "no GGUF is written" in text:
        return "-"
    for said, meaning in ON_A_CPU.items():
        if said in text:
            return meaning
    text = re.sub(r"/[\w./-]+/", "", " ".join(text.split()))
    return text.replace("|", "/")[:140]


# -- the page --------------------------------------------------------------------------------------


def run_row(name: str, scratch: Path) -> Row:
    """`try_row` in a process that has its packages imported."""
    outcome = scratch / f"{name}.json"
    log = scratch / f"{name}.log"
    log.touch()
    environment = {**PROCESS_SETTINGS, **os.environ}
    process = Forked(["-m", "tests.models", name, "--out", str(outcome)], log, environment)
    try:
        code = process.wait(ROW_S)
    except Exception:
        process.kill()
        raise
    if not outcome.is_file():
        return Row(name, failed={"load": f"its process ended with code {code}"})
    return Row(**json.loads(outcome.read_text()))


def table(rows: list[Row]) -> str:
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(row.cells()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def stored_rows() -> dict[str, str]:
    """The verdict of each row of the page."""
    cells = re.findall(r"^\| `(\w+)` \| (\w+)", PAGE.read_text(), re.MULTILINE)
    return dict(cells)


def write_page(rows: list[Row]) -> None:
    """The page with these rows in place of its own of the same names."""
    text = PAGE.read_text()
    for row in rows:
        line = f"| {' | '.join(row.cells())} |"
        pattern = rf"^\| `{row.name}` \|.*$"
        if re.search(pattern, text, re.MULTILINE):
            text = re.sub(pattern, lambda _, line=line: line, text, flags=re.MULTILINE)
        else:
            text = text.replace("<!-- /rows -->", f"{line}\n<!-- /rows -->")
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="rows to run; all without")
    parser.add_argument("--out", type=Path, help="write one row as JSON, and no page")
    arguments = parser.parse_args()
    names = arguments.rows or list(ARCHITECTURES)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.out:
            row = try_row(names[0], Path(folder))
            arguments.out.write_text(json.dumps(asdict(row)))
            sys.stdout.flush()
            os._exit(0)  # engine threads
        rows: list[Row] = []
        for name in names:
            started = time.monotonic()
            row = run_row(name, Path(folder))
            rows.append(row)
            sys.stderr.write(f"{' | '.join(row.cells())} [{time.monotonic() - started:.0f} s]\n")
            write_page([row])


if __name__ == "__main__":
    main()
