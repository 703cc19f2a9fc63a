"""Prints what the changes since the last landing call for: the command of the engines' tests, then
the files of long tests, those of the folder with the most changed lines first.

    .venv/bin/python .ci/touched.py [--all]
"""

import os
import subprocess
import sys

ENGINES = "scripts/test-engines --quick"
LEARNED = "tests/test_learning_from_use.py"
LOOP = f"tests/test_loop.py {LEARNED} tests/cli/test_demo.py"
KILLED = "tests/test_crash.py tests/supervisor/test_trouble.py tests/worker/test_mixture.py"
GATE = "tests/environments/test_gate.py tests/environments/test_gate_suite.py"
TOURNAMENT = "tests/extensions/tournament/test_with_a_model.py"
GATEWAY = "tests/extensions/gateway/test_gateway.py"
EXPORT = "tests/extensions/export/test_export.py"
DOORS = "tests/test_extending.py"
HUNT = "tests/extensions/hunt/test_hunt.py"
AGENTS = "tests/worker/test_agent_gold.py tests/worker/test_agent_sessions.py"
AGENTS += " tests/extensions/terminal/test_terminal.py"
SHARDS = "tests/worker/test_shards.py tests/supervisor/test_several_gpus.py"

CALLS_FOR = {
    "bench/": f"tests/test_bench.py tests/test_gpu_check.py {LOOP}",
    "environments/doors.py": DOORS,
    "environments/": GATE,
    "environments/adapters/": "tests/environments/test_adapters.py"
    " tests/tools/test_environment_tools.py",
    "environments/agents/": AGENTS,
    "environments/process/": f"tests/environments/test_adapters.py {AGENTS}",
    "environments/checks/": f"{GATE} {HUNT}",
    "flash_mcp/cli/": "tests/cli/test_commands.py tests/cli/test_demo.py",
    "flash_mcp/extensions/certificate/": "",
    "flash_mcp/extensions/export/": EXPORT,
    "flash_mcp/extensions/gateway/": GATEWAY,
    "flash_mcp/extensions/hunt/": HUNT,
    "flash_mcp/extensions/pages/": "",
    "flash_mcp/extensions/recording/": LEARNED,
    "flash_mcp/extensions/tournament/": TOURNAMENT,
    "flash_mcp/judgement/": f"{TOURNAMENT} {LOOP}",
    "flash_mcp/protocol/": f"{KILLED} {ENGINES}",
    "flash_mcp/server/": LOOP,
    "flash_mcp/state/": f"tests/state/test_queue.py {KILLED}",
    "flash_mcp/supervisor/": f"{KILLED} tests/worker/test_attempt.py"
    f" tests/supervisor/test_remote_servers.py {ENGINES}",
    "flash_mcp/tools/": f"tests/tools/test_environment_tools.py tests/test_fuzz.py {LOOP}",
    "scripts/test-engines": ENGINES,
    "worker/": "tests/worker/test_attempt.py tests/worker/test_soak.py"
    f" tests/worker/test_ranks.py tests/worker/test_mixture.py {SHARDS}",
    "worker/engine/": "tests/worker/test_models.py tests/worker/test_gpu_configuration.py"
    f" tests/worker/test_regression.py tests/worker/test_second_runner.py {SHARDS}",
    "worker/extensions/export/": EXPORT,
    "worker/extensions/gateway.py": GATEWAY,
    "worker/extensions/recording.py": LEARNED,
    "worker/node.py": ENGINES,
    "worker/rollouts/": "tests/worker/test_task_choice.py tests/worker/test_early_stopping.py"
    f" tests/extensions/gateway/test_gateway.py {AGENTS}",
    "worker/training/": "tests/worker/test_reference.py tests/worker/test_memory.py"
    " tests/worker/test_regression.py tests/worker/test_four_bit.py tests/worker/test_ranks.py"
    " tests/worker/test_ways.py tests/worker/test_sft.py",
}
"""The tests that each folder calls for. Of two entries that fit a file the longer one counts. What
fits none calls for nothing, as does a folder without long tests; a file of long tests calls for
itself."""
FOR_ALL = ("pyproject.toml", "constraints-cpu.txt", "tests/conftest.py")
ENGINE_TESTS = ("tests/slurm.py", "tests/ray_cluster.py", "tests/supervisor/test_slurm.py")
ENGINE_TESTS += ("tests/supervisor/test_ray.py", "tests/supervisor/test_launcher.py")

LANDING_S = 4 * 3600
"""Longer than work that comes to main at once takes from its first commit to its last."""


def git(*arguments: str) -> str:
    """What git prints, or nothing if it fails."""
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True)
    return "" if done.returncode else done.stdout.strip()


def last_landing() -> str:
    """The last commit before these changes, or nothing if none is known, which means all tests.

    CI_BASE names it. On a branch it is where the branch left origin/main. CI runs in a fresh clone,
    whose main has come already, and nothing in it marks a landing. There it is the newest commit
    that is four hours older than the last one: some changes are tested again, and none is left out.
    """
    if named := os.environ.get("CI_BASE"):
        known = git("rev-parse", "--verify", f"{named}^{{commit}}")
        return known or sys.exit(f"CI_BASE={named} names no commit")
    head = git("rev-parse", "--verify", "HEAD")
    main = git("for-each-ref", "--format=%(objectname)", "refs/remotes/origin/main")
    if main and main != head and (fork := git("merge-base", "HEAD", main)) != head:
        return fork
    changed_at = int(git("show", "--no-patch", "--format=%ct", "HEAD") or 0)
    return git("rev-list", "-1", "--first-parent", f"--before={changed_at - LANDING_S}", "HEAD")


def changed_lines(base: str) -> dict[str, int]:
    """How many lines of each file differ from `base`."""
    table = git("diff", "--numstat", "--no-renames", base, "HEAD").splitlines()
    changes = [line.split("\t") for line in table]
    return {path: int(added) + int(removed) for added, removed, path in changes if added != "-"}


def called_for(path: str) -> str:
    """The tests that a change of this file calls for."""
    if path.startswith(ENGINE_TESTS):
        return ENGINES
    if path.startswith("tests/") and path in " ".join(CALLS_FOR.values()).split():
        return path
    folders = [folder for folder in CALLS_FOR if path.startswith(folder)]
    return CALLS_FOR[max(folders, key=len)] if folders else ""


def chosen(base: str) -> list[str]:
    """The lines to print: everything if there is no `base`."""
    changes = changed_lines(base) if base else {}
    weights: dict[str, int] = {}
    for path, count in changes.items():
        weights[called_for(path)] = weights.get(called_for(path), 0) + count
    if not base or any(path in changes for path in FOR_ALL):
        weights = dict.fromkeys(CALLS_FOR.values(), 0) | weights
    selected = " ".join(sorted(weights, key=lambda tests: -weights[tests]))
    files = dict.fromkeys(selected.replace(ENGINES, "").split())
    return [*([ENGINES] if ENGINES in selected else []), *files]


if __name__ == "__main__":
    lines = chosen("" if "--all" in sys.argv[1:] else last_landing())
    sys.stdout.write("".join(f"{line}\n" for line in lines))
