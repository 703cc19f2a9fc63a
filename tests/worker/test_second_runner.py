"""vLLM's second model runner, which every card uses, in a process of its own: see tests/second_runner.py."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.attempts import Attempt, make_run, messages_of
from tests.model_rows import make_model
from tests.places import ROOT, TESTS


@pytest.mark.cpu
@pytest.mark.long
@pytest.mark.parametrize("name", ["engine", "routing"])
def test_the_engine_on_the_runner_of_cards_does_what_it_does_on_a_cpus(name: str) -> None:
    file = TESTS / f"worker/test_{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.second_runner", "-p", "no:cacheprovider"]
    command += [str(file)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    errors = done.stderr.partition("nanobind: ")[0]  # what Triton says at an exit
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + errors[-2000:]


ON_SECOND_RUNNER = """
from worker import main
main.prepare_process()
import tests.second_runner
main.main()
"""


class OnSecondRunner(Attempt):
    program = ON_SECOND_RUNNER


@pytest.mark.cpu
@pytest.mark.long
def test_a_killed_run_of_a_mixture_goes_on_repeating_the_engines_experts(tmp_path: Path) -> None:
    """They are in no file: what was not trained is sampled again."""
    model = make_model("qwen3_moe", tmp_path / "base", dtype=torch.bfloat16)
    run = make_run(tmp_path / "run", model, steps=3, batch_size=1, max_tokens=12)
    with OnSecondRunner(run, fresh=True, PYTHONPATH=str(ROOT)) as first:
        first.wait_until(lambda: 1 in run.checkpoints.steps())
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    result = OnSecondRunner(run, 2, fresh=True, PYTHONPATH=str(ROOT)).ended()
    assert result and result["state"] == "succeeded", result
    routing = messages_of(run, "routing")
    assert len(routing) == 2 and all("training repeats" in message for message in routing)
    written = [(run.metrics(step) or {})["metrics"] for step in (1, 2, 3)]
    differ = [metrics.get("sampling_logp_difference/mean") for metrics in written if metrics["grad_norm"]]
    assert differ and max(differ) < 0.02
