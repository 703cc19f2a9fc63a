"""The gate on environments with one fault each."""

import re
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import environments
from environments.checks import gate, playing
from environments.checks.report import Probe, Report
from environments.faults import EnvironmentFault
from tests.folders import ASK, environment_folder

pytestmark = pytest.mark.slow
check = partial(gate.check, deadline_s=600)  # however busy the machine is, every check ends
EXAMPLES = Path(environments.__file__).parent / "examples"
PROBES = [
    "loads", "tasks", "prompts", "gold", "junk", "empty", "none", "truncated", "prompt_echo", "near_gold", "nonsense",
    "order", "constants", "isolation", "determinism", "draws", "every_gold", "leaks", "time",
]  # fmt: skip


def failures(report: Report) -> dict[str, Probe]:
    return {probe.name: probe for probe in report.probes if probe.passed is False}


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("calculator", "agent_calculator")]


@pytest.mark.parametrize("name", ["sort_words", "tool_calculator", *LONG])
async def test_the_examples_pass_every_check(name: str) -> None:
    report = await check(EXAMPLES / name, deadline_s=600)
    expected = list(PROBES)
    if name in ("tool_calculator", "agent_calculator"):
        expected.insert(PROBES.index("isolation"), "tool_calls")
    assert [(probe.name, probe.passed) for probe in report.probes] == [(name, True) for name in expected]
    assert report.passed and report.splits == {"train": 500, "eval": 200}


async def test_the_example_with_an_mcp_server_passes() -> None:
    report = await check(EXAMPLES / "mcp_server", deadline_s=600)
    assert report.passed, report.probes


TOOL_FAULTS = {
    "raises on wrong arguments": (
        """
        call, = messages[-1]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        said = str(self.double(arguments["number"]))
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": said}]
        return EnvironmentStepResult(False, answers)
        """,
        "step_episode raised KeyError",
        "instead of raising",
    ),
    "pays for any call": (
        """
        self.called = 2
        return super().step_episode(example, messages, assistant_response)
        """,
        "counts as a success",
        "set success in RewardResult",
    ),
    "answers as the user": (
        """
        return EnvironmentStepResult(False, [{"role": "user", "content": "I cannot do that."}])
        """,
        "no message answers the call 'no_such_tool({})'",
        "'tool_call_id': its id",
    ),
}
DOUBLING = """
import json
from environments import EnvironmentToolUse
class Doubling(EnvironmentToolUse):
    def __init__(self):
        self.dataset, self.eval_dataset = tasks(6), tasks(4, first=100)
    def episode_tools(self, example):
        return [self.double]
    def double(self, number: int) -> int:
        self.called += 1
        return 2 * number
    def start_episode(self, example):
        self.called = 0
        return [{"role": "user", "content": example.input}]
    def score_episode(self, example, episode):
        right = self.called > 1 or bool(self.called and episode.response_text == example.output)
        return RewardResult(float(right), success=right)
    def sft_completion(self, example):
        call = {"name": "double", "arguments": {"number": 1}}
        answer = {"role": "tool", "tool_call_id": "call00000", "content": "2"}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            answer,
            {"role": "assistant", "content": example.output},
        ]
class Faulty(Doubling):
    def step_episode(self, example, messages, assistant_response):
        if not messages[-1].get("tool_calls"):
            return EnvironmentStepResult()
"""


@pytest.mark.parametrize("fault", TOOL_FAULTS)
@pytest.mark.usefixtures("in_this_process")
async def test_what_is_wrong_with_the_answers_to_tool_calls_is_found(tmp_path: Path, fault: str) -> None:
    body, evidence, fix = TOOL_FAULTS[fault]
    source = DOUBLING + textwrap.indent(textwrap.dedent(body), " " * 8)
    probe = failures(await check(environment_folder(tmp_path, source, returns="Faulty()")))["tool_calls"]
    assert evidence in probe.evidence and fix in probe.fix


@pytest.mark.usefixtures("in_this_process")
async def test_tool_calls_that_are_answered_well_pass(tmp_path: Path) -> None:
    sound = await check(environment_folder(tmp_path, DOUBLING, returns="Doubling()"))
    (tools,) = [probe for probe in sound.probes if probe.name == "tool_calls"]
    assert (tools.passed, tools.evidence) == (True, "14 bad or odd calls: none raised, none was a success")


