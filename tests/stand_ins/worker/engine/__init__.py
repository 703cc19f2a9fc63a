"""`worker.engine`, with a stand-in for `serve`."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[4] / "worker" / "engine"))
