"""Runs a program that ends with the process that starts it, also where that has other threads.

python -m flash_mcp.supervisor.tied PARENT_PID PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import os
import signal
import sys

from environments.sandbox.kernel import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), by=signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
