#!/usr/bin/env python3
"""Pack vLLM and the other packages of a worker for a GPU host that reaches no registry.

    scripts/pack_gpu.py --out FOLDER [--part-mib 56] [--peers FOLDER]
        here, where pip works: writes FOLDER/part-00, part-01, ... and FOLDER/MANIFEST
    mkdir -p ~/parts; cp FOLDER/part-00 ~/parts/
        for each part, sent to the host one at a time
    cat ~/parts/part-* | tar xJ -C ~; export PYTHONPATH=~/site
        on the host; then `python -m bench.gpu` there

The archive holds one folder, site/, for CPython 3.12 on x86-64 Linux. torch, transformers, triton,
numba and the CUDA libraries are the host's own. Models are made there, of random weights, but for
that of the stage `gsm8k`: the folder of --peers holds model/ (Qwen2.5-0.5B-Instruct) and GSM8K's
train.jsonl and test.jsonl (github.com/openai/grade-school-math), and comes out as ~/peers."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
HOST = {
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "hf-xet",
    "numpy", "numba", "llvmlite", "setuptools", "pip", "sympy", "mpmath", "networkx", "jinja2",
    "markupsafe", "pillow",
}  # fmt: skip
"""Packages that a host with PyTorch has."""
UNUSED = (
    "nvidia-", "cuda-", "nccl", "uv", "tilelang", "z3-solver", "quack-kernels", "humming-kernels",
    "tokenspeed", "instanttensor", "fastsafetensors", "pynvvideocodec", "torch-c-dlpack-ext",
    "flashinfer", "ml-dtypes", "matplotlib", "fonttools", "kiwisolver", "contourpy",
)  # fmt: skip
"""Beginnings of names: libraries that come with PyTorch, kernels of models and features that no
check uses, and plots."""
TESTS = {"pytest", "pytest-timeout", "hypothesis", "iniconfig", "pluggy", "sortedcontainers"}
"""What tests/gpu needs, and the checks that run tests."""
PINNED = {"xgrammar": "0.2.3"}
"""Later ones break with the tvm-ffi of a host with PyTorch 2.11."""
WASTE = (
    "**/tests", "**/__pycache__", "**/*.a", "bin", "mistral_common/data", "pycountry/locales",
    "vllm/vllm-rs", "vllm/_rust_tool_parser*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/_moe_C*", "vllm/_flashmla*", "vllm/_flashkda*",
    "vllm/_qutlass*", "vllm/_deepselect*", "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
)  # fmt: skip
"""What dense models on Hopper do not run: flash attention 2, experts, the server in Rust."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part-mib", type=int, default=56)
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    site = args.out / "site"
    shutil.rmtree(site, ignore_errors=True)
    install(requirements(), site)
    trim(site)
    folders = {"site": site} | ({"peers": args.peers} if args.peers else {})
    sys.stdout.write(pack(folders, args.out, args.part_mib << 20))
    shutil.rmtree(site)


def requirements() -> list[str]:
    """The pinned packages of the extra gpu that the host lacks."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "gpu", "--quiet",
        "--no-header", "--no-annotate", "--python-version", PYTHON,
        "--python-platform", "x86_64-manylinux_2_39", "-c", "constraints-gpu.txt",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    pins = (ROOT / "constraints-gpu.txt").read_text().splitlines()
    chosen = [line for line in pins if line.partition("==")[0] in TESTS]
    for line in done.stdout.splitlines():
        name = line.partition("==")[0]
        if name in HOST | TESTS or name.startswith(UNUSED):
            continue
        chosen.append(f"{name}=={PINNED[name]}" if name in PINNED else line)
    return chosen


def install(chosen: list[str], site: Path) -> None:
    platforms = [flag for minor in GLIBC for flag in ("--platform", f"manylinux_2_{minor}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, *platforms,
        "--target", str(site), *chosen,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def trim(site: Path) -> None:
    """Remove WASTE."""
    for pattern in WASTE:
        for path in list(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def pack(folders: dict[str, Path], out: Path, size: int) -> str:
    """Write the parts and the manifest, each with its checksum; the manifest's text."""
    archive = out / "site.tar.xz"
    with tarfile.open(archive, "w:xz", preset=3) as tar:
        for name, folder in folders.items():
            tar.add(folder, arcname=name)
    digest = hashlib.sha256()
    lines: list[str] = []
    with archive.open("rb") as stream:
        while chunk := stream.read(size):
            part = out / f"part-{len(lines):02d}"
            part.write_bytes(chunk)
            digest.update(chunk)
            lines.append(f"{part.name} {len(chunk)} {hashlib.sha256(chunk).hexdigest()}")
    archive.unlink()
    text = "\n".join([*lines, f"site.tar.xz {digest.hexdigest()}"]) + "\n"
    (out / "MANIFEST").write_text(text)
    return text


if __name__ == "__main__":
    main()
