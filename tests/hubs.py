"""Plays the environments of packages that other people wrote, and prints what ran.

Each package is installed as users do it, in an interpreter of its own (wheels only, but for those packages of
reasoning-gym that have none). Each of its environments is loaded in the sandbox, and eight episodes with fixed answers
are played one by one and then at once: on four tasks, each task twice. Equal means that every episode had the same
messages and the same score both times, and that the two episodes of a task went alike.

    scripts/hubs                      all packages, some 20 minutes on two cores
    scripts/hubs --only openenv       one of them
    scripts/hubs --json FILE          also what happened to each environment
    scripts/hubs --write              puts the rows into docs/environments.md
    scripts/hubs --learn              evaluates and trains in some of them (tests/hub_runs.py)
    scripts/hubs --check              says of a sample: loads, passes env_test, trains (tests/hub_checks.py)
    scripts/hubs --certify            certifies that sample without a model (docs/certificates.md)"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from environments.faults import EnvironmentFault
from environments.process import requirements
from environments.process.host import EnvironmentHost, Score
from environments.settings import FILE as SETTINGS_FILE
from flash_mcp.state import references
from tests import docs
from tests.places import ROOT

FOLDERS = Path(__file__).with_name("hub_environments")
DOCUMENT = ROOT / "docs" / "environments.md"
HOME = ROOT / ".venv" / "hubs"  # keeps what was installed for the next time
SETTINGS = """
[environments]
network = ["*"]
build_from_source = ["cellpylib", "pycosat", "zss"]
interpreters_gib = 40
"""
EXAMPLE = "the example of TRAINING.md"
AT_ONCE = 2  # environments that are tried at the same time
EPISODES = 8
TURNS = 6
CALL_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 120.0
ANSWERS = {
    "the package's own template": ("4", "8"),
    "Blackjack": ("[hit]", "[stand]", "[hit]", "[hit]", "[stand]", "[stand]"),
    "2048": ("[up]", "[left]", "[down]", "[right]"),
    "game:Game2048": (r"\boxed{up}", r"\boxed{left}", r"\boxed{down}", r"\boxed{right}"),
    "Minesweeper": ("[3 2]", "[0 7]", "[7 0]", "[5 5]"),
    "game:Minesweeper": (r"\boxed{reveal 1 2}", r"\boxed{flag 0 0}", r"\boxed{reveal 3 4}"),
    "GuessTheNumber": ("[7]", "[12]", "[3]", "[18]"),
    "game:": (r"\boxed{5}", r"\boxed{1 2}", r"\boxed{crane}", r"\boxed{up}", "nothing"),
    "reasoning-gym:": ("<answer>7</answer>",),
    "openenv echo": ("hello", "good bye"),
    "": ("[1]", "[up]", "[2 1]", "[crane]", "$1/2$", "nothing"),
}
"""What is answered, by the beginning of the environment's name: the longest that fits."""
REASONS = {
    "needs more players": r"players",
    "needs a download": r"No module named 'datasets'|huggingface|Connection|resolve host|offline|NLTK|nltk\.download"
    r"|environment_network|Max retries|getaddrinfo|name resolution|files? .*not found",
    "a package is missing": r"No module named|need to install|pip install",
    "not valid on this Python": r"SyntaxError",
    "needs docker": r"sandbox of Inspect|needs a container",
    "takes too long": r"took longer than",
    "needs an API key": r"API key",
    "gives a reward that is no number": r"which is no number",
    "lacks a file of its own": r"FileNotFoundError",
}


@dataclass
class Tried:
    """What happened to one environment."""

    name: str
    refused: str = ""  # the error that an agent reads, if it did not run
    unequal: str = ""  # the first episode that went differently
    turns: int = 0  # of all episodes
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        for reason, pattern in REASONS.items():
            if re.search(pattern, self.refused, re.IGNORECASE):
                return reason
        return "other errors"


