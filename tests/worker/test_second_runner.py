"""vLLM's second model runner, which every card uses, in a process of its own: see tests/second_runner.py."""

import subprocess
import sys

import pytest

from tests.places import TESTS


@pytest.mark.cpu
@pytest.mark.slow
def test_answers_under_a_schema_are_trained_on_the_runner_of_cards_too() -> None:
    file = TESTS / "worker/test_engine.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.second_runner", "-p", "no:cacheprovider"]
    command += [str(file), "-k", "trainers and asynchronous and True"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-6000:]
