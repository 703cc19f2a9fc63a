"""Environments written for other contracts: the real freesolo SDK, the real reasoning-gym, gym-like objects."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcp import Client

from environments import TaskExample
from environments.adapters import reasoning_gym
from environments.adapters.gym import GymEnvironment
from environments.base import EnvironmentEpisode
from environments.checks import gate
from environments.faults import EnvironmentFault, remedy
from environments.process import requirements
from environments.process.host import Ended, EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from flash_mcp.server.mcp_server import server
from flash_mcp.state import references
from flash_mcp.state.store import open_store
from tests.hubs import FOLDERS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def shared_interpreters(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are installed once for all tests of this session."""
    shared = tmp_path_factory.getbasetemp() / "interpreters"
    monkeypatch.setattr(requirements, "interpreters_dir", lambda: shared)


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_md", ".md").replace("_jsonl", ".jsonl").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder


async def test_a_single_turn_folder_of_the_sdk_runs_unchanged() -> None:
    folder = FOLDERS / "freesolo_single"
    assert requirements.of_folder(folder) == ["freesolo>=0.4,<0.5"]
    async with await EnvironmentHost.start(folder) as host:
        assert host.splits == {"train": 2, "eval": 1}
        opening = await host.open("train", 1)
        assert opening.messages == [
            {"role": "system", "content": "Answer with one word."},
            {"role": "user", "content": "Capital of Peru?"},
        ]
        assert opening.max_turns == 1 and (await host.step(opening.episode, " Lima ")).done
        right = await host.score(opening.episode)
        assert (right.reward, right.success, right.metrics) == (1.0, True, {"right": 1.0})
    report = await gate.check(folder)
    assert [(probe.name, probe.evidence) for probe in report.probes if probe.passed is not True] == []


async def test_a_multi_turn_folder_of_the_sdk_runs_unchanged() -> None:
    folder = FOLDERS / "freesolo_multi"
    async with await EnvironmentHost.start(folder) as host:
        opening = await host.open("train", 0)
        assert opening.max_turns == 3
        assert (await host.step(opening.episode, "4")).messages == [{"role": "user", "content": "No."}]
        assert (await host.step(opening.episode, "5")).done
        score = await host.score(opening.episode)
        assert (score.success, score.reason) == (True, "[2, 4]")
        assert await host.gold("train", 0) == [{"role": "assistant", "content": "5"}]
    report = await gate.check(folder)
    unmade = {probe.name for probe in report.probes if probe.passed is not True}
    # It has no eval split, and one gold answer for all tasks.
    assert unmade == {"tasks", "near_gold", "order"}


SDK_UNUSUAL = """
    from freesolo.environments import EnvironmentMultiTurn, EnvironmentStepResult, RewardResult
    class Unusual(EnvironmentMultiTurn):
        def __init__(self):
            call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            gold = [{"role": "assistant", "content": None, "tool_calls": [call]}]
            self.dataset = [{"input": "Look.", "output": {"messages": gold}}] * 2
        def start_episode(self, example, prompt_text):
            parts = [{"type": "text", "text": "Look "}, {"type": "input_text", "text": "here."}]
            return [{"role": "user", "content": parts}]
        def max_episode_turns(self, example):
            return 3
        def step_episode(self, example, messages, assistant_response):
            return EnvironmentStepResult(done=False, final_response_text="seen")
        def score_episode(self, example, episode):
            return RewardResult(score=float(episode.response_text == "seen"))
    def load_environment():
        return Unusual()
"""


