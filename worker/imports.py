"""Imports of large packages."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Generator[None]:
    """Import large packages within it: torch, vLLM and their like take a third less CPU time.

    They make a million objects that all stay. The garbage collector would look at them again and
    again while they are imported, and for as long as the process lives."""
    # transformers and TRL ask for it when they are imported, and it reads the files of every
    # installed package.
    mapping = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = functools.cache(mapping)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        importlib.metadata.packages_distributions = mapping
