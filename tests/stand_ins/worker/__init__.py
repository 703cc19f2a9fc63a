"""`worker` without torch and vLLM, for a PYTHONPATH before the real one: `run` and `serving` stand in for its own."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[3] / "worker"))
