import subprocess
import sys

import psutil

from tests.waiting import WAIT_S, wait_for

STARTER = """
import os, subprocess, sys, threading
from flash_mcp.supervisor.process import PYTHON

def start():
    command = [*PYTHON, "flash_mcp.supervisor.tied", str(os.getpid()), "sleep", "1000"]
    print(subprocess.Popen(command).pid, flush=True)
    threading.Event().wait()

threading.Thread(target=start).start()
"""


def test_a_program_ends_with_the_process_whose_thread_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        program = psutil.Process(int(starter.stdout.readline()))
        wait_for(lambda: program.cmdline() == ["sleep", "1000"])
        starter.kill()
        program.wait(WAIT_S)