async def test_parts_tool_calls_repeated_rows_and_answers_without_messages_of_the_sdk(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(written(tmp_path, environment_py=SDK_UNUSUAL)) as host:
        opening = await host.open("train", 1)
        assert opening.messages == [{"role": "user", "content": "Look here."}]
        assert (await host.step(opening.episode, "I see.")).done and (await host.score(opening.episode)).reward == 1.0
        (gold,) = await host.gold("train", 0)
        assert (gold["content"], gold["tool_calls"][0]["function"]["name"]) == ("", "look")
        (first, _), (second, _) = await host.tasks("train")
        assert second == f"{first}-2"


SDK_GROUP = """
    from freesolo.environments import EnvironmentMultiTurn, EnvironmentStepResult, RewardResult
    class Ranked(EnvironmentMultiTurn):
        dataset = [{"input": "Say much.", "output": "much"}]
        def start_episode(self, example, prompt_text):
            return [{"role": "user", "content": example.input}]
        def max_episode_turns(self, example):
            return 2
        def step_episode(self, example, messages, assistant_response):
            more = () if len(messages) > 2 else [{"role": "user", "content": "More?"}]
            return EnvironmentStepResult(
                done=not more, messages=more, metadata={"said": len(assistant_response)}
            )
        def score_episode(self, example, episode):
            return self.score_episodes(example, [episode])[0]
        def score_episodes(self, example, episodes):
            said = [sum(step["said"] for step in each.metadata["steps"]) for each in episodes]
            return [RewardResult(score=sorted(said).index(one) / len(said)) for one in said]
    def load_environment():
        return Ranked()
"""


async def test_a_score_episodes_of_the_sdk_gets_the_group(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(FOLDERS / "freesolo_multi") as host:
        assert not host.scores_groups  # the SDK's own, which scores each alone
    async with await EnvironmentHost.start(written(tmp_path, environment_py=SDK_GROUP)) as host:
        assert host.scores_groups
        ended: list[Ended] = []
        for texts in (["aaa", "aa"], ["a", "a"], ["a", "aaa"]):
            opening = await host.open("train", 0)
            for text in texts:
                await host.step(opening.episode, text)
            ended.append(Ended(opening.episode))
        scores = await host.score_group(ended)
        assert [score.reward for score in scores] == [2 / 3, 0.0, 1 / 3]
        alone = await host.open("train", 0)
        await host.step(alone.episode, "aaa")
        assert (await host.score(alone.episode)).reward == 0.0


CHAIN_SUM = "reasoning-gym:chain_sum"
MODEL = "smollm2-135m-instruct"


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """A tool's result; called again, as its error says, while packages are being installed."""
    result = await client.call_tool(tool, arguments)
    while result.is_error and result.content[0].text.startswith("[not_ready "):
        result = await client.call_tool(tool, arguments)
    assert not result.is_error and result.structured_content is not None, result.content
    return result.structured_content


@pytest.mark.long
async def test_a_dataset_by_name_passes_the_gate_and_can_be_trained_on(flash_home: Path) -> None:
    sizes = {"train_size": 40, "eval_size": 20, "max_terms": 3}
    async with Client(server) as client:
        tested = await call(client, "env_test", environment=CHAIN_SUM, environment_args=sizes)
        assert [(probe["name"], probe["evidence"]) for probe in tested["probes"] if probe.get("result")] == []
        assert (tested["environment"], tested["train_tasks"], tested["eval_tasks"]) == (CHAIN_SUM, 40, 20)
        assert CHAIN_SUM in tested["next"] and open_store().environments() == []
        fields = {"environment": CHAIN_SUM, "environment_args": sizes, "steps": 1, "validate_only": True}
        planned = await call(client, "train", **fields)
        again = await call(client, "train", **fields)
        wrong = {"name": "sums", "folder": CHAIN_SUM, "environment_args": {"terms": 3}}
        refused = await client.call_tool("env_push", wrong)
        assert refused.content[0].text.startswith("[invalid_argument environment=sums] ")
        assert "chain_sum does not accept its options {'terms': 3}" in refused.content[0].text
    [row] = open_store().environments()
    assert planned["environment"] == again["environment"] == f"reasoning-gym-chain_sum@{row.digest}"
    assert planned["estimate"]["train_tasks"] == 40


def test_a_label_that_the_instruction_shows_is_an_answer() -> None:
    tasks = [TaskExample({"answer": text}, text, output=text) for text in ("Yes", "No")]
    scorer = SimpleNamespace(score_answer=lambda text, record: float(text == record["answer"]))
    instruction = "Write <answer>Yes</answer> or <answer>No</answer>, not <answer>maybe</answer>."
    environment = reasoning_gym.ReasoningGym(scorer, 0.1, instruction, tasks)
    said = ("Yes", "No", "maybe")
    scores = [environment.score_response(tasks[0], f"<answer>{text}</answer>").score for text in said]
    assert scores == [1.0, 0.1, 0.0]


def test_slow_datasets_that_have_smaller_sizes_exist() -> None:
    assert set(reasoning_gym.SIZES_OF_SLOW) <= set(references.DATASETS)


async def test_a_dataset_that_does_not_exist_is_refused_before_anything_is_installed() -> None:
    async with Client(server) as client:
        for tool, arguments in (("env_test", {}), ("train", {"validate_only": True}), ("evaluate", {"model": MODEL})):
            result = await client.call_tool(tool, {"environment": "reasoning-gym:chain_sums", **arguments})
            assert result.is_error and "use reasoning-gym:chain_sum" in result.content[0].text
    with pytest.raises(FlashError, match="the datasets are: ab, acre, "):
        references.files_of("reasoning-gym:xyzzy")


TRAPS = """
    import hashlib, json, sys
    from reasoning_gym.factory import DATASETS
    from environments.adapters import reasoning_gym
    from environments.base import EnvironmentEpisode
    NOTHING = ["no idea", reasoning_gym.INSTRUCTION, "<answer></answer>", "", None]
    JUNK = [*NOTHING, "<answer>no idea</answer>", "<answer>\\u2603</answer>"]
    found = {"datasets": sorted({*DATASETS} - {"composite"})}
    few = reasoning_gym.load("tower_of_hanoi")
    found["few"] = [len(few.dataset), len(few.eval_dataset)]
    for name in sys.argv[1:]:
        environment = reasoning_gym.load(name, train_size=6, eval_size=4)
        more = reasoning_gym.load(name, train_size=9, eval_size=4)
        tasks = [*environment.dataset, *environment.eval_dataset]
        inputs = [task.input for task in tasks]
        junk = [environment.score_response(task, text) for task in tasks for text in JUNK]
        gold = [environment.score_response(task, environment.sft_completion(task)[0]["content"]) for task in tasks]
        found[name] = {
            "junk": max(score.score for score in junk),
            "nothing": max(environment.score_response(task, text).score for task in tasks for text in NOTHING),
            "junk_successes": sum(score.success for score in junk),
            "gold": min(score.score for score in gold),
            "gold_successes": sum(score.success for score in gold),
            "distinct": len(set(inputs)),
            "eval_stays": environment.eval_dataset == more.eval_dataset,
            "train_grows": environment.dataset == more.dataset[:6],
            "digest": hashlib.sha256(repr(inputs).encode()).hexdigest(),
        }
    print(json.dumps(found))
"""


@pytest.mark.long
async def test_scorers_that_raise_or_pay_for_anything_and_seeds_that_differ_are_mended(tmp_path: Path) -> None:
    raises, pays_all, pays_a_floor, differs = (
        "prime_factorization", "game_of_life_halting", "fraction_simplification", "list_functions",
    )  # fmt: skip
    folder = written(tmp_path, environment_py="")
    (folder / "requirements.txt").write_text("\n".join(requirements.REASONING_GYM))
    python = await requirements.interpreter(folder)

    async def run_alone(*datasets: str) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *(python, "-W", "ignore", "-c", textwrap.dedent(TRAPS), *datasets),
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(requirements.contract_path(python)), "PYTHONHASHSEED": "0"},
        )
        return json.loads((await process.communicate())[0])

    one, other = await asyncio.gather(run_alone(raises, pays_all, pays_a_floor, differs), run_alone(differs))
    assert one[differs] == other[differs] and one.pop("datasets") == sorted(references.DATASETS)
    few_train, few_held_out = one.pop("few")
    assert 30 < few_held_out <= few_train < 100, "of fewer than 100 questions, each gets half"
    for name, seen in one.items():
        assert (seen["junk_successes"], seen["gold_successes"]) == (0, 10), name
        assert seen["nothing"] == 0.0 <= seen["junk"] <= 0.1 < 0.99 < seen["gold"], name
        assert (seen["distinct"], seen["eval_stays"], seen["train_grows"]) == (10, True, True), name


