"""The gate: checks that an environment must pass before a model is trained on it.

    report = await check(folder)
    report.verdict, report.probes[0].name, report.probes[0].evidence, report.probes[0].fix

All environment code runs in child processes through EnvironmentHost. A fault of the environment
becomes a failed probe and is not raised. The gate cannot prove that a scorer is right; it finds the
kinds of wrong scorers that were seen before."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from environments.checks import consistency, probes
from environments.checks.playing import Task
from environments.checks.report import Probe, Report, failure
from environments.checks.trial import ProbeFailed, ProbeSkipped, Trial
from environments.process import requirements
from environments.process.clock import SHIFT_VARIABLE
from environments.process.host import EnvironmentFault, EnvironmentHost

ROWS = {"train": 5, "eval": 3}  # how many tasks of each split are tried
OTHER_CLOCK = {"TZ": "ALT-13:37", SHIFT_VARIABLE: str(400 * 86_400 + 47_231)}
"""What differs between the two processes that must agree: time zone, date and time of day."""
OUT_OF_TIME = "not finished: the time for all checks was used up"
TIME_FIX = "test again with more time (time_s), or make its calls faster"
LOADING = "loading environment.py took longer"
LOAD_FIX = "test again with more time (time_s), or let load_environment do less"

HUNT = "hunt"
"""The check that an entry point of flash_mcp.checks brings (docs/extending.md)."""
Check = Callable[[Trial], Awaitable[str]]
FIRST: dict[str, Check] = {"tasks": probes.tasks, "prompts": probes.prompts}
"""Without a prompt there is nothing to play, so that the others are left out."""
PROBES: dict[str, Check] = {
    "gold": probes.gold,
    "junk": probes.junk,
    "empty": probes.empty,
    "none": probes.none,
    "truncated": probes.truncated,
    "prompt_echo": probes.prompt_echo,
    "near_gold": probes.near_gold,
    "nonsense": probes.nonsense,
    "order": probes.order,
    "constants": probes.constants,
    "groups": consistency.groups,
    "judge": consistency.judge,
    "tool_calls": consistency.tool_calls,
    "isolation": consistency.isolation,
    "determinism": consistency.determinism,
    "draws": consistency.draws,
    "every_gold": probes.every_gold,
    "leaks": probes.leaks,
}
"""In the order in which they are made: a later one may use what an earlier one saw."""


async def check(
    folder: Path,
    *,
    known_as: str = "",
    args: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
    deadline_s: float = 38.0,
    max_tokens: int | None = None,
    accepted: Sequence[str] = (),
    install_timeout_s: float | None = None,
    on_progress: requirements.Listener | None = None,
) -> Report:
    """Check the environment in `folder`: at most `timeout_s` seconds a call, about `deadline_s` for
    all. With `max_tokens`, no answer is longer than a model could write with so many tokens.
    `accepted` names checks whose failure the caller takes.

    Raises EnvironmentFault(not_ready) if its packages are not installed after
    `install_timeout_s`."""
    start = partial(
        EnvironmentHost.start,
        folder,
        known_as=known_as,
        args=args,
        secrets=secrets,
        timeout_s=timeout_s,
        start_timeout_s=max(1.0, deadline_s / 2),
    )
    report = Report(accepted=list(accepted))
    started = time.monotonic()
    try:
        await requirements.interpreter(folder, timeout_s=install_timeout_s, on_progress=on_progress)
        async with await start() as host:
            start_other = partial(start, variables=OTHER_CLOCK)
            ends = started + deadline_s
            trial = Trial(host, start_other, report, ends, max_tokens)
            await _check_all(trial, time.monotonic() - started)
            slow: list[str] = []
            times: list[str] = []
            for method, seconds in trial.slowest_s.items():
                times.append(f"{method} {seconds * 1000:.1f} ms")
                if seconds > host.timeout_s:
                    slow.append(method)
            fix = f"{', '.join(slow)} must answer within {host.timeout_s:g} s" if slow else ""
            report.probes.append(Probe("time", not slow, f"slowest calls: {', '.join(times)}", fix))
    except EnvironmentFault as fault:
        if fault.code == "not_ready":
            raise
        report.probes.append(_faulty("loads", fault))
    report.seconds = time.monotonic() - started
    return report


async def _check_all(trial: Trial, loaded_s: float) -> None:
    host, report = trial.host, trial.report
    report.splits = dict(host.splits)
    report.sandbox = dict(host.sandbox)
    sizes = f"{host.splits['train']} train tasks, {host.splits['eval']} eval tasks"
    report.probes.append(Probe("loads", True, f"in {loaded_s:.2f} s: {sizes}"))
    for split, size in host.splits.items():
        trial.tasks += [Task(split, index) for index in _some(size, ROWS[split])]
    for name, body in FIRST.items():
        report.probes.append(await _probe(trial, name, body))
    if report.probes[-1].passed:
        for name, body in PROBES.items():
            if await _applies(trial, name):
                report.probes.append(await _probe(trial, name, body))
    elif not report.probes[-1].finished:
        report.probes += [Probe(name, None, OUT_OF_TIME, TIME_FIX, False) for name in PROBES]


async def _applies(trial: Trial, name: str) -> bool:
    """Whether the environment has what this probe looks at."""
    if name == "groups":
        return trial.host.scores_groups
    if name == "judge":
        return trial.host.scores_groups and await consistency.has_judge(trial)
    return name != "tool_calls" or any(item.tools for item in trial.openings.values())


async def _probe(trial: Trial, name: str, body: Check) -> Probe:
    try:
        async with asyncio.timeout(trial.left_s):
            return Probe(name, True, await body(trial))
    except ProbeSkipped as skipped:
        return Probe(name, None, *skipped.args)
    except ProbeFailed as failed:
        return Probe(name, False, *failed.args)
    except EnvironmentFault as fault:
        return _faulty(name, fault)
    except TimeoutError:
        return Probe(name, None, OUT_OF_TIME, TIME_FIX, finished=False)


def _faulty(name: str, fault: EnvironmentFault) -> Probe:
    """The failed check; unfinished if loading had less time than a run allows."""
    probe = failure(name, fault)
    if fault.code == "environment_timeout" and fault.what.startswith(LOADING):
        return replace(probe, passed=None, fix=LOAD_FIX, finished=False)
    return probe


def _some(size: int, count: int) -> list[int]:
    """Up to `count` indices of range(size): the first, the last and some between them. Indices at
    equal distances would miss kinds of tasks that take turns.
    """
    if size <= count:
        return list(range(size))
    return [0, *sorted(random.Random(0).sample(range(1, size - 1), count - 2)), size - 1]
