"""Statistics of evaluations: intervals, pass@k, and whether two sets of tasks differ. Pure functions of numbers."""

from __future__ import annotations

import math


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """The chance that one of k attempts succeeds: 1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021).

    ValueError unless 1 <= k <= attempts.
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} cannot be told from {attempts} attempts")
    return 1.0 - math.comb(attempts - correct, k) / math.comb(attempts, k)