class Counting:
    """The game behind all of them: say the next number, three times."""

    def __init__(self) -> None:
        self.at, self.closed = 0, 0

    def begin(self, seed: int | None) -> str:
        self.at = (seed or 0) % 5
        self.end = self.at + 3
        return f"After {self.at}?"

    def say(self, text: str) -> tuple[float, bool, bool]:
        """reward, won, lost"""
        right = text == str(self.at + 1)
        self.at += right
        return (0.5 if right else -0.1), self.at == self.end, not right

    def close(self) -> Any:
        self.closed += 1


class Gymnasium(Counting):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return self.begin(seed), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward, won, lost = self.say(action)
        return f"After {self.at}?", reward, won, lost, {}


class OlderGym(Counting):
    def reset(self, seed: int) -> str:
        return self.begin(seed)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        reward, won, lost = self.say(action)
        return f"After {self.at}?", reward, won or lost, {"success": won}


class TextArena(Counting):
    total = 0.0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        self.begin(seed)

    def get_observation(self) -> tuple[int, str]:
        return 0, f"After {self.at}?"

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        reward, won, lost = self.say(action)
        self.total += reward
        return won or lost, {}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        super().close()
        return {0: self.total}, {}


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False


class OpenEnvClient(Counting):
    """As OpenEnv's clients are: coroutines whose results have fields."""

    async def reset(self, **kwargs: Any) -> StepResult:
        return StepResult(self.begin(kwargs["seed"]))

    async def step(self, action: str) -> StepResult:
        reward, won, lost = self.say(action)
        return StepResult(f"After {self.at}?", reward, won or lost)

    async def close(self) -> None:
        super().close()


