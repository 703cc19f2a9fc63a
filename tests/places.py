"""Where things lie in the repository."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CALCULATOR = ROOT / "environments" / "examples" / "calculator"
VOWELS = TESTS / "fixture_environments" / "vowels"
