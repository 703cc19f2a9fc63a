"""EnvironmentHost over real child processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest

from environments.checks.splits import overlap
from environments.faults import remedy
from environments.process.host import Ended, EnvironmentFault, EnvironmentHost
from tests.folders import allow, environment_folder
from tests.waiting import until
from tests.watch import is_running, outer_pid

pytestmark = pytest.mark.slow


async def fault_of(awaitable) -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        await awaitable
    return caught.value


async def children_of(folder: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(str(folder) in word for word in child.cmdline()):
                found.append(child)
    return found


async def test_an_episode_is_opened_stepped_and_scored(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        def score_episode(self, example, episode):
            roles = [message["role"] for message in episode.messages]
            turns = episode.messages[episode.prompt_length:]
            metrics = [RewardMetric("turns", len(turns)), RewardMetric("said", True),
                       RewardMetric("empty", None), RewardMetric("unmeasured", float("nan"))]
            reason = f"{roles} {episode.response_text} {episode.latency_ms} {episode.total_tokens}"
            return RewardResult(score=0.25, success=True, metrics=metrics, reason=reason)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        opening = await host.open("train", 2)
        assert (opening.task_id, opening.max_turns, opening.group) == ("t2", 3, "sums")
        assert opening.messages == [{"role": "user", "content": "Add 2 and 3."}]
        step = await host.step(opening.episode, "five")
        assert (step.done, step.messages) == (False, [{"role": "user", "content": "five!"}])
        await host.step(opening.episode, "six")
        score = await host.score(opening.episode, latency_ms=12, total_tokens=34)
        assert (score.reward, score.success, score.error) == (0.25, True, None)
        assert score.metrics == {"turns": 4.0, "said": 1.0}
        assert score.reason == "['user', 'assistant', 'user', 'assistant', 'user'] six 12 34"
        assert (await fault_of(host.step(opening.episode, "late"))).what.endswith("is not open")


GROUPED = """
    class Sample(Echo):
        closed = []
        async def step_episode(self, example, messages, assistant_response):
            return EnvironmentStepResult(metadata={{"seen": assistant_response}})
        def close_episode(self): Sample.closed.append(1)
        def score_group(self, example, episodes):
            {statement}