@dataclass
class Observation:
    text: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


class OpenEnv(Counting):
    """As OpenEnv's environments are: `step` returns the observation, which has the reward."""

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation(self.begin(seed), metadata={"answer": self.at + 1})

    def step(self, action: str, timeout_s: float | None = None) -> Observation:
        reward, won, lost = self.say(action)
        return Observation(f"After {self.at}?", won or lost, reward, {"success": won})


class OverHttp(Counting):
    """What OpenEnv's server sends: JSON, with the metadata in the observation."""

    async def reset(self, **kwargs: Any) -> dict[str, Any]:
        return {"observation": {"text": self.begin(kwargs["seed"])}, "reward": None, "done": False}

    async def step(self, action: str) -> Any:
        reward, won, lost = self.say(action)
        observation = {"text": f"After {self.at}?", "metadata": {"success": won}}
        return {"observation": observation, "reward": reward, "done": won or lost}


async def settled(value: Any) -> Any:
    """The value that a method returned, as the environment's process takes it."""
    return await value if inspect.isawaitable(value) else value


async def play(environment: GymEnvironment, answers: list[str]) -> tuple[list[str], Any, Any]:
    """What was shown, the reward, and the object that was played with."""
    example = environment.dataset[2]
    episode = environment.new_episode(example)
    messages = await settled(episode.start_episode(example))
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        result = await settled(episode.step_episode(example, messages, answer))
        messages += result.messages
        if result.done:
            break
    score = episode.score_episode(example, EnvironmentEpisode(messages, answers[-1]))
    await settled(episode.close_episode())
    shown = [message["content"] for message in messages if message["role"] == "user"]
    return shown, score, episode._object  # pyright: ignore


