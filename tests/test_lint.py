import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_style_imports_and_sizes_are_clean() -> None:
    """Types take a minute: .ci/run has scripts/lint check them before it runs any test."""
    done = subprocess.run(
        ["scripts/lint", "--style"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
