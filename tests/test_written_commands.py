"""The commands in README and docs are commands of ours, and run where they need no other machine."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from flash_mcp.cli.main import parser_for
from flash_mcp.cli.parsing import check_known
from tests.freeze import command
from tests.places import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
FENCE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("serve", "deploy", "gateway", "train", "evaluate", "tournament", "target add", "target check", "install",
             "certify calculator")  # fmt: skip
"""Commands that go on, need a cluster, or change the configuration of the machine's own agents."""
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and path.stem != "__init__")
WITH_HELP = {"bench", "crash", "demo", "gpu-check", "hubs", "loop", "scale"}
TESTED_ELSEWHERE = {
    "density.py": "tests/test_scripts.py", "function_sizes.py": "tests/test_scripts.py",
    "lint": "tests/test_lint.py", "next_pins.py": "tests/test_next_pins.py",
    "pack_gpu.py": "tests/test_pack_gpu.py",
}  # fmt: skip


def blocks(page: Path, program: str) -> list[list[str]]:
    """The commands of the page's blocks that run the program: its words, without comments."""
    lines = [line for body in FENCE.findall(page.read_text()) for line in body.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if not line.endswith("\\")]
    return [each[1:] for each in words if each and each[0].endswith(program)]


def mentions(program: str) -> list[tuple[str, list[str]]]:
    """(page, words) of the commands within the text of all pages."""
    spans = re.compile(rf"`(?:npx \S+ )?(?:\S*/)?{program}((?: [^`]+)?)`")
    return [(page.name, shlex.split(span)) for page in PAGES for span in spans.findall(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_its_blocks_run(page: Path, tmp_path: Path, flash_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(flash_home))
    monkeypatch.chdir(tmp_path)  # they write files
    Path("environments").symlink_to(ROOT / "environments")
    for words in blocks(page, "flash-mcp"):
        parser = parser_for(words)
        check_known(*parser.parse_known_args(words))
        if not " ".join(words).startswith(ELSEWHERE):
            code, text = command(*words)
            assert code == 0, (words, text)


@pytest.mark.slow
def test_the_commands_within_the_text_exist_with_their_options() -> None:
    named = mentions("flash-mcp")
    assert len(named) > 25
    for page, words in named:
        options = [word for word in words if word.startswith("--")]
        code, text = command(*words[:1], "--help")
        if "ACTION" in text and words[1:]:
            code, text = command(*words[:2], "--help")
        assert code == 0 and [each for each in options if each not in text] == [], (page, words)


def test_scripts_in_the_text_exist_and_know_their_options() -> None:
    for page in PAGES:
        for name, rest in re.findall(r"\bscripts/([\w.-]+)([^`\n]*)", page.read_text()):
            assert name.rstrip(".") in SCRIPTS, (page.name, name)
            script = (ROOT / "scripts" / name.rstrip(".")).read_text()
            module = re.search(r"python\"? -m ([\w.]+) \"\$@\"", script)
            if module and module[1] != "pytest":
                place = ROOT / module[1].replace(".", "/")
                place = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
                script += place.read_text()
            for option in re.findall(r" (--[a-z-]+)", rest.partition("#")[0]):
                assert option in script or option == "--last-failed", (page.name, name, option)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one, with scripts that find everything installed."""
    for path in ROOT.iterdir():
        if path.name != "scripts":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("install", "peers"):
        (tmp_path / "scripts" / name).write_text("#!/bin/sh\n")
    return tmp_path


@pytest.mark.slow
def test_every_script_starts(checkout: Path) -> None:
    for name in WITH_HELP:
        done = subprocess.run(
            [f"scripts/{name}", "--help"], cwd=checkout, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "usage: " in done.stdout, (name, done.stderr)
    shell = {*SCRIPTS} - WITH_HELP - {*TESTED_ELSEWHERE}
    assert shell == {
        "frameworks", "install", "models", "peers", "test", "test-clients", "test-engines",
    }  # fmt: skip
    for name in shell:  # they fetch packages
        subprocess.run(["sh", "-n", ROOT / "scripts" / name], check=True)
    for name, test in TESTED_ELSEWHERE.items():
        assert name.partition(".")[0] in (ROOT / test).read_text()