@dataclass
class Hub:
    """One package. `name` is that of its folder in tests/hub_environments, but for reasoning-gym. Without `names`
    its environment lists them."""

    name: str
    package: str
    names: list[str] = field(default_factory=list)
    version: str = ""
    tried: list[Tried] = field(default_factory=list)

    def folder(self, environment: str, scratch: Path) -> Path:
        """The environment's folder; those of reasoning-gym are written as the product does it."""
        files = references.files_of(environment)
        if environment == EXAMPLE:
            source = docs.wrapped()[self.package].encode()
            required = (FOLDERS / self.name / requirements.FILE).read_bytes()
            files = {"environment.py": source, requirements.FILE: required}
        if files is None:
            return FOLDERS / self.name
        target = scratch / environment
        for path, content in files.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
        return target


def hubs() -> list[Hub]:
    return [
        Hub("reasoning-gym", "reasoning-gym", [f"reasoning-gym:{d}" for d in references.DATASETS]),
        Hub("gem", "gem-llm"), Hub("gem", "gem-llm", [EXAMPLE]), Hub("textarena", "textarena"),
        Hub("openenv", "openenv"), Hub("verifiers", "verifiers"), Hub("inspect", "inspect-evals"),
        Hub("freesolo_single", "freesolo", ["single turn"]), Hub("freesolo_multi", "freesolo", ["several turns"]),
        Hub("math_verify", "math-verify", ["math-verify"]),
    ]  # fmt: skip


def is_installed(folder: Path) -> bool:
    """Whether this command has installed what the folder requires."""
    digest = requirements._digest(requirements.of_folder(folder))
    return (HOME / "interpreters" / digest / "ready").is_file()


@dataclass(frozen=True)
class Episode:
    """All that an environment said."""

    said: list[list[dict[str, object]]]
    score: Score


async def play(host: EnvironmentHost, task: int, answers: tuple[str, ...]) -> Episode:
    opening = await host.open("train", task)
    said = [opening.messages]
    for turn in range(min(TURNS, opening.max_turns)):
        step = await host.step(opening.episode, answers[turn % len(answers)])
        said.append(step.messages)
        if step.done:
            break
    return Episode(said, await host.score(opening.episode))


async def try_one(hub: Hub, name: str, scratch: Path) -> Tried:
    started = time.monotonic()
    tried = Tried(name)
    try:
        async with _host(hub, name, scratch) as host:
            await _compare(host, tried)
    except EnvironmentFault as fault:
        tried.refused = f"[{fault.code}] {fault.what}\n{fault.traceback[-1500:]}".strip()
    tried.seconds = round(time.monotonic() - started, 1)
    outcome = tried.refused.partition("\n")[0] or tried.unequal or "equal"
    sys.stderr.write(f"{hub.package} {name}: {outcome[:150]} ({tried.seconds} s)\n")
    return tried


def _host(hub: Hub, name: str, scratch: Path) -> _Hosted:
    is_by_name = not hub.names
    return _Hosted(hub.folder(name, scratch), {"name": name} if is_by_name else {})


class _Hosted:
    """An EnvironmentHost with this command's limits."""

    def __init__(self, folder: Path, args: dict[str, str]) -> None:
        self._start = EnvironmentHost.start(
            folder, known_as=folder.name, args=args, timeout_s=CALL_TIMEOUT_S, start_timeout_s=LOAD_TIMEOUT_S
        )

    async def __aenter__(self) -> EnvironmentHost:
        self._host = await self._start
        return self._host

    async def __aexit__(self, *_: object) -> None:
        await self._host.stop()


