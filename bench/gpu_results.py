"""The figures of a stage of scripts/gpu-check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODELS = "models"
"""The folder, beside the results, of models that several stages use."""


class Results:
    """The figures of a stage, in a file that is whole after each of them."""

    def __init__(self, out: Path, stage: str) -> None:
        self.out = out
        self._path = out / f"{stage}.json"

    def read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def add(self, **figures: Any) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self.read() | figures, indent=1))
        whole.replace(self._path)
