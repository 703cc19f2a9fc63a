"""`worker` without torch and vLLM, for a PYTHONPATH before the real one: `train` and `engine.serve` stand
in for its own."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[3] / "worker"))
