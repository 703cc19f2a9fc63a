"""What a step's metrics say of processors and cards."""

import os
import time
from pathlib import Path

import pytest

from worker import process
from worker.process import CARDS


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi whose lines a test writes, and which notes how it is called."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\nexec cat {tmp_path}/lines\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    process.usage()
    return tmp_path / "lines"


def test_the_share_of_the_cards_time_is_the_mean_of_the_samples_of_a_step(smi: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CARDS, "GPU-1,GPU-2")
    for lines in ("40\n60\n", "100\n100\n", "[N/A]\n"):
        smi.write_text(lines)
        process.sample_cards()
    assert process.usage()["system/card_share"] == pytest.approx(0.75)
    assert "--id=GPU-1,GPU-2" in smi.with_name("calls").read_text() and "system/card_share" not in process.usage()


def test_without_a_card_the_process_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    process.usage()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    process.sample_cards()
    measured = process.usage()
    assert 0 < measured["system/processors"] <= 1.5 and 0.001 < measured["system/process_gib"] < 10
    assert "system/card_share" not in measured


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "2000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_wait_shortly_unless_the_user_says_how(given: dict[str, str], spins: str | None, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    process.spin_shortly()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
