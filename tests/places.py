"""Where things lie in the repository."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CALCULATOR = ROOT / "environments" / "examples" / "calculator"
TOOL_CALCULATOR = ROOT / "environments" / "examples" / "tool_calculator"
AGENT_CALCULATOR = ROOT / "environments" / "examples" / "agent_calculator" / "agent.py"
TERMINAL = ROOT / "environments" / "examples" / "terminal"
AGENT_VOWELS = TESTS / "fixture_environments" / "agent_vowels"
VOWELS = TESTS / "fixture_environments" / "vowels"
NO_TORCH = TESTS / "no_torch"  # modules named torch and vllm that refuse to be imported
WHEELS = Path(sys.prefix, "wheels")
"""What environments' interpreters are made of, where scripts/test has fetched it: see packages.txt."""
