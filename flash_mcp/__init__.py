"""flash-mcp: tools with which a coding agent trains language models on its user's own hardware."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# `mcp dev flash_mcp/server.py` puts this folder itself on the path, where our queue.py and environments.py would hide
# the modules of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != Path(__file__).absolute().parent]