@pytest.mark.parametrize("kind", [Gymnasium, OlderGym, TextArena, OpenEnv, OpenEnvClient, OverHttp])
async def test_every_kind_of_object_is_played_alike(kind: type[Any]) -> None:
    environment = GymEnvironment(lambda seed: kind(), max_turns=4, instruction="Count.", train_size=5, eval_size=2)
    shown, score, played = await play(environment, ["3", " 4\n", "5"])
    assert shown == ["Count.\n\nAfter 2?", "After 3?", "After 4?"]
    assert (score.score, score.success, played.closed) == (1.5, True, 1)

    shown, score, played = await play(environment, ["3", "9"])
    assert (score.score, score.success, played.closed) == (0.4, False, 1)
    assert not {task.id for task in environment.dataset} & {task.id for task in environment.eval_dataset}


async def test_an_answer_that_is_no_action_costs_the_turn_and_a_cut_off_game_is_no_success() -> None:
    class Numbers(Gymnasium):
        def step(self, action: int) -> Any:
            return super().step(str(action))

    environment = GymEnvironment(lambda seed: Numbers(), max_turns=4, success_at=0.4, to_action=int)
    shown, score, _ = await play(environment, ["three", "3"])
    assert shown[1].startswith("That is no valid action: invalid literal for int()")
    assert (score.score, score.success) == (0.5, False)  # enough reward, but it did not come to its end
    assert {metric.name: metric.score for metric in score.metrics} == {"ended": 0.0, "invalid": 0.5}


async def test_an_observation_of_several_fields_is_shown_as_json_without_its_reward() -> None:
    @dataclass
    class Echoed(Observation):
        length: int = 4

    class Echo(OpenEnv):
        def reset(self, **kwargs: Any) -> Echoed:
            return Echoed(self.begin(0), metadata={"answer": 1})

    shown, _, _ = await play(GymEnvironment(lambda seed: Echo(), max_turns=1), ["3"])
    assert json.loads(shown[0]) == {"text": "After 0?", "length": 4}


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_an_object_that_takes_no_text_is_refused_with_the_way_to_convert_it(tmp_path: Path, kind: str) -> None:
    source = f"""
        from environments.adapters.gym import GymEnvironment
        class Game:
            {kind} reset(self, seed=None):
                return "Say 3.", {{}}
            {kind} step(self, action):
                return "Again.", float(action.number == 3), True, False, {{}}
        def load_environment(**kwargs):
            return GymEnvironment(lambda seed: Game(), max_turns=2, **kwargs)
    """
    async with await EnvironmentHost.start(written(tmp_path, environment_py=source)) as host:
        opening = await host.open("train", 0)
        with pytest.raises(EnvironmentFault, match="its action was the model's text, '3'") as raised:
            await host.step(opening.episode, "3")
    assert raised.value.code == "environment_error"
    assert "give GymEnvironment a to_action" in (remedy(raised.value) or "")


async def test_a_gym_like_object_passes_the_gate(tmp_path: Path) -> None:
    source = """
        from environments.adapters.gym import GymEnvironment
        class Game:
            def reset(self, seed=None):
                self.wanted = seed % 7
                return f"Say {self.wanted}.", {}
            def step(self, action):
                right = action == str(self.wanted)
                return "Again.", float(right), right, False, {}
        def load_environment(**kwargs):
            return GymEnvironment(lambda seed: Game(), max_turns=2, **kwargs)
    """
    report = await gate.check(written(tmp_path, environment_py=source))
    unmade = {probe.name for probe in report.probes if probe.passed is not True}
    # A game has no gold answer.
    of_gold = {"gold", "truncated", "near_gold", "order", "every_gold", "leaks"}
    assert (report.passed, unmade) == (True, of_gold)


async def test_an_object_that_is_not_wrapped_is_refused_with_the_way_to_do_it(tmp_path: Path) -> None:
    source = """
        class Game:
            def reset(self): ...
            def step(self, action): ...
        def load_environment(**kwargs):
            return Game()
    """
    report = await gate.check(written(tmp_path, environment_py=source))
    assert "environments.adapters.gym.GymEnvironment" in report.probes[0].evidence


def test_tasks_of_an_object_are_its_seeds() -> None:
    environment = GymEnvironment(lambda seed: Gymnasium(), max_turns=1, seed=7, train_size=1)
    assert environment.dataset == [TaskExample(record={"seed": 7}, input="seed 7", id="seed-7")]
