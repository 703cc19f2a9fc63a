"""vLLM's second model runner, which every card uses, in a process of its own: see tests/second_runner.py."""

import subprocess
import sys

import pytest

from tests.places import TESTS


@pytest.mark.cpu
@pytest.mark.long
def test_the_engine_on_the_runner_of_cards_does_what_it_does_on_a_cpus() -> None:
    file = TESTS / "worker/test_engine.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.second_runner", "-p", "no:cacheprovider"]
    command += [str(file)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    errors = done.stderr.partition("nanobind: ")[0]  # what Triton says at an exit
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + errors[-2000:]