"""


async def test_the_episodes_of_a_task_are_scored_together_and_closed(tmp_path: Path) -> None:
    statement = """
            said = sorted((episode.response_text for episode in episodes), key=len)
            seen = [episode.metadata["seen"] for episode in episodes]
            facts = [(episode.latency_ms, episode.total_tokens) for episode in episodes]
            drawn = random.random()
            return [RewardResult(score=said.index(text) / 2, reason=f"{facts} {drawn}") for text in seen]
    """
    folder = environment_folder(tmp_path, GROUPED.format(statement=statement))
    async with await EnvironmentHost.start(folder) as host:
        assert host.scores_groups
        drawn: set[str | None] = set()
        for _ in range(2):
            openings = [await host.open("train", 3) for _ in range(3)]
            for opening, text in zip(openings, ["bb", "ccc", "a"], strict=True):
                assert (await host.step(opening.episode, text)).done
            ended = [Ended(opening.episode, at, 10 * at) for at, opening in enumerate(openings)]
            scores = await host.score_group(ended)
            assert [score.reward for score in scores] == [0.5, 1.0, 0.0]
            assert [score.success for score in scores] == [False, True, False]
            drawn.update(score.reason for score in scores)
        (reason,) = drawn  # what a scorer draws depends on the task alone
        assert str(reason).startswith("[(0, 0), (1, 10), (2, 20)] 0.")
        assert "is not open" in (await fault_of(host.step(openings[0].episode, "late"))).what


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("return [RewardResult(1.0)]", "a list of 2 RewardResults, one for each episode, got 1"),
        ("return [RewardResult(1.0)] * 3", "one for each episode, got 3"),
        ("return RewardResult(1.0)", "one for each episode, got RewardResult"),
        ("return None", "one for each episode, got None"),
        ("return [RewardResult(1.0), 0.5]", "a list of 2 RewardResults, got float 0.5"),
        ("return [RewardResult(1.0), RewardResult(None)]", "must be a finite number, got None"),
        ("raise KeyError('rank')", "score_group raised KeyError: 'rank'"),
        ("time.sleep(60)", "score_group took longer than 2 s"),
    ],
)
@pytest.mark.usefixtures("in_this_process")
async def test_a_group_that_is_scored_wrongly_is_refused_with_a_word(tmp_path: Path, statement: str, expected: str):
    folder = environment_folder(tmp_path, GROUPED.format(statement=statement))
    async with await EnvironmentHost.start(folder, timeout_s=2) as host:
        openings = [await host.open("train", 0) for _ in range(2)]
        ended = [Ended(opening.episode) for opening in openings]
        fault = await fault_of(host.score_group(ended))
        code = "environment_timeout" if "took longer" in expected else "environment_error"
        assert (fault.code, expected in fault.what) == (code, True), fault.what
        for opening in openings:
            assert "is not open" in (await fault_of(host.step(opening.episode, "late"))).what


async def test_a_group_has_one_task_and_one_process(tmp_path: Path) -> None:
    statement = "return [RewardResult(1.0) for _ in episodes]"
    folder = environment_folder(tmp_path, GROUPED.format(statement=statement))
    async with await EnvironmentHost.start(folder) as host:
        mixed = [Ended((await host.open("train", index)).episode) for index in (0, 1)]
        fault = await fault_of(host.score_group(mixed))
        assert "must belong to one task" in fault.what
        first = await host.open("train", 0)
        host._children[-1].retiring = True  # as after a call that did not end
        second = await host.open("train", 0)
        fault = await fault_of(host.score_group([Ended(first.episode), Ended(second.episode)]))
        assert fault.code == "environment_error" and "in one process" in fault.what
        assert (await host.score(second.episode)).reward == 0.5  # it is still open


async def test_a_group_may_be_of_a_task_that_is_built_on_access(tmp_path: Path) -> None:
    statement = "return [RewardResult(1.0) for _ in episodes]"
    source = """
    class Tasks(list):
        def __getitem__(self, index): return dataclasses.replace(super().__getitem__(index))
    class Building(Sample):
        def __init__(self): self.dataset = Tasks(tasks())
    """
    folder = environment_folder(tmp_path, GROUPED.format(statement=statement) + source, returns="Building()")
    async with await EnvironmentHost.start(folder) as host:
        ended = [Ended((await host.open("train", 0)).episode) for _ in range(2)]
        assert [score.reward for score in await host.score_group(ended)] == [1.0, 1.0]


async def test_more_tasks_are_listed_than_fit_into_one_reply(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def __init__(self):
            self.dataset, self.eval_dataset = tasks(130_000), tasks(3)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        assert [task_id for task_id, _ in await host.tasks("train")] == [f"t{n}" for n in range(130_000)]
        assert len(await host.tasks("eval")) == 3


async def test_splits_tasks_and_gold_answers_are_known(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(environment_folder(tmp_path, "", returns="Addition()")) as host:
        assert host.splits == {"train": 6, "eval": 4}
        assert [task_id for task_id, _ in await host.tasks("eval")] == ["t100", "t101", "t102", "t103"]
        assert await host.gold("eval", 0) == [{"role": "assistant", "content": "201"}]
        assert "train has 6 tasks, eval has 4 tasks" in (await fault_of(host.open("train", 6))).what


async def test_tasks_differ_by_all_of_a_gold_answer_that_is_no_json(tmp_path: Path) -> None:
    source = """
    class Gold:
        pass
    class Sample(Echo):
        def __init__(self):
            golds = [{"a" * 200}, {"a" * 200 + "b"}, Gold(), Gold()]
            self.dataset = [TaskExample({}, "Guess.", output=gold) for gold in golds]
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        one, longer, *same = [digest for _, digest in await host.tasks("train")]
    assert one != longer and len(set(same)) == 1


