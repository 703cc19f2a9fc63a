"""What users see is what tests/golden/ says. A change that is meant is written there by `python -m tests.freeze`."""

import difflib

import pytest

from tests.freeze import GOLDEN, frozen

NAMES = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return frozen(tmp_path_factory.mktemp("frozen"))


@pytest.mark.slow
def test_the_golden_files_are_those_that_are_made(found: dict[str, str]):
    assert sorted(found) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_users_see_has_changed(found: dict[str, str], name: str):
    golden = (GOLDEN / name).read_text(encoding="utf-8")
    lines = difflib.unified_diff(golden.splitlines(), found.get(name, "").splitlines(), f"golden/{name}", "now", n=1)
    changes = "\n".join(lines)
    if changes:
        pytest.fail(f"{name} has changed; if that is meant: python -m tests.freeze\n{changes}", pytrace=False)
