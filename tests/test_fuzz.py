from pathlib import Path

import pytest

from flash_mcp.tools.registry import TOOLS
from tests.fuzz import fuzz


@pytest.mark.slow  # a call may export a checkpoint, for which the worker loads torch
@pytest.mark.long
def test_three_thousand_calls_do_too(tmp_path: Path):
    assert fuzz(3000, tmp_path).total() >= 3000


@pytest.mark.slow
def test_whatever_the_arguments_are_the_answer_is_a_result_or_a_coded_error(tmp_path: Path):
    outcomes = fuzz(300, tmp_path, seed=0)
    assert outcomes.total() >= 300 and {name for name, _ in outcomes} == set(TOOLS)
    assert {"ok", "invalid_argument", "unknown_argument", "unknown_run"} <= {outcome for _, outcome in outcomes}
