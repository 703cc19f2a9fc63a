"""As python, in a process that the tests fork (tests/forked.py).

    python tests/forked_site/forked_start.py -c CODE

It has this one's standard streams, and both end together. As a module it takes the place of what
this process was to run."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

arguments = sys.argv[1:] if __name__ == "__main__" else sys.orig_argv[1:]
asked = {
    "arguments": [word for word in arguments if word not in ("-P", "-u")],
    "environment": dict(os.environ),
    "folder": str(Path.cwd()),
}
link = socket.socket(socket.AF_UNIX)
deadline = time.monotonic() + 60
while link.connect_ex("\0" + os.environ["FLASH_FORKS"]):
    assert time.monotonic() < deadline, "no server forks"
    time.sleep(0.01)
socket.send_fds(link, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
link.recv(16, socket.MSG_WAITALL)  # its number
signal.signal(signal.SIGTERM, lambda *_: link.sendall(b"T"))
code = int(link.recv(16, socket.MSG_WAITALL) or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
