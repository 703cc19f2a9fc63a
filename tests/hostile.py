"""Counts the acts of somebody hostile that the tests try: each collected test with the marker
`hostile(kind)` is one. bench/faults.md shows the counts."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import acts
from tests.places import ROOT, TESTS

KINDS = {
    "files": "files of the user and of root: read, watched, changed, linked, run",
    "surroundings": "mounts, namespaces, another root, leaving the cgroup",
    "rights": "other processes: signals, memory, descriptors; its own limits and rights",
    "machine": "the machine and its kernel: clock, modules, log, crashes, keys",
    "calls": "each of the system calls that are not on the list of those allowed",
    "sockets": "sockets of every family, by every system call",
    "odd ends": "ending, hanging or raising in ways that look like a defect or advice of ours",
    "state": "state behind links, terminals, homes, inherited descriptors, more than one folder to write to",
    "processes": "other processes and their limits, with and without namespaces",
    "network": "the network: by other programs, by pairs of sockets, by a grant of its own or of another name",
    "sessions": ("the program of another rollout: its key, memory, files and processes, those of the server "
        "that both ask, and requests with keys that it guesses"),
    "resources": "using up memory, kernel memory, processes, files, the log, our own memory, all places",
    "leftovers": "outliving the run: daemons, killed wardens, fork bombs and chains without namespaces",
    "unprotected": "running where files cannot be protected",
    "scratch": "folders nested 3,000 deep, without modes, with links to other places",
    "forged replies": ("replies that the process did not send: wrong types, missing and double fields, NaN, "
        "huge numbers, deep nesting, numbers of other calls"),
    "claims": "claims about the sandbox that protects from it",
    "task lists": "task lists that lie about their length, or have huge ids",
    "environment.toml": "an `environment.toml` with infinite, negative or mistyped limits",
    "folders": "a folder with pipes, devices or huge files where files are read",
    "leaks": "half a secret where a text is cut or a process ends; one line of a secret",
    "output": "printing terminal escapes and lines that look like ours; values without a JSON form",
    "steering": "texts that steer the agent: a `Fix`, our marks, other line ends, invisible letters, a secret's name",
    "builds": ("a package's build: started without leave or by a line of requirements.txt, reaching "
        "files, sockets and processes of the user, looking for passwords of indexes"),
    "templates": "a chat template that loops, or raises a text that steers",
    "model servers": ("a model server: its routes without a key and with seven wrong ones, those beside the "
        "users' own, web sockets, ports of its engine"),
    "ports": "listening on a model server's port before it does",
    "secrets": "changing a run's secrets: with forged keys, as another user, by holding the supervisor's socket",
    "slow connections": "connections that send too slowly, or are too many",
    "uploads": "an upload with paths, links, devices, bombs, or without an end",
    "pushes": "a push with links, pipes, or paths that leave its folder",
    "other owners": "another owner's things, paths of the server, secrets and rights that a token does not give",
    "logins": "uses of a login of the server by a caller who was not granted it",
    "run folders": "files that a node leaves for the server: names, links, sizes, numbers, keys, manifests",
    "jobs": "jobs of the cluster whose names and comments read as ours, or that have the number of one of ours",
    "pages": "uses of the pages by links, by other servers' pages, and by sessions and tokens in place of each other",
    "requests": "requests without a valid token, with another's session, from other hosts, too many or too large",
    "open": "what the sandbox does not stop",
}  # fmt: skip
"""{kind: what such acts try}"""


@cache
def found_by_pytest() -> dict[str, Any]:
    """The counts of a process that collects the tests, which takes many seconds."""
    command = [sys.executable, "-m", "tests.hostile"]
    collected = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(collected.stdout.splitlines()[-1])


def rows() -> list[tuple[object, ...]]:
    """Lines of the table: acts, how many are held, what they try, where the tests are."""
    found = found_by_pytest()
    lines: list[tuple[object, ...]] = []
    totals: Counter[str] = Counter()
    for kind, what in KINDS.items():
        count = found[kind]["acts"]
        held = count - found[kind]["open"]
        totals.update(acts=count, held=held)
        lines.append((count, held, what, ", ".join(f"`{file}`" for file in found[kind]["files"])))
    return [*lines, (f"**{totals['acts']}**", f"**{totals['held']}**", "all", "")]


def reasons() -> list[tuple[object, ...]]:
    """What is open, and why."""
    return [(act, why) for act, (_, why) in acts.OPEN.items()]


def marked() -> set[Path]:
    """The files that have such acts."""
    return {path for path in TESTS.rglob("test_*.py") if "mark.hostile(" in path.read_text()}


def counts(items: Iterable[pytest.Item]) -> dict[str, Any]:
    """Acts, those that are not held, and files, by kind."""
    found: dict[str, Any] = {}
    for item in items:
        for mark in item.iter_markers("hostile"):
            kind = found.setdefault(mark.args[0], {"acts": 0, "open": 0, "files": []})
            kind["acts"] += 1
            kind["open"] += mark.kwargs.get("is_open", False)
            kind["files"] = sorted({*kind["files"], str(item.path.relative_to(ROOT))})
    return found


class Collector:
    """A plugin of pytest."""

    found: dict[str, Any]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = counts(session.items)


def main() -> None:
    """Print the counts as JSON, after what pytest prints."""
    collector = Collector()
    options = ["--collect-only", "-q", "-m", "hostile", "-p", "no:cacheprovider"]
    ended = pytest.main([*options, *map(str, marked())], plugins=[collector])
    sys.stdout.write(f"\n{json.dumps(collector.found)}\n")
    sys.exit(ended)


if __name__ == "__main__":
    main()
