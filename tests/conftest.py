from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from flash_mcp.protocol.paths import models_dir

WHEELS = Path(sys.prefix, "wheels")
"""What environments' interpreters are made of, where scripts/test has fetched it: see
tests/packages.txt.
"""
SHARED_MODELS = (
    models_dir()
)  # read before any test has a home of its own: real models are fetched once

settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")

# A shell's background jobs ignore it, and so would the commands that tests end with Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def flash_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, named by FLASH_HOME for it and for the processes that it
    starts.
    """
    folder = tmp_path / "flash-home"
    monkeypatch.setenv("FLASH_HOME", str(folder))
    monkeypatch.setenv("FLASH_MODELS", str(SHARED_MODELS))
    if WHEELS.is_dir():
        monkeypatch.setenv("UV_FIND_LINKS", str(WHEELS))
        monkeypatch.setenv("UV_OFFLINE", "1")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real 2-layer model; see tests/tiny.py."""
    from tests.tiny import make_tiny_model  # noqa: PLC0415  seconds of imports that most tests do not need

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter of `tiny_model`."""
    from tests.tiny import make_tiny_adapter  # noqa: PLC0415

    return make_tiny_adapter(tmp_path_factory.mktemp("tiny-adapter"), tiny_model)


@pytest.fixture(scope="session")
def fp32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from tests.tiny import make_tiny_model  # noqa: PLC0415

    folder = make_tiny_model(tmp_path_factory.mktemp("fp32"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    return folder
