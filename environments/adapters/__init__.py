"""Adapters for environments that were written for other contracts.

freesolo runs folders for that SDK unchanged. reasoning_gym has datasets by name. gym wraps objects
with reset and step. Each imports its package on use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be called with the keyword `name`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or name in parameters
