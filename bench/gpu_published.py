"""What other projects published, beside the figures of scripts/gpu-check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_results import Results

TOKENS = 16384
PRIME: dict[str, tuple[float, float, float]] = {
    "0.6B": (13_340, 0.109, 5.1),
    "4B": (6_230, 0.217, 23.3),
}
"""Of Qwen3 on one H100, LoRA of rank 16, TOKENS recomputed: tokens a second, share of the
989 TFLOP/s of the data sheet, GiB."""
BASE, TRAINED = 0.496, 0.543
"""GSM8K of Qwen2.5-0.5B-Instruct, before and after GRPO by LoRA of rank 32: verl's baselines."""


@dataclass(frozen=True)
class Row:
    """`<figure>_bound` of the same stage is what no program can surpass on this card."""

    stage: str
    figure: str
    label: str
    published: float


ROWS = [
    *(
        Row("peers", f"{size}_{figure}", f"prime-rl, Qwen3-{size}, 16,384 tokens, {label}", value)
        for size, values in PRIME.items()
        for (figure, label), value in zip(
            (("tokens_per_s", "tokens/s"), ("mfu", "MFU"), ("memory_gib", "memory, GiB")),
            values,
            strict=True,
        )
    ),
    Row("gsm8k", "base_success", "verl, GSM8K, Qwen2.5-0.5B-Instruct", BASE),
    Row("gsm8k", "success", "verl, GSM8K, the same by LoRA of rank 32", TRAINED),
]


def table(out: Path) -> list[str]:
    """Lines of Markdown; none if no stage has such a figure."""
    figures = {row.stage: Results(out, row.stage).read() for row in ROWS}
    rows = [row for row in ROWS if row.figure in figures[row.stage]]
    if not rows:
        return []
    gpu = Results(out, "environment").read().get("gpu", "a tiny model on a CPU")
    lines = ["", f"| published | theirs | ours, {gpu} | bound there |", "|---|---|---|---|"]
    for row in rows:
        own = figures[row.stage]
        bound = own.get(f"{row.figure}_bound")
        cells = [row.label, _shown(row.published), _shown(own[row.figure]), _shown(bound)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"