async def test_eval_tasks_are_found_that_are_train_tasks_in_other_words(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def __init__(self):
            asked = [f"What is {n} pears and {n + 1} plums, in fruits?" for n in range(10)]
            said = [asked[0].upper(), "Hello! " + asked[1], asked[2].replace("3", "4"), *asked[7:9]]
            golds = [str(2 * n + 1) for n in (0, 1, 2, 7, 8)]
            self.dataset = [TaskExample({}, text, output=str(2 * n + 1)) for n, text in enumerate(asked)]
            self.eval_dataset = [TaskExample({}, text, output=gold) for text, gold in zip(said, golds)]
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        assert await host.reworded() == [(1, 1)]
        found = await overlap(host)
    assert (len(found.same_question), len(found.reworded), found.shared) == (3, 1, 4)
    assert "; 1 are a train task in other words, e.g. train" in str(found)


async def test_coroutine_methods_run_as_they_are(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        async def build_prompt_messages(self, example): return []
        async def start_episode(self, example):
            await asyncio.sleep(0)
            return [{"role": "user", "content": "asynchronously"}]
        async def max_episode_turns(self, example): return 2
        async def step_episode(self, example, messages, assistant_response):
            return EnvironmentStepResult(done=True, final_response_text="final")
        async def score_episode(self, example, episode):
            return RewardResult(score=1, success=episode.response_text == "final")
        async def sft_completion(self, example): return [{"role": "assistant", "content": "gold"}]
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        opening = await host.open("train", 0)
        assert (opening.messages[0]["content"], opening.max_turns) == ("asynchronously", 2)
        assert (await host.step(opening.episode, "x")).done and (await host.score(opening.episode)).success
        assert await host.gold("train", 0) == [{"role": "assistant", "content": "gold"}]


@pytest.mark.parametrize("together", [False, True])
async def test_the_rewards_of_turns_are_part_of_the_score(tmp_path: Path, together: bool) -> None:
    """Also where the score is that of a group."""
    source = """
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            reward = None if assistant_response == "no" else float(assistant_response)
            return EnvironmentStepResult(False, [{"role": "user", "content": "on"}], reward=reward)
        def score_episode(self, example, episode): return RewardResult(1.0)
        def score_group(self, example, episodes): return [RewardResult(1.0) for _ in episodes]
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        episodes = [(await host.open("train", 0)).episode for _ in range(2)]
        played = zip(episodes, (["0.5", "no", "-0.25"], ["no", "no"]), strict=True)
        rewards = [[(await host.step(e, text)).reward for text in texts] for e, texts in played]
        assert rewards == [[0.5, None, -0.25], [None, None]]
        if together:
            scores = await host.score_group([Ended(episode) for episode in episodes])
        else:
            scores = [await host.score(episode) for episode in episodes]
        assert [(score.reward, score.success) for score in scores] == [(1.25, True), (1.0, True)]
        assert [score.metrics for score in scores] == [{"turn_rewards": 0.25}, {}]


async def test_each_episode_has_state_of_its_own_and_is_closed_once(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        closed = []
        def start_episode(self, example):
            self.said = []
            return [{"role": "user", "content": str(len(Sample.closed))}]
        def step_episode(self, example, messages, assistant_response):
            self.said.append(assistant_response)
            return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": " ".join(self.said)}])
        def score_episode(self, example, episode): raise ValueError("no score")
        def close_episode(self): Sample.closed.append(self.said)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        one, other = await host.open("train", 0), await host.open("train", 0)
        await host.step(one.episode, "a")
        await host.step(other.episode, "b")
        assert (await host.step(one.episode, "c")).messages[0]["content"] == "a c"
        assert "no score" in (await fault_of(host.score(one.episode))).what
        await host.close(other.episode)
        await host.close(other.episode)
        assert (await host.open("train", 0)).messages[0]["content"] == "2"


SIGNALS = """
    import signal
    class Sample(Echo):
        max_score_concurrency = {most}
        def score_episode(self, example, episode):
            signal.signal(signal.SIGALRM, lambda *_: None)
            return RewardResult(1.0)
"""


@pytest.mark.parametrize("coroutine", [False, True])
async def test_scores_one_at_a_time_may_use_signals_and_so_may_loading(tmp_path: Path, coroutine: bool) -> None:
    source = SIGNALS.format(most=1) + "\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    if coroutine:
        source = source.replace("def score_episode", "async def score_episode")
        source = source.replace("return RewardResult", "await asyncio.sleep(0); return RewardResult")
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        openings = [await host.open("train", 0) for _ in range(4)]
        scores = await asyncio.gather(*(host.score(opening.episode) for opening in openings))
        assert [score.reward for score in scores] == [1.0] * 4


AGENT_ON_MAIN = """
    import signal
    from environments import EnvironmentAgent
    class Sample(EnvironmentAgent):
        main_thread = True
        def __init__(self):
            self.dataset = tasks(2)
        async def run(self, example, base_url, api_key, model):
            signal.signal(signal.SIGALRM, lambda *_: None)
            if example.id == "t1":
                raise SystemExit(3)
            await asyncio.sleep(1000)
"""


async def test_an_agent_on_the_main_thread_can_be_ended_and_end(tmp_path: Path) -> None:
    folder = environment_folder(tmp_path, AGENT_ON_MAIN, needs="endpoint = true")
    async with await EnvironmentHost.start(folder, timeout_s=1.0) as host:
        assert (await fault_of(host.open("train", 0))).code == "environment_timeout"
        assert "SystemExit" in (await fault_of(host.open("train", 1))).what
        assert (await fault_of(host.open("train", 0))).code == "environment_timeout"


@pytest.mark.parametrize(
    "library_says",
    ["", "'parse' doesn't support threaded environment due to usage of signal.alarm()"],
    ids=["python", "math-verify"],
)
async def test_signals_in_other_threads_are_explained(tmp_path: Path, library_says: str) -> None:
    source = SIGNALS.format(most=32)
    if library_says:
        source = source.replace("signal.signal(signal.SIGALRM, lambda *_: None)", f"raise ValueError({library_says!r})")
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        fault = await fault_of(host.score((await host.open("train", 0)).episode))
        assert (library_says or "signal only works in main thread") in fault.what
        assert "max_score_concurrency = 1" in (remedy(fault) or "")


async def test_thirty_two_calls_run_at_once(tmp_path: Path) -> None:
    source = """
    import threading
    all_are_here = threading.Barrier(32)
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            all_are_here.wait(100)
            return EnvironmentStepResult(done=True)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source), concurrency=32) as host:
        openings = [await host.open("train", 0) for _ in range(32)]
        steps = await asyncio.gather(*(host.step(opening.episode, "x") for opening in openings))
        assert all(step.done for step in steps)


