"""scripts/pack_gpu.py: what a GPU host without network gets. The registry alone is a stand-in."""

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from scripts import pack_gpu

from tests.places import ROOT, WHEELS


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints-gpu.txt").read_text().splitlines()
    return {line.partition("==")[0]: line for line in lines if "==" in line}


def test_what_the_host_has_is_left_out_and_the_rest_has_the_pinned_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout="\n".join(pins().values()))
    monkeypatch.setattr(pack_gpu.subprocess, "run", lambda *_, **__: done)
    chosen = pack_gpu.requirements()
    names = [line.partition("==")[0] for line in chosen]
    assert len(names) == len(set(names)) and {"vllm", "trl", "peft", "mcp", "pytest"} <= set(names)
    assert not {"torch", "triton", "numba", "transformers"} & set(names)
    assert not any(name.startswith("nvidia-") for name in names) and "xgrammar==0.2.3" in chosen
    assert pins()["vllm"] in chosen


@pytest.mark.slow
def test_the_parts_make_the_packages_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", WHEELS.as_uri())  # pip splits it at spaces
    site = tmp_path / "site"
    wheel = next(WHEELS.glob("anyio-*-py3-none-any.whl"))
    pack_gpu.install([f"anyio=={wheel.name.split('-')[1]}"], site)
    for name in ("tests/a.py", "vllm/_moe_C.so", "vllm/_C.so", "bin/tool"):
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(5000))
    pack_gpu.trim(site)
    peers = tmp_path / "given"
    peers.mkdir()
    (peers / "train.jsonl").write_text("{}")
    manifest = pack_gpu.pack({"site": site, "peers": peers}, tmp_path, 16 << 10)

    *lines, whole = [line.split() for line in manifest.splitlines()]
    assert manifest == (tmp_path / "MANIFEST").read_text() and len(lines) > 2
    data = b""
    for name, size, digest in lines:
        part = (tmp_path / name).read_bytes()
        assert (str(len(part)), hashlib.sha256(part).hexdigest()) == (size, digest)
        data += part
    assert whole == ["site.tar.xz", hashlib.sha256(data).hexdigest()]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = set(tar.getnames())
    assert {"site/anyio/__init__.py", "site/vllm/_C.so", "peers/train.jsonl"} <= names
    assert not {"site/tests", "site/vllm/_moe_C.so", "site/bin"} & names
