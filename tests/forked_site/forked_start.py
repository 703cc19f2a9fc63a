"""A worker that goes on in a process that the tests fork (tests/forked.py). This process and
that one end together.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

arguments = [word for word in sys.orig_argv[1:] if word != "-P"]
log = str(Path("/proc/self/fd/1").readlink())
asked = {"arguments": arguments, "log": log, "environment": dict(os.environ), "folder": str(Path.cwd())}
link = socket.socket(socket.AF_UNIX)
link.connect("\0" + os.environ["FLASH_FORKS"])
link.sendall(json.dumps(asked).encode() + b"\n")
link.recv(16, socket.MSG_WAITALL)  # its number
signal.signal(signal.SIGTERM, lambda *_: link.sendall(b"T"))
code = int(link.recv(16, socket.MSG_WAITALL) or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
