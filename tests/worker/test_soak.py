"""A long run holds no more at its end than after its first steps. FLASH_SLOW=1 makes it 200 steps instead of 25.

That no request stays behind in the engine needs no counter here: every step's weight sync refuses to begin while the
engine holds one (worker.engine.vllm.VllmEngine.load_policy)."""

import os
from pathlib import Path
from statistics import median

import pytest

from tests.attempts import Attempt, make_run
from tests.watch import slope, watch

STEPS = 200 if os.environ.get("FLASH_SLOW") else 25
MIB_A_STEP = 1.0

RETURNED = {
    "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}  # fmt: skip
"""What is freed goes back to the system at once, and oneDNN keeps kernels for few lengths only.

Otherwise resident memory grows for dozens of steps as new lengths come, and nothing leaks."""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_long_run_grows_neither_in_memory_nor_in_threads_nor_in_files(tiny_model: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_model, steps=STEPS, save_every=10, max_tokens=64, learning_rate=1e-6)
    with Attempt(run, fresh=True, **RETURNED) as attempt:
        held, _ = watch(run, attempt, timeout_s=3500)
        assert attempt.wait() == 0, attempt.log_path.read_text()
    result = run.result()
    assert result and result["state"] == "succeeded" and result["step"] == STEPS
    half = held[len(held) // 2 :]
    assert len(half) > STEPS // 4
    assert slope(half) < MIB_A_STEP, [round(h.rss_mib) for h in held]
    early, late = held[len(held) // 4 : len(held) // 2], held[-len(held) // 4 :]
    for name in ("threads", "files", "children"):
        before, after = ([getattr(h, name) for h in part] for part in (early, late))
        # A file that is just being written is no leak.
        assert median(after) <= max(before), (name, before, after)