@pytest.mark.parametrize(
    ("concurrency", "score_concurrency", "most_steps", "most_scores"), [(4, 32, 4, 4), (8, 1, 8, 1)]
)
async def test_calls_under_way_stay_within_their_bounds(
    tmp_path: Path, concurrency: int, score_concurrency: int, most_steps: int, most_scores: int
) -> None:
    source = f"""
    import threading
    class Gauge:
        lock, now, most = threading.Lock(), 0, 0
        def measure(self):
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(0.06)
            with self.lock: self.now -= 1
            return self.most
    steps, scores = Gauge(), Gauge()
    class Sample(Echo):
        max_score_concurrency = {score_concurrency}
        def step_episode(self, example, messages, assistant_response):
            steps.measure()
            return EnvironmentStepResult(done=True)
        def score_episode(self, example, episode):
            return RewardResult(score=scores.measure(), metrics=[RewardMetric("steps", steps.most)])
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source), concurrency=concurrency) as host:

        async def play() -> tuple[float, float]:
            opening = await host.open("train", 0)
            await host.step(opening.episode, "x")
            score = await host.score(opening.episode)
            return score.reward, score.metrics["steps"]

        played = await asyncio.gather(*(play() for _ in range(24)))
        assert max(reward for reward, _ in played) == most_scores and max(steps for _, steps in played) <= most_steps


JUDGES = """
    from environments import EnvironmentAgent, JudgeRubric
    class Judge(JudgeRubric):
        def ask(self, question, answers): return list(range(len(answers)))
    class OfTheClass(Echo):
        judge = Judge("", "", "")
    class Replaced(OfTheClass):
        judge = None
    class Agent(EnvironmentAgent):
        def __init__(self):
            self.dataset, self.judge = tasks(), Judge("", "", "")
        def run(self, example, base_url, api_key, model): pass
