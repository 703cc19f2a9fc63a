"""What Python runs first where PYTHONPATH names this folder. It makes a worker a fork."""

import os
import sys

if "FLASH_FORKS" in os.environ and "worker.main" in sys.orig_argv[1:4] and "--rank" not in sys.orig_argv:
    import forked_start  # noqa: F401  it ends the process