@pytest.mark.usefixtures("in_this_process")
async def test_gold_messages_that_call_no_tool_are_named(tmp_path: Path) -> None:
    source = """
        class Silent(Doubling):
            def score_episode(self, example, episode):
                right = episode.response_text == example.output
                return RewardResult(float(right), success=right)
            def sft_completion(self, example):
                return [{"role": "assistant", "content": example.output}]
    """
    source = DOUBLING + textwrap.dedent(source)
    report = await check(environment_folder(tmp_path, source, returns="Silent()"))
    (tools,) = [probe for probe in report.probes if probe.name == "tool_calls"]
    assert tools.passed is None and report.passed
    assert tools.evidence == "the gold messages of 8 tasks with tools call none" and "sft_completion" in tools.fix


FAULTS = {
    "a scorer that raises on junk": (
        "def score_response(self, example, text): return RewardResult(float(int(text or 0) == int(example.output)))",
        {"junk", "empty", "prompt_echo", "near_gold", "nonsense", "constants", "determinism", "draws"}, "junk",
        "raised ValueError: invalid literal for int()"),
    "a floor that makes everything a success": (
        "def score_response(self, example, text): return RewardResult(2.0 if text == example.output else 1.0)",
        {"junk", "empty", "none", "truncated", "prompt_echo", "near_gold", "constants"}, "empty",
        "'' counts as a success, with reward 1"),
    "a scorer that pays nearly all for nothing": ("def score_response(self, example, text):\n"
        "        right = text == example.output\n        return RewardResult(1.0 if right else 0.9, success=right)",
        {"junk", "empty", "none", "prompt_echo", "constants"}, "junk",
        "earned reward 0.9, success false, the gold answer 1"),
    "a scorer that trips over None": (
        "def score_response(self, example, text):\n        return RewardResult(float(text.strip() == example.output))",
        {"none"}, "none", "'NoneType' object has no attribute 'strip'"),
    "a gold answer that the scorer rejects": (
        "def sft_completion(self, example): return [{'role': 'assistant', 'content': 'no idea'}]", {"gold"}, "gold",
        "the gold answer of train[0] is no success: it earned reward 0, success false\nenvironment or model wrote:"),
    "a score that is drawn": (
        "def score_response(self, example, text):\n        right = (text or '').strip() == example.output\n"
        "        return RewardResult(0.8 + random.Random().random() / 10 if right else 0.0, success=right)",
        {"isolation", "determinism", "draws"}, "determinism",
        "train[0] went differently when it was played again, with the same random numbers: episodes share state"),
    "tasks that are drawn": ("def __init__(self):\n"
        "        self.dataset, self.eval_dataset = tasks(6, first=random.randrange(10**9)), tasks(4, first=-9)",
        {"determinism"}, "determinism", "two processes disagree on the train tasks or their order"),
    "eval tasks that are trained on": (
        "def __init__(self): self.dataset, self.eval_dataset = tasks(6), tasks(4, first=5)", {"tasks"}, "tasks",
        "contaminated: 1 of 4 eval tasks are train tasks too: 1 ask what a train task asks, e.g. train 't5' = 't5'"),
    "eval tasks with the ids of others": ("def __init__(self):\n        self.dataset = tasks(6)\n"
        "        self.eval_dataset = [dataclasses.replace(task, id='t0') for task in tasks(1, first=9)]", {"tasks"},
        "tasks", "contaminated: 1 of 1 eval tasks are train tasks too: 1 have the id of a train task, e.g. 't0'"),
    "ids that repeat": (
        "def __init__(self): self.dataset, self.eval_dataset = tasks(6) + tasks(1), tasks(4, first=100)", {"tasks"},
        "tasks", "1 of 7 train tasks repeat an id, for instance 't0'"),
    "one task under two ids": (
        "def __init__(self):\n        self.dataset, self.eval_dataset = tasks(6), tasks(4, first=100)\n"
        "        self.eval_dataset.append(dataclasses.replace(self.eval_dataset[1], id='again'))", {"tasks"}, "tasks",
        "1 of 5 eval tasks ask what another one asks, for instance 't101' = 'again'"),
    "a gold answer that is no text": ("def sft_completion(self, example): return [{'role': 'assistant', 'content': 3}]",
        {"gold"}, "gold", "train[0]: the content of a assistant message of sft_completion must be a string, got int 3"),
    "a prompt of the wrong shape": (
        "def build_prompt_messages(self, example): return [{'role': 'user', 'text': 'hello'}]", {"prompts"}, "prompts",
        "the content of a user message of start_episode must be a string, got None"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_environment_fails_where_it_is_at_fault(tmp_path: Path, fault: str, request) -> None:
    method, expected, name, evidence = FAULTS[fault]
    if "drawn" not in fault:  # by each process anew
        request.getfixturevalue("in_this_process")
    report = await check(environment_folder(tmp_path, f"class Sample(Addition):\n    {method}\n"))
    failed = failures(report)
    assert not report.passed
    assert set(failed) == expected, {probe.name: probe.evidence for probe in failed.values()}
    assert evidence in failed[name].evidence, failed[name].evidence
    assert failed[name].fix


FIXES = {
    "start_episode": ("def start_episode(self, example, prompt_text): return []", "prompts",
        "define it as the contract does: start_episode(self, example)"),
    "prompt": ("def start_episode(self, example): return 1 / 0", "prompts",
        "correct start_episode at the line named"),
    "step": ("def step_episode(self, example, messages, assistant_response): pass", "junk",
        "return what the evidence asks for on every path: one without a return gives None"),
    "raising step": ("def step_episode(self, example, messages, said): int(said)", "junk",
        "answer with a message or done=True instead of raising, whatever the model wrote"),
    "text": ("def score_response(self, example, text): return RewardResult('high')", "gold",
        "give RewardResult a finite number as score, whatever the model wrote"),
    "nan": ("def score_response(self, example, text): return RewardResult(float('nan'))", "junk",
        "give RewardResult a finite number as score, whatever the model wrote"),
    "gold": ("def score_response(self, example, text): return RewardResult(text.missing)", "gold",
        "correct score_episode at the line named"),
    "package": ("def score_response(self, example, text): import httpx; return httpx.URL(3)", "gold",
        "the package httpx raised it, not your code: change what it is called with, or pin another version of it"),
    "typo": ("def score_response(self, example, text): return Reward(0.0)", "junk",
        "correct score_episode at the line named"),
    "junk": ("def score_response(self, example, text): return RewardResult(float(int(text) == 1))", "junk",
        "return a low score instead of raising, whatever the model wrote"),
    "field": ("def score_response(self, example, text): return RewardResult(0.0, threshold=1.0)", "junk",
        "RewardResult takes score, success, reason, error, metrics and metadata, and RewardMetric name and score"),
    "metrics": ("def score_response(self, example, text): return RewardResult(0.0, metrics={'a': 1.0})", "junk",
        "RewardResult takes score, success, reason, error, metrics and metadata, and RewardMetric name and score"),
    "exit": ("def score_response(self, example, text): return text[:4] == 'asdf' and os._exit(3)", "junk",
        "raise or return instead of ending the process: look for exit calls, signals and crashes of native code"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FIXES)
async def test_a_fix_fits_its_fault(tmp_path: Path, fault: str, monkeypatch, request: pytest.FixtureRequest) -> None:
    method, name, fix = FIXES[fault]
    if fault != "exit":
        request.getfixturevalue("in_this_process")
    monkeypatch.setattr(gate, "PROBES", {each: gate.PROBES[each] for each in ("gold", "junk")})
    # Words of an answer that is quoted with a fault are none of the fault's.
    answer = "{'role': 'assistant', 'content': 'x raised Y: must be'}"
    gold = f"def sft_completion(self, example):\n        return [{answer}]"
    report = await check(environment_folder(tmp_path, f"class Sample(Addition):\n    {method}\n    {gold}\n"))
    assert failures(report)[name].fix == fix, failures(report)[name].evidence


LOAD_FIXES = {
    "key": ("os.environ['INVENTORY_KEY']", {},
        "if the code needs a variable of the server, declare it in environment.toml"),
    "own key": ("{}['inventory']", {}, "correct environment.py at the line named"),
    "unexpected": ("Addition(**args)", {"size": 2},
        "leave the argument that it names out of environment_args, or let the code accept it"),
    "of a task": ("TaskExample(input='a')", {}, "correct environment.py at the line named"),
    "of a class within": ("(lambda: Sized())()", {}, "correct environment.py at the line named"),
    "unreadable": ("open('/etc/shadow')", {}, "put the data into the environment's own folder"),
    "unwritable": ("open('notes.txt', 'w')", {}, "put the data into the environment's own folder"),
    "missing": ("Sized()", {}, "pass the argument that it names in environment_args, or give it a default"),
    "package": ("__import__('no_such_package')", {},
        "add the package of that module to requirements.txt next to environment.py"),
    "exit": ("os._exit(3)", {}, "raise or return instead of ending the process"),
    "none": ("None", {}, "correct environment.py"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LOAD_FIXES)
async def test_a_fault_of_loading_names_its_remedy(tmp_path: Path, fault: str) -> None:
    returns, args, fix = LOAD_FIXES[fault]
    sized = "class Sized(Addition):\n    def __init__(self, size): pass\n"
    (probe,) = (await check(environment_folder(tmp_path, sized, returns=returns), args=args)).probes
    assert probe.fix.startswith(fix), probe.evidence


@pytest.mark.parametrize(
    ("parameters", "args", "fix"),
    [
        ("", {"size": 2}, "leave the argument that it names out of environment_args, or let the code accept it"),
        ("size", {}, "pass the argument that it names in environment_args, or give it a default"),
    ],
)
async def test_arguments_that_load_environment_does_not_take_are_named(tmp_path, parameters, args: dict[str, int], fix):
    (tmp_path / "environment.py").write_text(f"def load_environment({parameters}): pass\n")
    assert (await check(tmp_path, args=args)).probes[0].fix == fix


async def test_a_fault_of_a_file_names_the_file(tmp_path: Path) -> None:
    assert (await check(tmp_path)).probes[0].fix.startswith("pass the folder that holds environment.py")
    environment_folder(tmp_path, "", returns="Addition()", needs="netwrk = true")
    assert (await check(tmp_path)).probes[0].fix.startswith("correct environment.toml")


async def test_a_syntax_error_is_shown_without_the_frames_of_its_import(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text("def f(:\n")
    evidence = (await check(tmp_path)).probes[0].evidence
    assert re.search(r'environment.py", line 1\n.*def f\(:', evidence) and "importlib" not in evidence


@pytest.mark.usefixtures("in_this_process")
async def test_a_long_answer_is_cut_with_its_quotes_closed(tmp_path: Path) -> None:
    source = "def sft_completion(self, example): return [{'role': 'assistant', 'content': 'gold' * 99}]"
    report = await check(environment_folder(tmp_path, f"class Sample(Addition):\n    {source}\n"))
    assert re.search(r"no success: it earned .*\n.*\n\| '[gold]+\.\.\.[gold]+'", failures(report)["gold"].evidence)


async def test_state_that_episodes_share_is_found(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        said = []
        def start_episode(self, example):
            self.said.clear()
            return [{"role": "user", "content": "go on"}]
        def step_episode(self, example, messages, assistant_response):
            self.said.append(1)
            return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": str(len(self.said))}])
        def score_episode(self, example, episode):
            return RewardResult(float(episode.response_text == example.output))
    """
    failed = failures(await check(environment_folder(tmp_path, source)))
    assert set(failed) == {"isolation"}
    assert "went differently while other episodes ran than alone" in failed["isolation"].evidence


RANKING = """
    class Sample(Addition):
        def score_group(self, example, episodes):
            right = [episode.response_text == example.output for episode in episodes]
            return [RewardResult({reward}) for place, one in enumerate(right)]
"""


@pytest.mark.parametrize(
    ("reward", "evidence"),
    [
        ("one + 1e-9 * place", ""),
        ("float(one) + place", "with the same group turned around"),
        ("float(not one)", "the gold answer earned 0, junk and an empty answer [1.0, 1.0]"),
        ("1 / (place - 1)", "score_group raised ZeroDivisionError"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
async def test_a_group_is_scored_whatever_its_order_and_gold_above_junk(tmp_path: Path, reward: str, evidence: str):
    report = await check(environment_folder(tmp_path, RANKING.format(reward=reward)))
    assert "groups" in [probe.name for probe in report.probes]
    failed = failures(report)
    assert set(failed) == ({"groups"} if evidence else set())
    assert not evidence or evidence in failed["groups"].evidence


async def test_a_scorer_that_hangs_on_an_answer_is_found_and_the_other_checks_are_made(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def score_response(self, example, response_text):
            while response_text == "asdf qwer zxcv": time.sleep(0.01)
            return super().score_response(example, response_text)
    """
    report = await check(environment_folder(tmp_path, source))
    failed = failures(report)
    assert set(failed) == {"junk", "determinism", "draws", "time"}
    assert [probe.name for probe in report.probes] == PROBES
    assert "[environment_timeout] train[0] with the answer 'asdf qwer zxcv'" in failed["junk"].evidence
    assert "while response_text == " in failed["junk"].evidence
    assert "score_episode must answer within 5 s" in failed["time"].fix


@pytest.mark.usefixtures("in_this_process")
async def test_a_gold_answer_whose_first_half_says_all_is_no_fault(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def sft_completion(self, example):
            return [{"role": "assistant", "content": f"{example.output}. This is so because both were added up."}]
        def score_response(self, example, response_text):
            return RewardResult(float((response_text or "").split(".")[0] == example.output))
    """
    report = await check(environment_folder(tmp_path, source))
    assert report.passed
    (probe,) = [probe for probe in report.probes if probe.name == "truncated"]
    assert probe.passed is None and "says all" in probe.fix


async def test_gold_that_has_fewer_turns_than_its_episode_is_told_so(tmp_path: Path) -> None:
    source = """
class Sample(EnvironmentAgent):
    max_calls = 3
    def __init__(self): self.dataset, self.eval_dataset = tasks(6), tasks(4, first=6)
    def run(self, example, base_url, api_key, model):
        messages = [{"role": "user", "content": example.input}]
        for _ in range(2):
            message = asked(base_url, api_key, model, messages)
            if "role" not in message: raise RuntimeError(message["message"])
            messages += [message, {"role": "user", "content": "Are you sure?"}]
        right = message["content"] == example.output
        return RewardResult(float(right), success=right)
    def sft_completion(self, example):
        return [{"role": "assistant", "content": example.output}] * TURNS
"""
    for turns in (1, 2):
        asking = ASK + source.replace("TURNS", str(turns))
        report = await check(environment_folder(tmp_path / str(turns), asking, needs="endpoint = true"))
        (probe,) = [probe for probe in report.probes if probe.name == "gold"]
        assert probe.passed == (turns == 2), probe
        if turns == 1:
            assert "goes on after turn 1" in probe.evidence and "every turn of the model" in probe.fix
            assert "context" not in probe.evidence


@pytest.mark.usefixtures("in_this_process")
async def test_what_cannot_be_checked_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        def __init__(self): self.dataset = [TaskExample({}, "say something", id="only")]
        def score_episode(self, example, episode): return RewardResult(0.0)
    """
    report = await check(environment_folder(tmp_path, source))
    assert [probe.name for probe in report.probes if probe.passed is None] == [
        "tasks", "gold", "truncated", "near_gold", "order", "every_gold", "leaks",
    ]  # fmt: skip
    assert report.passed


@pytest.mark.usefixtures("in_this_process")
async def test_gold_answers_that_raise_are_not_called_missing(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def score_response(self, example, response_text):
            raise KeyError(example.output)
    """
    report = await check(environment_folder(tmp_path, source))
    assert "gold" in failures(report)
    evidence = {probe.name: probe.evidence for probe in report.probes if probe.passed is None}
    assert evidence["every_gold"] == evidence["leaks"] == "there is no gold answer that succeeds"
    assert evidence["near_gold"] == "this needs gold answers that succeed and differ between tasks"


ONE_AT_A_TIME = "type('OneAtATime', (Sample,), {'max_score_concurrency': 1})()"


async def test_all_of_it_ends_at_its_deadline(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def score_response(self, example, response_text):
            time.sleep(0.4)
            return RewardResult(float(response_text == example.output))
    """
    report = await check(environment_folder(tmp_path, source, returns=ONE_AT_A_TIME), deadline_s=10)
    assert report.verdict == "unfinished" and not report.passed
    late = {probe.name for probe in report.probes if "the time for all" in probe.evidence}
    assert late == set(report.unfinished)
    assert report.seconds < 90, "all plays would take over 100 s"


async def test_without_time_for_a_prompt_every_check_is_unfinished(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def build_prompt_messages(self, example):
            time.sleep(60)
    """
    folder = environment_folder(tmp_path, source)
    report = await gate.check(folder, deadline_s=16, timeout_s=50)  # loading it may take 8 s
    assert report.verdict == "unfinished" and set(gate.PROBES) < set(report.unfinished)


async def test_a_load_that_takes_the_time_for_all_checks_is_unfinished(tmp_path: Path) -> None:
    folder = environment_folder(tmp_path, "time.sleep(60)\nclass Sample(Addition): pass")
    report = await gate.check(folder, deadline_s=2)
    assert (report.verdict, report.unfinished) == ("unfinished", ["loads"])
    assert "took longer than 1 s" in report.probes[0].evidence and "(time_s)" in report.probes[0].fix


async def test_a_slow_environment_is_checked_within_the_time_by_playing_at_once(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def build_prompt_messages(self, example):
            time.sleep(0.25)
            return super().build_prompt_messages(example)
    """
    report = await check(environment_folder(tmp_path, source))
    assert report.verdict == "passed"
    assert report.seconds < 60, "one by one it would take over 65 s"


@pytest.mark.usefixtures("in_this_process")
async def test_a_substring_scorer_learns_how_to_be_strict_and_can_be_accepted(tmp_path: Path) -> None:
    """The scorer of the freesolo SDK's own starter."""
    source = """
    class Sample(Addition):
        def score_response(self, example, text):
            right = example.output.lower() in (text or "").lower()
            return RewardResult(1.0 if right else 0.0)
    """
    folder = environment_folder(tmp_path, source)
    failed = failures(await check(folder))
    assert set(failed) == {"near_gold", "constants"}
    for probe in failed.values():
        assert "`right = text.strip() == gold.strip()`" in probe.fix
        assert "accept=['near_gold', 'constants']" in probe.fix
    partly = await check(folder, accepted=["near_gold"])
    assert (partly.verdict, partly.failed) == ("failed", ["constants"])
    accepted = await check(folder, accepted=["near_gold", "constants"])
    assert (accepted.passed, accepted.failed, accepted.accepted) == (True, [], ["near_gold", "constants"])
    strict = source.replace('example.output.lower() in (text or "").lower()', "(text or '').strip() == example.output")
    environment_folder(folder, strict)
    assert (await check(folder)).passed


class Host:
    """Fails when it is to `fail`: opens the episode 2, takes its turn, or scores."""

    def __init__(self, fail: str) -> None:
        self.fail = fail
        self.open_episodes: list[int] = []

    async def open(self, split: str, index: int) -> Any:
        self._fault("open", index)
        self.open_episodes.append(index)
        return SimpleNamespace(episode=index, max_turns=1, task_id=str(index), messages=[], is_agent=False)

    async def step(self, episode: int, *_: object) -> Any:
        self._fault("step", episode)
        return SimpleNamespace(messages=[], done=True)

    async def score(self, episode: int) -> None:
        self._fault("score", episode)
        self.open_episodes.remove(episode)

    async def close(self, episode: int) -> None:
        if episode in self.open_episodes:
            self.open_episodes.remove(episode)

    def _fault(self, method: str, episode: int) -> None:
        if (method, episode) == (self.fail, 2):
            raise EnvironmentFault("environment_error", "it failed")


@pytest.mark.parametrize("fail", ["open", "step", "score"])
async def test_a_fault_closes_all_episodes_that_are_played_at_once(fail: str) -> None:
    host: Any = Host(fail)
    with pytest.raises(EnvironmentFault):
        await playing.interleave(host, [(playing.Task("train", index), ["1"]) for index in range(4)])
    assert not host.open_episodes
