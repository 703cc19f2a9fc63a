"""Combinations of parameters."""

from collections.abc import Sequence
from typing import Any

import pytest


def thinned(first: Sequence[str], second: Sequence[str]) -> list[Any]:
    """All pairs, of which only some are not long: each value is in one of those at least."""
    size = min(len(first), len(second))
    return [
        pytest.param(one, other, id=f"{one}-{other}", marks=() if row % size == column % size else pytest.mark.long)
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
