"""Numbers as people write them."""

from __future__ import annotations

MOST_DIGITS = 9
"""Decimals at which a share that differs from 0 and 1 by rounding errors is written as one."""


def number(value: float | None, digits: int = 3) -> str:
    """Such as 0.00123, 1.23 and 12,346; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def two_digits(value: float) -> str:
    """Without an exponent: 140, 1.4, 0.014."""
    return f"{float(f'{value:.2g}'):g}"


def percent(share: float | None) -> str:
    """A share that is not quite 0 or 1 is not written as one; empty for None."""
    if share is None:
        return ""
    if not (0 < share < 0.01 or 0.99 < share < 1):
        return f"{100 * share:.0f} %"
    digits = 1
    while digits < MOST_DIGITS and float(f"{100 * share:.{digits}f}") in (0, 100):
        digits += 1
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Such as 5 s, 2 min 5 s and 3 h 12 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"
