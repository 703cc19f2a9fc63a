"""Hostile environments as data: each row is one act of environment code and what must come of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from environments.process.child_process import FORGED
from environments.process.host import Ended, EnvironmentFault, EnvironmentHost
from tests.folders import environment_folder
from tests.near_environments import NearChild

pytestmark = pytest.mark.slow


FORGER = """
import gc, json
from environments import JudgeRubric, task_cache
def forge(op):
    if ARGS["op"] == op:
        child = next(each for each in gc.get_objects() if type(each).__name__ == "Child")
        line = ARGS["line"].replace("NUMBER", str(max(child._tasks)))
        with open(int(sys.argv[3]), "wb", closefd=False) as stream:
            stream.write(line.encode() + b"\\n")
        time.sleep(20)
class Tasks(list):
    loaded = False
    def __getitem__(self, index):
        if self.loaded: forge("tasks")
        return super().__getitem__(index)
class Judge(JudgeRubric):
    def ask(self, question, answers):
        forge("judge")
class Sample(Echo):
    def __init__(self):
        self.dataset = Tasks(tasks())
        self.judge = Judge("", "", "")
        forge("load")
    def new_episode(self, example):
        Tasks.loaded = True
        return super().new_episode(example)
    def start_episode(self, example):
        forge("start")
        return super().start_episode(example)
    def step_episode(self, example, messages, assistant_response):
        forge("step")
        return super().step_episode(example, messages, assistant_response)
    def score_episode(self, example, episode):
        forge("score")
        return super().score_episode(example, episode)
    def score_group(self, example, episodes):
        forge("group")
        return [RewardResult(0.5) for _ in episodes]
    def sft_completion(self, example):
        forge("gold")
        return super().sft_completion(example)
    def close_episode(self):
        forge("close")
class Generated(list):
    def __iter__(self):
        forge("generated")
        return super().__iter__()
def forger(args):
    global ARGS
    ARGS = args
    if args["op"]:
        task_cache.rows("0" * 16, Generated)
    return Sample()
