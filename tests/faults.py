"""The table of lasting faults in bench/faults.md, from the tests that inject them.

    python -m tests.faults

Each case of a test is one fault at one point. A case holds if its test passes: the run ends right,
or says what it waits for."""

import sys
from collections import Counter

import pytest

SPACE = "tests/supervisor/test_space.py"
TROUBLE = "tests/supervisor/test_trouble.py"
UNFIT = "tests/supervisor/test_unfit.py"
FOLDER = "tests/protocol/test_run_folder.py"
REMOVAL = "tests/state/test_removal.py"
RETENTION = "tests/state/test_retention.py"
MODELS = "tests/supervisor/test_model_servers.py"

FAULTS = {
    "the disk is full: before a run starts, in its folder, metrics, heartbeat, checkpoint, result "
    "and cancel, in the database, for a push, a deployment, every tool and command": [SPACE],
    "one file of a run folder is damaged in one of ten ways": [
        f"{TROUBLE}::test_a_damaged_file", f"{TROUBLE}::test_a_damaged_result",
        f"{TROUBLE}::test_a_cancelled_run_with_a_damaged_beat", f"{FOLDER}::test_a_damaged",
    ],
    "trouble with an attempt that does not pass": [
        f"{TROUBLE}::test_a_run_whose_folder", f"{TROUBLE}::test_trouble_that", f"{TROUBLE}::test_a_full_disk",
    ],
    "a replaced attempt wakes while it writes": [f"{FOLDER}::test_a_zombie"],
    "a kill between two file operations of a save, of pruning or of a removal": [
        f"{RETENTION}::test_a_kill",
        f"{REMOVAL}::test_whoever_is_stopped",
    ],
    "the machine, a supervisor or a worker is paused; the clock jumps": [
        f"{TROUBLE}::test_a_clock", f"{TROUBLE}::test_a_retry_is_not", f"{TROUBLE}::test_a_cancelled_run_has",
        f"{TROUBLE}::test_a_pause", f"{TROUBLE}::test_a_supervisor_and_a_worker",
    ],
    "the supervisor is stopped, hangs, or is of an older or newer version; the database is newer": [
        UNFIT, "tests/supervisor/test_ensure.py::test_a_process", "tests/supervisor/test_ensure.py::test_only",
    ],
    "the database is locked, damaged or lost": [
        f"{TROUBLE}::test_a_supervisor_waits", f"{TROUBLE}::test_a_supervisor_starts",
        f"{TROUBLE}::test_a_damaged_database", "tests/supervisor/test_recovery.py",
    ],
    "a model server dies, hangs, never answers or is not used": [
        f"{MODELS}::test_a_server", f"{MODELS}::test_a_deployment_ends", f"{MODELS}::test_an_answer",
        f"{MODELS}::test_a_chat",
    ],
    "the file system has no links or locks, is linked, or is of another machine": [
        "tests/state/test_file_systems.py",
        "tests/state/test_moving.py::test_a_moved",
        "tests/state/test_moving.py::test_a_backup_is_restored",
    ],
}  # fmt: skip


class Outcomes:
    """How each case ended: passed, failed or skipped."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid] = report.outcome


def main() -> int:
    outcomes = Outcomes()
    files = sorted({name.partition("::")[0] for names in FAULTS.values() for name in names})
    code = pytest.main(["-q", "-p", "no:cacheprovider", *files, *sys.argv[1:]], plugins=[outcomes])
    lines = ["| fault | points | held | not possible here |", "|---|---|---|---|"]
    total = Counter[str]()
    for fault, names in FAULTS.items():
        ends = Counter(end for case, end in outcomes.of.items() if case.startswith(tuple(names)))
        total += ends
        lines.append(f"| {fault} | {ends.total()} | {ends['passed']} | {ends['skipped']} |")
    lines.append(f"| **all** | **{total.total()}** | **{total['passed']}** | {total['skipped']} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