async def _compare(host: EnvironmentHost, tried: Tried) -> None:
    """Play the episodes one by one and at once."""
    answers = ANSWERS[max(filter(tried.name.startswith, ANSWERS), key=len)]
    tasks = [index // 2 % host.splits["train"] for index in range(EPISODES)]
    alone = [await play(host, task, answers) for task in tasks]
    together = await asyncio.gather(*(play(host, task, answers) for task in tasks))
    tried.turns = sum(len(episode.said) - 1 for episode in alone)
    for index, episode in enumerate(alone):
        if episode != together[index]:
            tried.unequal = f"episode {index}: {episode}\nat once: {together[index]}"[:3000]
            return
        if episode != alone[index - index % 2]:
            tried.unequal = f"episode {index} is not like the other one of its task"
            return


async def try_hub(hub: Hub, scratch: Path) -> None:
    folder = hub.folder(hub.names[0] if hub.names else "", scratch)
    versions = ((await requirements.interpreter(folder)).parents[2] / "ready").read_text()
    found = re.search(rf"(?im)^{re.escape(hub.package)}==(\S+)", versions)
    hub.version = found[1] if found else "?"
    names = hub.names or await _names(folder)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> Tried:
        async with places:
            return await try_one(hub, name, scratch)

    hub.tried = await asyncio.gather(*map(one, names))


async def _names(folder: Path) -> list[str]:
    async with _Hosted(folder, {}) as host:
        return [task_id for task_id, _ in await host.tasks("train")]


def table(found: list[Hub]) -> str:
    rows = []
    for hub in found:
        ran = [tried for tried in hub.tried if not tried.refused]
        counts = Counter(tried.reason for tried in hub.tried if tried.refused)
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        equal = f"{sum(not tried.unequal for tried in ran)} of {len(ran)}"
        rows.append((hub.package, hub.version, len(hub.tried), len(ran), reasons or "-", equal))
    head = ("package", "version", "tried", "run", "not run, and why", "equal at once and one by one")
    return docs.table(head, rows)


def joined(found: list[Hub]) -> list[Hub]:
    """One Hub for each row."""
    rows: dict[str, Hub] = {}
    for hub in found:
        new = Hub(hub.name, hub.package, [], hub.version)
        rows.setdefault(hub.package, new).tried += hub.tried
    return list(rows.values())


def write(text: str, document: Path, block: str) -> None:
    """Put the rows into this block of the document. Rows of what was not played stay."""
    before, start, rest = document.read_text().partition(f"<!-- {block} -->\n")
    known, end, after = rest.partition(f"<!-- /{block} -->")
    columns = 2 if block == "hubs" else 3
    rows = {tuple(line.split("|")[1:columns]): line for line in (known + text).splitlines()}
    document.write_text(before + start + "\n".join(rows.values()) + "\n" + end + after)


async def run(only: list[str], scratch: Path) -> list[Hub]:
    found = [hub for hub in hubs() if not only or {hub.name, hub.package} & set(only)]
    for hub in found:
        await try_hub(hub, scratch)
    return joined(found)


def learn(only: list[str], *, write_to_document: bool) -> int:
    """Evaluate and train in environments of these packages."""
    from tests import hub_runs  # noqa: PLC0415  it imports this module

    text = hub_runs.table(asyncio.run(hub_runs.run(only)))
    sys.stdout.write(f"{text}\n")
    if write_to_document:
        write(text, hub_runs.DOCUMENT, "learned")
    return 0


def check(only: list[str], *, train: bool, certify: bool, write_to_document: bool) -> int:
    """Whether environments of a sample load, pass env_test and train; or their certificates."""
    from tests import hub_checks  # noqa: PLC0415  it imports this module

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = hub_checks.certify(only, folder) if certify else hub_checks.main(only, folder, train=train)
    sys.stdout.write(f"{text}\n")
    if write_to_document:
        document, block = ("certificates.md", "certified") if certify else ("hubs.md", "checked")
        write(text, ROOT / "docs" / document, block)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/hubs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--certify", action="store_true")
    parser.add_argument("--train", action="store_true", help="with --check: train a step too")
    given = parser.parse_args()
    os.environ["FLASH_HOME"] = str(HOME)
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / SETTINGS_FILE).write_text(SETTINGS)
    if given.learn:
        return learn(given.only, write_to_document=given.write)
    if given.check or given.certify:
        return check(given.only, train=given.train, certify=given.certify, write_to_document=given.write)
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(run(given.only, Path(scratch)))
    if given.json:
        given.json.write_text(json.dumps([asdict(hub) for hub in found], indent=1))
    sys.stdout.write(f"{table(found)}\n")
    if given.write:
        write(table(found), DOCUMENT, "hubs")
    return int(any(tried.unequal for hub in found for tried in hub.tried))


if __name__ == "__main__":
    sys.exit(main())
