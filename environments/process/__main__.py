"""Starts environments.process.child in the sandbox.

    python -m environments.process PARENT_PID BOUNDS INTERPRETER

The sandbox (environments.sandbox.warden) is set up before INTERPRETER starts. One with its own
packages runs their code at once (.pth files), and a package's build may have written the
interpreter itself. So the first line on stdout, written before that, says what is protected: no
foreign code can have written it. Every later line is a reply. Where INTERPRETER is this one, the
process goes on with what it has imported, which takes a quarter less."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from dataclasses import replace

from environments.sandbox.kernel import die_with_parent
from environments.sandbox.landlock import without
from environments.sandbox.needs import Bounds
from environments.sandbox.warden import enclose


def main() -> None:
    bounds = Bounds.load(sys.argv[2])
    # Within the sandbox a folder that holds what is hidden cannot be listed.
    bounds = replace(bounds, system=tuple(map(str, without(bounds.system, bounds.hidden))))
    interpreter = sys.argv[3]
    die_with_parent(int(sys.argv[1]), by=signal.SIGTERM)
    sys.stdout.write(json.dumps(enclose(bounds)) + "\n")
    sys.stdout.flush()
    # Move stdin and stdout away, to /dev/null and stderr: no print ends up among the replies
    requests = os.dup(0)
    replies = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    pipes = requests, replies
    arguments = [bounds.dump(), *map(str, pipes)]
    if interpreter == sys.executable:
        # As execv does: a socket of the machine's would lead out of the sandbox.
        lowest = 3
        for pipe in sorted(pipes):
            os.closerange(lowest, pipe)
            lowest = pipe + 1
        os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))
        gc.disable()  # importing leaves no garbage, and looking for some takes a tenth of the time
        from environments.process import child  # noqa: PLC0415  the warden needs none of it

        gc.enable()
        gc.freeze()
        sys.argv = [str(child.__file__), *arguments]
        child.main()
    for pipe in pipes:
        os.set_inheritable(pipe, True)
    os.execv(interpreter, [interpreter, "-P", "-m", "environments.process.child", *arguments])


if __name__ == "__main__":
    main()
