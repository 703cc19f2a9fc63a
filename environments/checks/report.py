"""What the gate reports: its checks, and how they tell what an environment did."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from environments.base import Environment, EnvironmentSingleTurn
from environments.checks.playing import Answers, GivenTurn, Played
from environments.faults import FIXES, EnvironmentFault, remedy
from environments.process import requirements
from environments.process.host import Score
from environments.sandbox.needs import FILE as NEEDS_FILE
from environments.sandbox.needs import READABLE_VARIABLE
from environments.tools import text_of
from environments.untrusted_text import quoted

Verdict = Literal["passed", "failed", "unfinished"]


@dataclass(frozen=True)
class Probe:
    """One check. `passed` is None if it tells nothing; `fix` is empty if nothing is to be done."""

    name: str
    passed: bool | None
    evidence: str
    fix: str = ""
    finished: bool = True  # false if there was no time for it


@dataclass
class Report:
    """All checks of one environment, in the order in which they were made."""

    splits: dict[str, int] = field(default_factory=dict[str, int])
    probes: list[Probe] = field(default_factory=list[Probe])
    sandbox: dict[str, str] = field(default_factory=dict[str, str])
    """What protected this machine from its code (EnvironmentHost.sandbox)."""
    seconds: float = 0.0

    accepted: list[str] = field(default_factory=list[str])
    """The checks that failed, and whose failure the caller accepts."""

    @property
    def verdict(self) -> Verdict:
        """A check that cannot be made is no failure; one without time leaves the verdict open."""
        if self.failed:
            return "failed"
        return "unfinished" if self.unfinished else "passed"

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    @property
    def unfinished(self) -> list[str]:
        """The checks for which there was no time."""
        return [probe.name for probe in self.probes if not probe.finished]

    @property
    def failed(self) -> list[str]:
        """The checks that failed, without those that are accepted."""
        names = [probe.name for probe in self.probes if probe.passed is False]
        return [name for name in names if name not in self.accepted]


# -- the fix of a fault ----------------------------------------------------------------------------

FIX_OF_CODE = {
    **FIXES,
    "environment_timeout": "give every wait and every loop in environment code an end; if it needs "
    f"the time, declare call_timeout_s in {NEEDS_FILE}",
    "dataset_invalid": "correct the dataset at the place named",
    "environment_access": "put the data into the environment's own folder and read it from "
    "Path(__file__).parent; write only to the temporary folder, with tempfile; other folders to "
    f"read are the operator's {READABLE_VARIABLE}",
    "requirements_failed": f"correct {requirements.FILE}: name packages and versions that exist "
    "for this Python",
}
LIMITS_FIX = (
    f"stay within the limits, or raise them in {NEEDS_FILE} "
    "(network, memory_gib, processes, file_gib)"
)
FIX_OF_TEXT = {
    rf"^{re.escape(NEEDS_FILE)}": f"correct {NEEDS_FILE}, or delete it: most environments need "
    "none",
    "does not say endpoint = true": f"write endpoint = true into {NEEDS_FILE} next to "
    "environment.py: its agent calls the model's API",
    r"^there is no environment\.py": "pass the folder that holds environment.py; env_setup writes "
    "one to start from",
    "its process answered no call": "release the interpreter: make long native code release the "
    "GIL, or run it in a process",
    "the environment's process ended": "raise or return instead of ending the process: look for "
    "exit calls, signals and crashes of native code",
}
"""Fixes by a pattern of the fault's text, for faults that no exception of a method caused."""
REWARD_FIX = (
    "RewardResult takes score, success, reason, error, metrics and metadata, and RewardMetric name "
    "and score"
)
FRAME = re.compile(r'^ *File "([^"\n]+)", line', re.MULTILINE)
IN_PACKAGE = re.compile(r"/site-packages/(\w{1,60})[/.]")
METHODS = ("environment.py", *vars(Environment), *vars(EnvironmentSingleTurn))
"""Whose names a fix may repeat. Environment code can claim any name."""


def failure(name: str, fault: EnvironmentFault) -> Probe:
    evidence = f"[{fault.code}]"
    if not fault.is_foreign:
        evidence += f" {fault.what}"
    evidence += quoted(fault.wrote(800))
    return Probe(name, False, evidence, remedy(fault) or _fix(name, fault))


def _fix(name: str, fault: EnvironmentFault) -> str:
    if fault.code not in ("environment_error", "environment_invalid"):
        return FIX_OF_CODE.get(fault.code, LIMITS_FIX)
    what = fault.what
    if isinstance(fault.__cause__, EnvironmentFault):
        # `_timed` put the answer before it; the words of the answer must not be matched.
        what = fault.__cause__.what
    if raised := re.match(r"(\S+) raised (\w+): ", what):
        return _fix_of_raised(name, raised[1], raised[2], fault)
    for pattern, fix in FIX_OF_TEXT.items():
        if re.search(pattern, what):
            return fix
    if fault.code == "environment_invalid":
        return "correct environment.py"
    if what.startswith("the score must be"):
        return "give RewardResult a finite number as score, whatever the model wrote"
    if what.startswith("the metrics must be"):
        return REWARD_FIX
    return "return what the evidence asks for on every path: one without a return gives None"


def _fix_of_raised(name: str, method: str, error: str, fault: EnvironmentFault) -> str:
    what = fault.what
    if re.search(r"Reward(Result|Metric)\.__init__\(\)", what):
        return REWARD_FIX
    called = re.search(r"(\w+)\(\) (?:takes|missing|got)", what)
    if error == "TypeError" and called and not called[1].startswith("_"):
        contract = getattr(EnvironmentSingleTurn, called[1], None)
        if callable(contract):
            parameters = ", ".join(inspect.signature(contract).parameters)
            return f"define it as the contract does: {called[1]}({parameters})"
    is_about_answer = name != "gold" and error not in ("NameError", "ImportError")
    if is_about_answer and method in ("score_episode", "score_group", "normalize_response_text"):
        return "return a low score instead of raising, whatever the model wrote"
    if is_about_answer and method == "step_episode":
        return "answer with a message or done=True instead of raising, whatever the model wrote"
    frames = FRAME.findall(fault.traceback)
    if frames and (package := IN_PACKAGE.search(frames[-1])):
        what = f"the package {package[1]} raised it, not your code"
        return f"{what}: change what it is called with, or pin another version of it"
    return f"correct {method if method in METHODS else 'the code'} at the line named"


def reward_range(rewards: Sequence[float]) -> str:
    return f"from {min(rewards):g} to {max(rewards):g}"


def shown(answers: Answers) -> str:
    texts: list[str | None] = []
    for answer in answers:
        if isinstance(answer, GivenTurn):
            texts.append(text_of({"content": str(answer), "tool_calls": answer.tool_calls}))
        else:
            texts.append(answer)
    return " / ".join(_brief(text, 80) for text in texts) or "nothing"


def _brief(value: Any, limit: int) -> str:
    """Its repr. Long texts in it lose their middle, so quotes stay closed."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = limit
    return brief.repr(value)


def score_text(score: Score) -> str:
    reason = f" ({score.reason:.200})" if score.reason else ""
    return f"reward {score.reward:g}, success {str(score.success).lower()}{reason}"


def difference(one: Played, other: Played) -> str:
    """The first thing in which two different conversations differ."""
    for what, ours, theirs in (
        ("message", one.said, other.said),
        ("score", [one.score], [other.score]),
    ):
        for left, right in zip_longest(ours, theirs):
            if left != right:
                return f"{what} {_brief(left, 200)} and {_brief(right, 200)}"
    return "nothing"
