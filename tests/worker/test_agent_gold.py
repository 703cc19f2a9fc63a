"""Gold answers of agents: they are played through the agent, and what is learnt is what it asks."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from environments.checks import gate, playing
from environments.process.host import EnvironmentHost
from flash_mcp.extensions.hunt.search import hunt
from tests.folders import ASK, environment_folder
from tests.places import AGENT_CALCULATOR, TERMINAL
from tests.tiny import make_tokenizer
from tests.virtual import FakeEngine, rolled
from worker.rollouts.gold import IGNORED, Row
from worker.rollouts.scheduler import RolloutTask, TalkLimits
from worker.rollouts.transcript import ChatTemplate
from worker.rollouts.turns import Completion, Sampling
from worker.training.sft import gold_rows

pytestmark = [pytest.mark.slow, pytest.mark.linux]
TEMPLATE = ChatTemplate(make_tokenizer())
LENGTH = 2000
TEAM = """
import threading
class Sample(EnvironmentAgent):
    '''A planner splits a sum, workers add the parts at once, and a merger adds what they say.'''
    def __init__(self):
        self.dataset = [
            TaskExample({}, f"{n} {n + 1} {n + 2}", id=f"t{n}", output=str(3 * n + 3)) for n in range(20)
        ]
    def run(self, example, base_url, api_key, model):
        def ask(role, text):
            messages = [{"role": "user", "content": f"{role}: {text}"}]
            return asked(base_url, api_key, role, messages)["content"] or ""
        parts = dict.fromkeys(ask("plan", example.input).split(", "), "")
        def work(part):
            parts[part] = ask("add", part)
        workers = [threading.Thread(target=work, args=(part,)) for part in parts]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        right = ask("merge", " ".join(parts.values())) == example.output
        return RewardResult(float(right), success=right)
    def gold_turn(self, example, messages, number):
        role, _, text = messages[-1]["content"].partition(": ")
        numbers = [int(word) for word in text.split()]
        said = f"{numbers[0]} {numbers[1]}, {numbers[2]}" if role == "plan" else str(sum(numbers))
        return {"role": "assistant", "content": said}
"""


@pytest.fixture
def team(tmp_path: Path) -> Path:
    return environment_folder(tmp_path / "team", ASK + TEAM, needs="endpoint = true")


def contexts(rows: Sequence[Row]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens before it, tokens) of every answer that is learnt."""
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in rows:
        ids = row["input_ids"]
        learnt = [label != IGNORED for label in row["labels"]]
        starts = [at for at in range(1, len(ids)) if learnt[at] and not learnt[at - 1]]
        for start in starts:
            end = learnt.index(False, start) if False in learnt[start:] else len(ids)
            found[tuple(ids[:start]), tuple(ids[start:end])] += 1
    return found


class Learnt(FakeEngine):
    """Answers each prompt as it was learnt, and keeps it. KeyError for one that was not learnt."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.answers = dict(contexts(rows).keys())
        self.asked: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()

    def submit(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        answer = self.answers[tuple(prompt_ids)]
        self.asked[tuple(prompt_ids), answer] += 1
        self.running[request_id] = []
        self.wanted[request_id] = Completion(list(answer), [0.0] * len(answer), "stop")


@pytest.mark.parametrize(("name", "tasks"), [("team", 6), ("agent_calculator", 6), ("terminal", 2)])
async def test_sft_learns_the_prompts_of_rollouts_and_no_others(name: str, tasks: int, team: Path) -> None:
    folder = {"team": team, "agent_calculator": AGENT_CALCULATOR.parent, "terminal": TERMINAL}[name]
    async with await EnvironmentHost.start(folder) as host:
        host.splits["train"] = tasks
        rows = await gold_rows(host, TEMPLATE, "train", LENGTH, max_error_share=0.0, advance=lambda: None)
        learnt = [row for task in rows for row in task]
        engine = Learnt(learnt)
        plan = [RolloutTask("train", number, number, number, number) for number in range(tasks)]
        rollouts = await rolled(plan, host, engine, TalkLimits(LENGTH, LENGTH))
    assert [rollout.reward for rollout in rollouts] == [1.0] * tasks and engine.asked == contexts(learnt)
    assert sum(engine.asked.values()) == tasks * (4 if name == "team" else 2)
    assert [len(task) for task in rows] == [4 if name == "team" else 1] * tasks


async def test_the_gate_plays_gold_that_depends_on_the_request(team: Path) -> None:
    async with await EnvironmentHost.start(team) as host:
        tasks = [playing.Task("train", number) for number in range(host.splits["train"])]
        plans = [(task, await playing.gold_turns(host, task)) for task in tasks]
        assert {len(turns) for _, turns in plans} == {4}
        for played in await playing.interleave(host, plans):
            assert played.score.success and not played.is_cut
        cut = await playing.play(host, tasks[0], plans[0][1][:3], repeat=False)
        assert cut.is_cut and not cut.score.success


@pytest.mark.long
async def test_the_gate_passes_an_agent_whose_calls_come_in_any_order(team: Path) -> None:
    """Gold of one task is no gold of another, though each request of that one has gold of its own."""
    report = await gate.check(team, timeout_s=20.0, deadline_s=120.0)
    assert [probe.evidence for probe in report.probes if probe.passed is False] == []
    made = {probe.name for probe in report.probes if probe.passed}
    assert {"gold", "order", "constants", "isolation", "determinism", "leaks"} <= made
    async with await EnvironmentHost.start(team) as host:
        found = await hunt(host, "train", range(host.splits["train"]))
    assert found.plays and found.exploits == []


async def test_a_request_without_gold_ends_what_is_learnt(team: Path) -> None:
    source = team / "environment.py"
    silent = "        return None if role == 'merge' else {"
    source.write_text(source.read_text().replace('        return {"role": "assistant"', silent + '"role": "assistant"'))
    async with await EnvironmentHost.start(team) as host:
        host.splits["train"] = 1
        (rows,) = await gold_rows(host, TEMPLATE, "train", LENGTH, max_error_share=0.0, advance=lambda: None)
    texts = sorted(TEMPLATE.tokenizer.decode(answer) for _, answer in contexts(rows))
    assert texts == ["0 1, 2<|im_end|>", "1<|im_end|>", "2<|im_end|>"]
