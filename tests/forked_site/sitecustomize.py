"""What Python runs first where PYTHONPATH names this folder. It makes a fork of a process that runs
one of our programs, unless the process is confined in another way than the server that forks."""

import os
import sys

TESTS = __file__.rpartition("/forked_site/")[0]
SMALL = ("-m flash_mcp.cli", "-m flash_mcp.supervisor.process")

words = [word for word in sys.orig_argv[1:] if word not in ("-P", "-u")] or [""]
program = " ".join(words[:2])
packages = None
if program == "-m worker.warm" and "FLASH_FORKS" in os.environ:
    os._exit(0)  # forks have their packages
if program == "-m worker.main" and "--rank" not in words:
    packages = "workers"
elif program in SMALL or (words[0].startswith(TESTS) and words[0].endswith("_worker.py")):
    packages = "small"
if packages and "FLASH_FORKS" in os.environ:
    from forked_start import become_fork, confinement

    if confinement() == os.environ["FLASH_FORKS"].split()[1]:
        become_fork(packages, words)
