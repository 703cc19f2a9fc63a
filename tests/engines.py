"""Which tests may start an engine of clusters."""

import os

import pytest

VARIABLE = "FLASH_ENGINES"


def need(missing: str) -> None:
    """Skip the test if the engine is `missing`, for this reason, and outside of
    scripts/test-engines: what scripts/test runs is the same on every machine."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"scripts/test-engines runs it, with {VARIABLE}=1")
    if missing:
        pytest.skip(missing)
