"""Stands for the worker, without its packages: it writes what its attempt has to FOLDER/facts.json.

python -P tests/warm_program.py worker.warm python -P tests/warm_program.py worker.main FOLDER [EXIT_CODE]"""

import json
import os
import signal
import sys
from pathlib import Path

import worker.warm
from worker.process import prepare_process

LINES = ("SigBlk", "SigIgn", "SigCgt", "Cap", "Seccomp", "NoNewPrivs", "Groups", "Uid", "Umask", "Cpus_allowed_list")


def report() -> int:
    prepare_process()
    folder = Path(sys.argv[sys.argv.index("worker.main") + 1])
    own = Path("/proc/self")
    status = [line for line in (own / "status").read_text().splitlines() if line.startswith(LINES)]
    facts = {
        "environ": dict(os.environ), "arguments": [sys.orig_argv, sys.argv[-2:]], "folder": str(Path.cwd()),
        "leads": [os.getpid() == os.getpgrp(), os.getpid() == os.getsid(0)], "limits": (own / "limits").read_text(),
        "group": (own / "cgroup").read_text(),
        "nice": [os.nice(0), os.sched_getscheduler(0), (own / "oom_score_adj").read_text()], "status": status,
        "files": {path.name: str(path.readlink()) for path in (own / "fd").iterdir() if path.is_symlink()},
        "path": sys.path, "first_environ": (own / "environ").read_text(), "pid": os.getpid(),
        "module": sys.modules["__main__"].__doc__,
    }  # fmt: skip
    sys.stdout.write("it reports\n")
    sys.stdout.flush()
    (folder / "facts.part").write_text(json.dumps(facts))
    (folder / "facts.part").rename(folder / "facts.json")
    if len(sys.argv) > sys.argv.index("worker.main") + 2:
        return int(sys.argv[-1])
    signal.pause()
    return 0


worker.warm.MODULES = ()
worker.warm.attempt.main = report
sys.exit(worker.warm.main() if sys.argv[1] == "worker.warm" else report())