"""


@pytest.mark.parametrize(("name", "ranks"), [("OfTheClass", [0, 1]), ("Replaced", None), ("Agent", [0, 1])])
async def test_the_judge_of_a_class_or_an_agent_is_asked_too(tmp_path: Path, name: str, ranks: list[int] | None):
    folder = environment_folder(tmp_path, JUDGES, returns=f"{name}()", needs="endpoint = true")
    async with await EnvironmentHost.start(folder) as host:
        assert await host.judge("train", 0, ["x", "y"]) == ranks


NLTK_SAYS = "\\n***\\n  Resource \\x1b[93mwords\\x1b[0m not found.\\n  >>> nltk.download('words')\\n"
ODD_STEP = "lambda self, action: ('left', 'Invalid move', True, {})"
MISBEHAVIOUR = {
    f'raise LookupError("{NLTK_SAYS}")': "nltk_data NAME",
    f"__import__('environments.adapters.gym').adapters.gym._step(type('Odd', (), {{'step': {ODD_STEP}}})(), 'go')":
        "returns a number",
    "raise ValueError('no such word')": "step_episode raised ValueError: no such word (environment.py line",
    "raise type('Odd', (Exception,), {'__str__': lambda self: 1})()": "step_episode raised Odd: its message could not",
    "raise SystemExit(3)": "step_episode raised SystemExit: 3",
    "next(iter([]))": "step_episode raised StopIteration",
    "return None": "step_episode must return an EnvironmentStepResult, got None",
    "return EnvironmentStepResult(done=False)": "done=False without messages",
    "return EnvironmentStepResult(done=False, messages='hello')": "must return a list of messages, got str 'hello'",
    "return EnvironmentStepResult(done=False, messages=['hello'])": "a message of step_episode must be a dict",
    "return EnvironmentStepResult(done=False, messages=[{'role': 'bot', 'content': ''}])": "has role 'bot'",
    "return EnvironmentStepResult(done=False, messages=[{'role': 'user', 'content': 3}])": "a string, got int 3",
    "return EnvironmentStepResult(done=True, reward='1')": "step_episode's reward must be a finite number, got '1'",
    "return EnvironmentStepResult(done=True, reward=float('nan'))": "a finite number, got nan",
    "return EnvironmentStepResult(done=True, reward=-1e7)": "got -10000000.0; it may be at most 1,000,000 in size",
    "return EnvironmentStepResult(done=True, metadata=None)": "using what step_episode returned raised TypeError",
}  # fmt: skip


@pytest.mark.parametrize(("statement", "expected"), MISBEHAVIOUR.items())
@pytest.mark.usefixtures("in_this_process")
async def test_what_step_episode_must_not_do_is_explained(tmp_path: Path, statement: str, expected: str) -> None:
    source = f"""
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            {statement}
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        opening = await host.open("train", 0)
        fault = await fault_of(host.step(opening.episode, "x"))
        assert fault.code == "environment_error" and expected in f"{fault.what} {remedy(fault)}"
        assert (await host.score(opening.episode)).reward == 0.5


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("RewardResult(score=float('nan'))", "the score must be a finite number, got nan"),
        ("RewardResult(score=float('inf'))", "the score must be a finite number, got inf"),
        ("RewardResult(score=1e308)", "the score must be a finite number, got 1e+308; it may be at most 1,000,000"),
        ("RewardResult(score=10**400)", "at most 1,000,000 in size"),
        ("RewardResult(score=1, metrics=[RewardMetric('a', -2e6)])",
            "metric 'a' must be a finite number, got -2000000.0"),
        ("RewardResult(score='1')", "the score must be a finite number, got '1'"),
        ("RewardResult(score=None)", "the score must be a finite number, got None"),
        ("1.0", "score_episode must return a RewardResult, got float 1.0"),
        ("RewardResult(score=1, metrics=[('a', 1)])",
            "the metrics must be a list of RewardMetric, got list [('a', 1)]"),
        ("RewardResult(score=1, metrics=None)", "the metrics must be a list of RewardMetric, got None"),
        ("RewardResult(score=1, reason=type('R', (), {'__str__': lambda self: 1 / 0})())",
            "using what score_episode returned raised ZeroDivisionError"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("in_this_process")
async def test_a_score_that_is_none_is_explained(tmp_path: Path, result: str, expected: str) -> None:
    source = f"""
    class Sample(Echo):
        def score_episode(self, example, episode): return {result}
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        fault = await fault_of(host.score((await host.open("train", 0)).episode))
        assert (fault.code, expected in fault.what) == ("environment_error", True), fault.what


async def test_what_user_code_prints_disturbs_nothing_and_goes_to_stderr(tmp_path: Path, capfd) -> None:
    source = """
    print("while loading")
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            print('{"number": 1, "value": "forged"}', flush=True)
            os.system("echo from a shell")
            os.write(1, b"raw bytes\\n")
            assert sys.stdin.read() == ""
            return EnvironmentStepResult(done=True)
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        assert (await host.step((await host.open("train", 0)).episode, "x")).done
    out, err = capfd.readouterr()
    assert out == "" and all(text in err for text in ("while loading", "forged", "from a shell", "raw bytes"))


async def test_text_that_utf8_cannot_hold_is_replaced(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(environment_folder(tmp_path, "", returns="Echo()")) as host:
        opening = await host.open("train", 0)
        assert (await host.step(opening.episode, "\ud800 \x00 é\n")).messages[0]["content"] == "? \x00 é\n!"


STUCK = """
class Sample(Echo):
    def step_episode(self, example, messages, assistant_response):
        if assistant_response == "hang":
            open(os.path.join(os.environ["HOME"], "hanging"), "w").close()
            time.sleep(1000)
        if assistant_response == "die": os._exit(3)
        if assistant_response == "real-time": os.kill(os.getpid(), 40)
        if assistant_response == "crash": __import__("ctypes").string_at(0)
        if assistant_response == "hold": re.match("(a+)+$", "a" * 40 + "b")
        return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": str(os.getpid())}])
"""


async def pid_of(host: EnvironmentHost, episode: int) -> int:
    """The process that the environment answers with, as we see it."""
    inner = int((await host.step(episode, "x")).messages[0]["content"])
    return outer_pid(host._home(episode)._transport.get_pid(), inner)


async def test_hung_calls_starve_nobody_and_their_process_ends_with_its_last_episode(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(environment_folder(tmp_path, STUCK), concurrency=4, timeout_s=3) as host:
        bystander = await host.open("train", 1)
        first_pid = await pid_of(host, bystander.episode)
        hung = [await host.open("train", 0) for _ in range(8)]
        faults = await asyncio.gather(*(fault_of(host.step(opening.episode, "hang")) for opening in hung))
        assert {fault.code for fault in faults} == {"environment_timeout"}
        assert any("with 3 more calls under way in its process" in fault.what for fault in faults)
        assert all(fault.what.startswith("step_episode took longer than 3 s") for fault in faults)
        assert all("time.sleep(1000)" in fault.traceback for fault in faults)
        assert await pid_of(host, bystander.episode) == first_pid
        newer = await host.open("train", 2)
        assert await pid_of(host, newer.episode) != first_pid
        for opening in hung:
            await host.close(opening.episode)
        assert is_running(first_pid) and (await host.score(bystander.episode)).reward == 0.5
        await until(lambda: not is_running(first_pid))
        assert await pid_of(host, newer.episode)


async def test_a_hung_coroutine_is_cancelled_and_costs_no_process(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        async def step_episode(self, example, messages, assistant_response):
            if assistant_response == "hang": await asyncio.sleep(1000)
            return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": str(os.getpid())}])
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source), timeout_s=3) as host:
        opening = await host.open("train", 0)
        pid = await pid_of(host, opening.episode)
        fault = await fault_of(host.step(opening.episode, "hang"))
        assert (fault.code, "asyncio.sleep(1000)" in fault.traceback) == ("environment_timeout", True)
        assert await pid_of(host, (await host.open("train", 0)).episode) == pid


async def test_code_that_holds_the_interpreter_is_killed_and_shown(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("environments.process.host.ABANDON_TIMEOUT_S", 1.0)
    async with await EnvironmentHost.start(environment_folder(tmp_path, STUCK), timeout_s=3) as host:
        opening = await host.open("train", 0)
        fault = await fault_of(host.step(opening.episode, "hold"))
        assert fault.code == "environment_timeout" and "in step_episode" in fault.traceback
        assert (await fault_of(host.score(opening.episode))).code == "environment_error"
        assert (await host.open("train", 0)).task_id == "t0"


@pytest.mark.parametrize(
    ("word", "reason"),
    [("die", "it exited with code 3"), ("crash", "killed by SIGSEGV"), ("real-time", "killed by SIG40")],
)
async def test_a_process_that_dies_fails_its_episodes_and_is_replaced(tmp_path: Path, word: str, reason: str) -> None:
    async with await EnvironmentHost.start(environment_folder(tmp_path, STUCK)) as host:
        bystander, opening = await host.open("train", 0), await host.open("train", 1)
        fault = await fault_of(host.step(opening.episode, word))
        assert (fault.code, reason in fault.what) == ("environment_error", True), fault.what
        assert reason in (await fault_of(host.step(bystander.episode, "x"))).what
        await host.close(bystander.episode)
        assert await pid_of(host, (await host.open("train", 1)).episode)


async def test_a_sigkill_in_mid_call_fails_the_call_at_once(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(environment_folder(tmp_path, STUCK)) as host:
        opening = await host.open("train", 0)
        pid = await pid_of(host, opening.episode)
        call = asyncio.create_task(fault_of(host.step(opening.episode, "hang")))
        await until((host._scratch / "hanging").exists)
        os.kill(pid, signal.SIGKILL)
        fault = await asyncio.wait_for(call, 60)
        assert (fault.code, "killed by SIGKILL" in fault.what) == ("environment_error", True)
        assert await pid_of(host, (await host.open("train", 0)).episode) != pid


async def test_a_cancelled_call_is_dropped_and_the_episode_goes_on(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        async def step_episode(self, example, messages, assistant_response):
            self.cancelled = getattr(self, "cancelled", "no")
            try:
                await asyncio.sleep(1000 if assistant_response == "hang" else 0)
            except asyncio.CancelledError:
                self.cancelled = "yes"
                raise
            return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": self.cancelled}])
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        opening = await host.open("train", 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.step(opening.episode, "hang"), 0.1)
        assert (await host.step(opening.episode, "x")).messages[0]["content"] == "yes"


async def test_a_host_whose_caller_is_cancelled_gives_its_place_back(flash_home: Path, tmp_path: Path) -> None:
    allow(flash_home, "at_once = 1")
    folder = environment_folder(tmp_path / "echo", "", returns="Echo()")
    with anyio.CancelScope() as scope:  # as around an MCP call
        async with await EnvironmentHost.start(folder):
            scope.cancel()
            await anyio.sleep_forever()
    async with await EnvironmentHost.start(folder, place_timeout_s=60):
        assert len(list((flash_home / "scratch").iterdir())) == 1


async def test_the_process_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    environment_folder(tmp_path, "", returns="Echo()")
    script = f"""
        import asyncio
        from pathlib import Path
        from environments.process.host import EnvironmentHost
        async def main():
            host = await EnvironmentHost.start(Path({str(tmp_path)!r}))
            print("ready", flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()

    await until(lambda: not is_running(child.pid))


@pytest.mark.parametrize(
    ("source", "returns", "code", "expected"),
    [
        ("import no_such_package", "Addition()", "environment_invalid",
            "ModuleNotFoundError: No module named 'no_such"),
        ("x = (", "Addition()", "environment_invalid", "SyntaxError"),
        ("del load_environment", "1", "environment_invalid", "NameError"),
        ("", "42", "environment_invalid", "load_environment returned int 42; it must return an object of a class"),
        ("class Sample(EnvironmentSingleTurn): pass", "Sample()", "environment_invalid", "abstract method"),
        ("raise SystemExit(1)", "Addition()", "environment_invalid", "environment.py raised SystemExit: 1"),
        ("os._exit(7)", "Addition()", "environment_invalid", "it exited with code 7"),
        ("time.sleep(1000)", "Addition()", "environment_timeout", "loading environment.py took longer than 1 s"),
        ("class Sample(Addition):\n    dataset = 1\n    def __init__(self): pass", "Sample()", "dataset_invalid",
            "got int 1"),
        ("class Sample(Addition):\n    def __init__(self): pass", "Sample()", "dataset_invalid", "dataset is empty"),
        ("class Sample(Addition):\n    def __init__(self): self.dataset = ['a']", "Sample()", "dataset_invalid",
            "dataset[0] must be a TaskExample whose input is a string, got 'a'"),
        ("", "load_dataset('no.jsonl')", "dataset_invalid", "no.jsonl: there is no such file"),
    ],
)  # fmt: skip
async def test_an_environment_that_does_not_load_says_why(tmp_path, source, returns, code, expected):
    environment_folder(tmp_path, source, returns=returns)
    fault = await fault_of(EnvironmentHost.start(tmp_path, start_timeout_s=1 if "sleep" in source else 30))
    assert (fault.code, expected in fault.what) == (code, True), fault.what
    assert ("fewer generated tasks by environment_args" in (remedy(fault) or "")) == ("timeout" in code)
    assert await children_of(tmp_path) == []


async def test_a_folder_without_entry_point_says_so(tmp_path: Path) -> None:
    assert "there is no environment.py" in (await fault_of(EnvironmentHost.start(tmp_path))).what
    (tmp_path / "environment.py").write_text("x = 1\n")
    assert "defines no load_environment" in (await fault_of(EnvironmentHost.start(tmp_path))).what


async def test_arguments_reach_load_environment_and_wrong_ones_are_explained(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def __init__(self, size): self.dataset = tasks(size)
    """
    environment_folder(tmp_path, source, returns="Sample(**args)")
    async with await EnvironmentHost.start(tmp_path, args={"size": 3}) as host:
        assert host.splits == {"train": 3, "eval": 0}
    wrong = await fault_of(EnvironmentHost.start(tmp_path, args={"sise": 3}))
    assert "unexpected keyword argument 'sise'" in wrong.what


async def test_only_named_secrets_are_seen_and_they_never_come_back(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("UNRELATED_TOKEN", "unrelated-value")
    source = """
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            print("printed", os.environ["API_KEY"])
            if assistant_response == "raise": raise ValueError(os.environ["API_KEY"])
            told = f"{os.environ['API_KEY']} {os.environ.get('UNRELATED_TOKEN')}"
            return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": told}])
    """
    folder = environment_folder(tmp_path, source)
    async with await EnvironmentHost.start(folder, secrets={"API_KEY": 'planted-"key'}) as host:
        opening = await host.open("train", 0)
        assert (await host.step(opening.episode, "x")).messages[0]["content"] == "[secret] None"
        fault = await fault_of(host.step(opening.episode, "raise"))
        assert "planted" not in fault.what + fault.traceback
    assert "printed [secret]" in (err := capfd.readouterr().err) and "planted" not in err


async def test_the_process_has_a_private_home_and_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    source = """
    class Sample(Echo):
        def step_episode(self, example, messages, assistant_response):
            import helper, tempfile
            told = f"{os.environ['HOME']}|{tempfile.mkdtemp()}|{os.getcwd()}|{sorted(os.environ)}"
            return EnvironmentStepResult(done=False, messages=[{"role": "user", "content": told}])
    """
    folder = environment_folder(tmp_path / "environment", source)
    (folder / "helper.py").write_text("")
    async with await EnvironmentHost.start(folder) as host:
        told = (await host.step((await host.open("train", 0)).episode, "x")).messages[0]["content"]
        home, scratch, folder_seen, names = told.split("|")
        assert Path(scratch).parent == Path(home) != Path.home() and folder_seen == str(folder)
        assert "FLASH_HOME" not in names
    assert not os.path.exists(home)  # noqa: ASYNC240, PTH110
    assert sorted(path.name for path in folder.iterdir()) == ["environment.py", "helper.py"]