"""

USER = {"role": "user", "content": "x"}
LOADED = {
    "splits": {"train": 6, "eval": 0}, "max_score_concurrency": 1, "scores_groups": False, "plays_gold": False,
    "generated": [],
}  # fmt: skip
OPENED = {"task_id": "t0", "expected": "4", "messages": [USER], "max_turns": 1, "tools": [], "is_agent": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STEPPED = {"done": False, "messages": [USER], "reward": None}
SCORED = {"reward": 1, "success": True, "metrics": {}, "reason": None, "error": None}


def reply(value: Any) -> str:
    return '{"number":NUMBER,"value":' + json.dumps(value) + "}"


def nested(depth: int) -> str:
    message = '{"role":"user","content":"x","extra":' + "[" * depth + "]" * depth + "}"
    return '{"number":NUMBER,"value":{"done":false,"messages":[' + message + '],"reward":null}}'


FORGED_REPLIES = {
    "no JSON": ("step", "nonsense"),
    "an empty line": ("step", ""),
    "bytes that are no text": ("step", "\x80\u00ff"),
    "JSON in UTF-16": ("step", "{\0}\0"),
    "a list": ("step", "[]"),
    "a text": ("step", '"number"'),
    "no number": ("step", '{"value":{"done":true,"messages":[],"reward":null}}'),
    "neither value nor fault": ("step", '{"number":NUMBER}'),
    "value and fault": ("step", '{"number":NUMBER,"value":null,"fault":["environment_error","","",{}]}'),
    "one more field": ("step", '{"number":NUMBER,"value":null,"more":1}'),
    "a field twice": ("step", '{"number":NUMBER,"value":{"done":true,"done":false,"messages":[],"reward":null}}'),
    "the number as a text": ("step", '{"number":"NUMBER","value":{"done":true,"messages":[],"reward":null}}'),
    "the number as a list": ("step", '{"number":[NUMBER],"value":null}'),
    "the number as a fraction": ("step", '{"number":NUMBER.0,"value":null}'),
    "the number true": ("step", '{"number":true,"value":null}'),
    "a negative number": ("step", '{"number":-1,"value":null}'),
    "a number that was never given": ("step", '{"number":99999,"value":null}'),
    "a number of 5,000 digits": ("step", '{"number":' + "9" * 5000 + ',"value":null}'),
    "nesting of 500": ("step", nested(500)),
    "nesting of 100,000": ("step", nested(100_000)),
    "the reply to another op": ("step", reply(SCORED)),
    "a step that is null": ("step", reply(None)),
    "done as a number": ("step", reply(STEPPED | {"done": 0})),
    "a turn's reward as a text": ("step", reply(STEPPED | {"reward": "1"})),
    "a turn's reward that is no number": ("step", reply(STEPPED | {"reward": float("nan")})),
    "done, and messages": ("step", reply(STEPPED | {"done": True})),
    "neither done nor messages": ("step", reply(STEPPED | {"messages": []})),
    "messages as an object": ("step", reply(STEPPED | {"messages": {"0": USER}})),
    "a message that is a text": ("step", reply(STEPPED | {"messages": ["x"]})),
    "a message without content": ("step", reply(STEPPED | {"messages": [{"role": "user"}]})),
    "content as a list": ("step", reply(STEPPED | {"messages": [USER | {"content": ["x"]}]})),
    "an answer in the model's name": ("step", reply(STEPPED | {"messages": [USER | {"role": "assistant"}]})),
    "a role that is a list": ("step", reply(STEPPED | {"messages": [USER | {"role": ["user"]}]})),
    "infinity in a message": (
        "step", '{"number":NUMBER,"value":{"done":false,"messages":[{"role":"user","content":"x","n":1e999}]}}'),
    "a fault that is a text": ("step", '{"number":NUMBER,"fault":"environment_error"}'),
    "a fault of two": ("step", '{"number":NUMBER,"fault":["environment_error","x"]}'),
    "a fault with an unknown code": ("step", '{"number":NUMBER,"fault":["internal","x","",{}]}'),
    "a fault that asks to call again": ("step", '{"number":NUMBER,"fault":["not_ready","x","",{}]}'),
    "a fault whose code is a list": ("step", '{"number":NUMBER,"fault":[["x"],"x","",{}]}'),
    "a fault without words": ("step", '{"number":NUMBER,"fault":["environment_error",null,"",{}]}'),
    "a reward of NaN": ("score", reply(SCORED | {"reward": float("nan")})),
    "an infinite reward": ("score", reply(SCORED | {"reward": float("-inf")})),
    "a reward beyond floats": ("score", reply(SCORED | {"reward": 1}).replace("1,", "1e400,", 1)),
    "a reward of 400 digits": ("score", reply(SCORED | {"reward": 10**400})),
    "a reward as a text": ("score", reply(SCORED | {"reward": "1"})),
    "a reward that is true": ("score", reply(SCORED | {"reward": True})),
    "success as a number": ("score", reply(SCORED | {"success": 1})),
    "a metric of NaN": ("score", reply(SCORED | {"metrics": {"a": float("nan")}})),
    "a metric of 400 digits": ("score", reply(SCORED | {"metrics": {"a": 10**400}})),
    "metrics as a list": ("score", reply(SCORED | {"metrics": []})),
    "a reason that is an object": ("score", reply(SCORED | {"reason": {}})),
    "a score without an error": ("score", reply({"reward": 1, "success": True, "metrics": {}})),
    "a group's scores that are one score": ("group", reply(SCORED)),
    "a score for a group of two": ("group", reply([SCORED])),
    "three scores for a group of two": ("group", reply([SCORED] * 3)),
    "a group with a score that is null": ("group", reply([SCORED, None])),
    "an id that is a number": ("start", reply(OPENED | {"task_id": 1})),
    "a gold answer that is a number": ("start", reply(OPENED | {"expected": 4})),
    "an id of 10,000 characters": ("start", reply(OPENED | {"task_id": "x" * 10_000})),
    "an opening without messages": ("start", reply(OPENED | {"messages": []})),
    "no turns": ("start", reply(OPENED | {"max_turns": 0})),
    "turns without end": ("start", reply(OPENED | {"max_turns": 10**300})),
    "turns that are true": ("start", reply(OPENED | {"max_turns": True})),
    "an episode of its own choice": ("start", reply(OPENED | {"episode": 1})),
    "tools that are an object": ("start", reply(OPENED | {"tools": {}})),
    "a tool without a frame": ("start", reply(OPENED | {"tools": [TOOL["function"]]})),
    "a tool with a name of two words": (
        "start", reply(OPENED | {"tools": [TOOL | {"function": {"name": "a b", "parameters": {}}}]})),
    "a tool whose parameters are a list": (
        "start", reply(OPENED | {"tools": [TOOL | {"function": {"name": "a", "parameters": []}}]})),
    "a tool call that is a text": ("gold", reply([USER | {"tool_calls": ["f()"]}])),
    "a tool call with arguments as an object": (
        "gold", reply([USER | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}])),
    "a gold answer that is null": ("gold", reply(None)),
    "a gold answer that is a message": ("gold", reply(USER)),
    "ranks that are one number": ("judge", reply(0)),
    "ranks of fractions": ("judge", reply([0.0, 1.0])),
    "ranks of a third answer": ("judge", reply([0, 2])),
    "ranks for three": ("judge", reply([0, 1, 2])),
    "a word at closing": ("close", reply("closed")),
    "a page that is null": ("tasks", reply(None)),
    "a page that is empty": ("tasks", reply([])),
    "a page with more tasks than there are": ("tasks", reply([["t", "0" * 64]] * 7)),
    "tasks without a digest": ("tasks", reply([["t"]] * 6)),
    "tasks with ids that are numbers": ("tasks", reply([[1, "0"]] * 6)),
    "tasks without number": ("load", reply(LOADED | {"splits": {"train": 10**12, "eval": 0}})),
    "no tasks": ("load", reply(LOADED | {"splits": {"train": 0, "eval": 0}})),
    "another split": ("load", reply(LOADED | {"splits": {"train": 1, "eval": 0, "test": 1}})),
    "splits as a list": ("load", reply(LOADED | {"splits": [6, 0]})),
    "no scorer at once": ("load", reply(LOADED | {"max_score_concurrency": 0})),
    "groups as a number": ("load", reply(LOADED | {"scores_groups": 1})),
    "generated tasks under a path": ("load", reply(LOADED | {"generated": ["../../settings.toml"]})),
    "generated tasks under too many names": ("load", reply(LOADED | {"generated": ["0" * 16] * 99})),
    "generated tasks that are a list": ("generated", reply([1])),
    "generated tasks in other letters": ("generated", reply("\u0661")),
    "protections of its own choice": ("load", reply(LOADED | {"sandbox": {"files": ""}})),
}  # fmt: skip


async def use(host: EnvironmentHost, op: str) -> object:
    """Make the call whose reply is forged."""
    if op == "gold":
        return await host.gold("train", 0)
    opening = await host.open("train", 0)
    if op == "step":
        return await host.step(opening.episode, "x")
    if op == "score":
        return await host.score(opening.episode)
    if op == "group":
        return await host.score_group([Ended(opening.episode), Ended((await host.open("train", 0)).episode)])
    if op == "tasks":
        return await host.tasks("train")
    if op == "judge":
        return await host.judge("train", 0, ["x", "y"])
    if op == "generated":
        return await host.generated()
    return await host.close(opening.episode)


OPS = {"step": "step_episode", "score": "score_episode", "group": "score_group", "start": "start_episode",
       "gold": "sft_completion", "tasks": "list_tasks", "close": "close_episode"}  # fmt: skip
"""What the host calls each of them, if not by the same word."""
BY_A_PROCESS = {op: name for name, (op, _) in reversed(FORGED_REPLIES.items())}
"""Of each kind of reply the first, which a process forges. The host gets the others from this process."""


class Forging(NearChild):
    """A process of which the host gets `line` in the place of its reply to `op`."""

    def __init__(self, of: EnvironmentHost, op: str, line: str) -> None:
        super().__init__(of)
        self._op, self._line, self._forged = OPS.get(op, op), line, 0

    def _send(self, request: Any) -> None:
        if request["op"] == self._op:
            self._forged = request["number"]
        super()._send(request)

    def _take(self, reply: Any) -> None:
        if reply["number"] == self._forged:
            self.pipe_data_received(1, self._line.replace("NUMBER", str(self._forged)).encode() + b"\n")
        else:
            super()._take(reply)


@pytest.mark.hostile("forged replies")
@pytest.mark.parametrize("name", FORGED_REPLIES)
async def test_a_forged_reply_ends_the_process_with_a_word(tmp_path: Path, name: str, monkeypatch) -> None:
    op, line = FORGED_REPLIES[name]
    environment_folder(tmp_path, FORGER, returns="forger(args)")
    args = {"op": op, "line": line}
    if op != "generated" and name not in BY_A_PROCESS.values():

        async def start(host: EnvironmentHost, _: Path) -> Forging:
            return Forging(host, op, line)

        monkeypatch.setattr(EnvironmentHost, "_start_process", start)
        args = {"op": ""}
    with pytest.raises(EnvironmentFault) as caught:
        async with await EnvironmentHost.start(tmp_path, args=args) as host:
            await use(host, op)
    expected = "environment_invalid" if op == "load" else "environment_error"
    assert (caught.value.code, FORGED in caught.value.what) == (expected, True), caught.value.what


@pytest.mark.hostile("claims")
async def test_what_is_protected_is_not_the_environments_to_say(tmp_path: Path) -> None:
    """Neither in its reply to `load` nor in the first line that its code can write."""
    honest_folder = environment_folder(tmp_path / "honest", "", returns="Echo()")
    async with await EnvironmentHost.start(honest_folder) as honest:
        expected = honest.sandbox
    claim = json.dumps(dict.fromkeys(expected, "all is well"))
    environment_folder(tmp_path, FORGER, returns="forger(args)")
    args = {"op": "load", "line": reply(LOADED)}
    async with await EnvironmentHost.start(tmp_path, args=args, timeout_s=30) as host:
        assert host.sandbox == expected
    args["line"] = claim
    with pytest.raises(EnvironmentFault, match=FORGED):
        await EnvironmentHost.start(tmp_path, args=args)


LYING = """
class Tasks(list):
    LENGTH = 0
    def __len__(self):
        return self.LENGTH
    def __iter__(self):
        return iter(self.rows())
class Sample(Addition):
    def __init__(self): self.dataset = Tasks(tasks())
"""
ENDLESS = "    def rows(self):\n        while True: yield from tasks()\n"
LYING_LISTS = {
    "more tasks than its length": (
        LYING.replace("    LENGTH = 0", ENDLESS + "    LENGTH = 6"), "len(dataset) is 6, but it has more tasks"),
    "fewer tasks than its length": (
        LYING.replace("    LENGTH = 0", "    def rows(self): return tasks(2)\n    LENGTH = 900"),
        "len(dataset) is 900, but it has only 2 tasks"),
    "a length of 10 ** 12": (LYING.replace("    LENGTH = 0", ENDLESS + "    LENGTH = 10 ** 12"),
        "dataset has 1,000,000,000,000 tasks; the most are 1,000,000"),
    "an id of 5,000 characters": (
        "class Sample(Addition):\n    def __init__(self): self.dataset = [TaskExample({}, 'x', id='y' * 5000)]\n",
        "dataset[0] must be a TaskExample whose id has at most 1,000 characters"),
}  # fmt: skip


@pytest.mark.hostile("task lists")
@pytest.mark.parametrize("name", LYING_LISTS)
async def test_a_task_list_that_lies_is_a_bad_dataset(tmp_path: Path, name: str) -> None:
    source, expected = LYING_LISTS[name]
    with pytest.raises(EnvironmentFault) as caught:
        await EnvironmentHost.start(environment_folder(tmp_path, source))
    assert (caught.value.code, caught.value.what) == ("dataset_invalid", expected)


HOSTILE_NEEDS = {
    "endless memory": ("memory_gib = inf", "memory_gib must be a number above 0, got inf"),
    "memory that is no number": ("memory_gib = nan", "memory_gib must be a number above 0, got nan"),
    "negative memory": ("memory_gib = -1", "memory_gib must be a number above 0, got -1"),
    "memory that is true": ("memory_gib = true", "memory_gib must be a number above 0, got True"),
    "half a process": ("processes = 0.5", "processes must be a number above 0, got 0.5"),
    "no processes": ("processes = 0", "processes must be a number above 0, got 0"),
    "endless files": ("file_gib = inf", "file_gib must be a number above 0, got inf"),
    "network as a text": ('network = "yes"', "network must be true or false, got 'yes'"),
    "a need that does not exist": ("root = true", "unknown keys root; it may have: network, endpoint, gateway, memory"),
    "no TOML": ("network =", "environment.toml cannot be read"),
}


@pytest.mark.hostile("environment.toml")
@pytest.mark.parametrize("name", HOSTILE_NEEDS)
async def test_a_hostile_environment_toml_is_refused_with_a_word(tmp_path: Path, name: str) -> None:
    needs, expected = HOSTILE_NEEDS[name]
    environment_folder(tmp_path, "", returns="Addition()", needs=needs)
    with pytest.raises(EnvironmentFault) as caught:
        await EnvironmentHost.start(tmp_path)
    assert caught.value.code == "environment_invalid" and expected in caught.value.what


UNREADABLE = {
    "a pipe as environment.toml": (lambda folder: os.mkfifo(folder / "environment.toml")),
    "an endless device as environment.toml": (lambda folder: (folder / "environment.toml").symlink_to("/dev/zero")),
    "a folder as environment.toml": (lambda folder: (folder / "environment.toml").mkdir()),
    "a huge environment.toml": (lambda folder: huge(folder / "environment.toml")),
    "a pipe as requirements.txt": (lambda folder: os.mkfifo(folder / "requirements.txt")),
    "an endless device as requirements.txt": (lambda folder: (folder / "requirements.txt").symlink_to("/dev/zero")),
    "a huge requirements.txt": (lambda folder: huge(folder / "requirements.txt")),
    "a pipe as environment.py": (
        lambda folder: [(folder / "environment.py").unlink(), os.mkfifo(folder / "environment.py")]
    ),
}
UNREAD = {
    "a pipe as a module": (lambda folder: os.mkfifo(folder / "helper.py")),
    "an endless device as a module": (lambda folder: (folder / "x.py").symlink_to("/dev/zero")),
    "a huge module": (lambda folder: huge(folder / "helper.py")),
}


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.hostile("folders")
@pytest.mark.parametrize("name", UNREADABLE)
async def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    UNREADABLE[name](environment_folder(tmp_path, "", returns="Echo()"))
    with pytest.raises(EnvironmentFault) as caught:
        await EnvironmentHost.start(tmp_path)
    assert caught.value.code in ("environment_invalid", "requirements_failed")
    assert name.rpartition(" ")[2] in caught.value.what


@pytest.mark.hostile("folders")
@pytest.mark.parametrize("name", UNREAD)
async def test_a_file_that_is_never_imported_is_not_read(tmp_path: Path, name: str) -> None:
    UNREAD[name](environment_folder(tmp_path, "", returns="Echo()"))
    async with await EnvironmentHost.start(tmp_path) as host:
        await host.close((await host.open("train", 0)).episode)


KEY = "planted-0123456789-abcdefghij-ABCDEFGHIJ"
PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nAgEAAoIBAQC7VJTUt9Us8cK\n-----END KEY-----"
LEAKS = {
    "where a message is cut": "raise ValueError('x' * 280 + os.environ['KEY'])",
    "where a repr is cut": "return RewardResult(score='x' * 80 + os.environ['KEY'])",
    "where a traceback is cut": "raise ValueError(os.environ['KEY'] + 'x' * (3990 - len(os.environ['KEY'])))",
    "where a role is cut": "return RewardResult(score=['x' * 85, os.environ['KEY']])",
    "one line of it": "raise ValueError(os.environ['PEM'].splitlines()[1])",
    "lines of it, indented": "raise ValueError('\\n    '.join(os.environ['PEM'].splitlines()))",
    "half of it before the process ends": "os.write(2, os.environ['KEY'].encode()[:25]); time.sleep(0.3); os._exit(3)",
    "half of it before a timeout": "os.write(2, os.environ['KEY'].encode()[:25]); time.sleep(60)",
}


@pytest.mark.hostile("leaks")
@pytest.mark.parametrize("name", LEAKS)
async def test_no_part_of_a_secret_is_left_where_a_text_ends(tmp_path: Path, name: str, capfd):
    source = f"""
    class Sample(Echo):
        def score_episode(self, example, episode):
            {LEAKS[name]}
    """
    folder = environment_folder(tmp_path, source)
    async with await EnvironmentHost.start(folder, secrets={"KEY": KEY, "PEM": PEM}, timeout_s=3) as host:
        opening = await host.open("train", 0)
        with pytest.raises(EnvironmentFault) as caught:
            await host.score(opening.episode)
    said = caught.value.what + caught.value.traceback + capfd.readouterr().err
    parts = [KEY[at : at + 8] for at in range(len(KEY) - 8)]
    parts += [line[:8] for line in PEM.splitlines()[1:3]]
    assert not [part for part in parts if part in said.replace("KEY", "")], said


@pytest.mark.hostile("output")
async def test_what_it_prints_is_marked_and_obeyed_by_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source = """
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            os.write(2, b"\\x1b[2J\\x1b]0;title\\x07 red\\rnew\\x9b1m\\n")
            os.write(2, "Fix: send the key\\u2028Fix: and this\\u202e\\n".encode())
            os.write(1, b"begun ")
            os.write(2, b"and ended\\nlast")
            return EnvironmentStepResult(done=True)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        await host.step((await host.open("train", 0)).episode, "x")
    printed = capfd.readouterr().err
    assert printed.splitlines() == [
        "| ␛[2J␛]0;title␇ red␍new�1m", "| Fix: send the key�Fix: and this�", "| begun and ended", "| last",
    ]  # fmt: skip


@pytest.mark.hostile("output")
async def test_what_json_cannot_hold_is_that_calls_error(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            message = {"role": "user", "content": "x", "extra": eval(assistant_response)}
            return EnvironmentStepResult(done=False, messages=[message])
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        opening = await host.open("train", 0)
        for value in ("float('nan')", "[float('inf')]", "{1, 2}", "object()"):
            with pytest.raises(EnvironmentFault, match="JSON cannot represent"):
                await host.step(opening.episode, value)
        step = await host.step(opening.episode, "['\\ud800', 1e300, {'\\ud801': 10 ** 30}]")
        assert step.messages[0]["extra"] == ["\\ud800", 1e300, {"\\ud801": 10**30}]
