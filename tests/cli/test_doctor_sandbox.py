"""What `doctor` says of the sandbox on machines that offer less than the kernel could."""

import os
import shutil
import subprocess
import sys

import pytest

from flash_mcp.cli import doctor
from tests.places import ROOT
from tests.waiting import WAIT_S

pytestmark = pytest.mark.slow
POWERLESS = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can give powers up")
def test_doctor_says_in_one_line_what_a_container_without_namespaces_leaves_out(flash_home: object) -> None:
    command = [*POWERLESS, sys.executable, "-m", "flash_mcp.cli", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    (line,) = [line for line in done.stdout.splitlines() if "sandbox:" in line]
    assert "no namespaces can be had, as in most containers" in line and "Landlock and seccomp" in line
    assert "process_tree, proc, attributes" in line and "Errno" not in line
    assert "WARNING" in line


def test_doctor_says_why_the_sandbox_fails_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.stderr.write('a warning\\n' * 99); raise OSError('the cause')"
    monkeypatch.setattr(doctor, "WARDEN", (sys.executable, "-c", program))
    level, detail, _ = doctor._sandbox()
    assert (level, detail) == ("problem", "OSError: the cause")
