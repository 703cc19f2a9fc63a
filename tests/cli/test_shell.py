"""What the terminal prints of `next` does what the call does."""

import json
import re
import shlex
import subprocess

import pytest

from flash_mcp.cli.main import main, parser_for
from flash_mcp.cli.shell import in_shell
from flash_mcp.cli.tool_commands import _given
from flash_mcp.tools.registry import TOOLS
from tests.calls import named_calls
from tests.test_golden import GOLDEN

COMMAND = re.compile(r"flash-mcp .*")


def said() -> list[str]:
    """Every `next` and every fix of the frozen results that names a call."""
    texts: set[str] = set()
    for path in (GOLDEN / "results").glob("*.json"):
        body = path.read_text()
        texts |= {json.loads(f'"{found}"') for found in re.findall(r'"next": "(.*)"', body)}
        texts |= {json.loads(f'"{found}"') for found in re.findall(r'Fix: ([^"\\]*)', body)}
    return sorted(text for text in texts if named(text))


def named(text: str) -> list[tuple[str, dict[str, object]]]:
    """The calls without placeholders."""
    try:
        return named_calls(text)
    except (KeyError, ValueError):
        return []


@pytest.mark.parametrize("text", said())
def test_every_call_of_a_result_becomes_a_command_that_gives_the_same_arguments(text: str):
    for tool, arguments in named(text):
        if ... in arguments.values():
            continue
        call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        words = shlex.split(in_shell(f"{tool}({call})").strip("`"))
        assert words[0] == "flash-mcp"
        parsed = parser_for(words[1:]).parse_args(words[1:])
        assert _given(TOOLS[tool], parsed) == arguments
    assert not any(f"{tool}(" in in_shell(text) for tool in TOOLS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("status(run_id='run-1') reports one", "`flash-mcp status run-1` reports one"),
        (
            "train(environment='a b', validate_only=true, eval_after=false)",
            "`flash-mcp train --environment 'a b' --validate-only --no-eval-after`",
        ),
        ("env_push(name=..., folder='/x (1)')", "`flash-mcp env-push '/x (1)' --name NAME`"),
        ("then compare(base=its run_id, other='run-2')", "then `flash-mcp compare ITS_RUN_ID run-2`"),
        ("chat(message='@home')", "`flash-mcp chat @@home`"),
        ("env_test(environment_args={'a': [1]})", "`flash-mcp env-test --environment-args '{\"a\": [1]}'`"),
        ("status says; train (or not)", "status says; train (or not)"),
        ("status(unclosed", "status(unclosed"),
    ],
)
def test_calls_are_written_as_commands(text: str, wanted: str):
    assert in_shell(text) == wanted


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["compl"], "completion"),
        (["evaluate", "--spl"], "--split"),
        (["evaluate", "--split", ""], "eval train"),
        (["token", ""], "create list revoke"),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    typed: list[str], offered: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["completion", "bash"]) == 0
    words = " ".join(map(shlex.quote, ["flash-mcp", *typed]))
    script = f"""{capsys.readouterr().out}
COMP_WORDS=({words}); COMP_CWORD={len(typed)}
$(complete -p flash-mcp | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered
