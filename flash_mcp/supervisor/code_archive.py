"""This very version of flash-mcp as a wheel, for nodes that do not have it (setup = "uv")."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path

from flash_mcp import __version__
from flash_mcp.protocol.paths import write_private

ROOT = Path(__file__).parents[2]
PACKAGES = ("environments", "flash_mcp", "worker")
PINS = ("constraints-cpu.txt", "constraints-gpu.txt")
"""Of a checkout; an installed package has none, and uv takes the newest versions that fit."""
OVERRIDES = "".join(
    f"{name}; sys_platform == 'never'\n" for name in ("torchaudio", "torchcodec", "torchvision")
)
"""As [tool.uv] in pyproject.toml."""
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""So that the same files are the same bytes."""
TAG = "Wheel-Version: 1.0\nGenerator: flash-mcp\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def code_folder(base: Path) -> Path:
    """The folder in FLASH_HOME with the wheel and its pins, as they are now."""
    folder = base / "code" / __version__
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"flash_mcp-{__version__}-py3-none-any.whl": _wheel()}
    files["overrides.txt"] = OVERRIDES.encode()
    for name in PINS:
        if (ROOT / name).is_file():
            files[name] = (ROOT / name).read_bytes()
    for name, body in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != body:
            write_private(path, body, folder.parent)
    return folder


def _wheel() -> bytes:
    files: dict[str, bytes] = {}
    for path in sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    info = f"flash_mcp-{__version__}.dist-info"
    installed = metadata.distribution("flash-mcp")
    files[f"{info}/WHEEL"] = TAG.encode()
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (installed.read_text(name) or "").encode()
    record = f"{info}/RECORD"
    lines = [_record_of(name, body) for name, body in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    created = io.BytesIO()
    with zipfile.ZipFile(created, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name, LONG_AGO), body, zipfile.ZIP_DEFLATED)
    return created.getvalue()


def _record_of(name: str, body: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(body)}\n"
