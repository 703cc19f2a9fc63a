"""verifiers: its environments of reasoning-gym and of gym-like games, one of its ToolEnv with its
MathRubric in a group of rubrics, an EnvGroup of two, and a rubric that compares the rollouts of a
task. All data is generated."""

import json

import gem
import reasoning_gym
import verifiers as vf
from datasets import Dataset
from verifiers.envs.experimental.gym_env import GymEnv
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

from environments.adapters.gym import GymEnvironment
from environments.base import TaskExample

SYSTEM_PROMPT = "Use the tool. Then write the result, and nothing else, as \\boxed{result}."


def load_environment(name="", **options):
    if name:
        return MAKERS[name](**options)
    environment = GymEnvironment(lambda seed: None, max_turns=1)
    environment.dataset = [TaskExample({}, each, id=each) for each in MAKERS]
    return environment


def single_turn(dataset="chain_sum", train=500, held_out=100, **config):
    """A dataset of reasoning-gym, with gold answers; `config` sets its difficulty."""
    spec = {"name": dataset, "weight": 1.0, "config": config}
    environment = ReasoningGymEnv(
        [spec],
        num_train_examples=train,
        num_eval_examples=held_out,
        # A small model does not write the tags that its default parser looks for.
        system_prompt="Write the answer, and nothing else.",
        parser=vf.Parser(),
    )

    def gold(row):
        place = int(row["answer"])
        return {"completion": environment.rg_dataset[place]["answer"]}

    environment.dataset = environment.build_dataset().map(gold)
    environment.eval_dataset = environment.build_eval_dataset().map(gold)
    return environment


def letters(**config):
    return single_turn("spell_backward", **config)


def game(train=200, held_out=50):
    return GymEnv(
        lambda: gem.make("game:GuessTheNumber-v0-easy"),
        num_train_episodes=train,
        num_eval_episodes=held_out,
        max_episode_steps=6,
    )


def tools(train=500, held_out=100):
    rubric = vf.RubricGroup([vf.MathRubric(), vf.Rubric([called], [0.2])])
    config = {"size": train + held_out, "min_terms": 2, "max_terms": 2, "max_digits": 2}
    items = [
        {"question": item["question"], "answer": item["answer"], "completion": calls(item)}
        for item in reasoning_gym.create_dataset("chain_sum", seed=0, **config)
    ]
    return vf.ToolEnv(
        tools=[add, subtract],
        max_turns=4,
        dataset=Dataset.from_list(items[:train]),
        eval_dataset=Dataset.from_list(items[train:]),
        system_prompt=SYSTEM_PROMPT,
        rubric=rubric,
    )


def calls(item):
    """The gold messages of a sum of two numbers."""
    left, sign, right = item["metadata"]["expression"].split()
    arguments = json.dumps({"a": int(left), "b": int(right)})
    function = {"name": "add" if sign == "+" else "subtract", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": item["answer"]},
        {"role": "assistant", "content": f"\\boxed{{{item['answer']}}}"},
    ]


def group():
    return vf.EnvGroup([single_turn(), game()], env_names=["sum", "game"])


def ranked(**config):
    environment = single_turn(**config)
    environment.add_rubric(vf.Rubric([briefest], [0.5]))
    return environment


def briefest(completions, **kwargs) -> list[float]:
    lengths = [len(completion[-1].content) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """The first number minus the second."""
    return a - b


def called(completion, **kwargs) -> float:
    return float(any(message.role == "tool" for message in completion))


MAKERS = {
    "SingleTurnEnv chain_sum": single_turn,
    "SingleTurnEnv spell_backward": letters,
    "MultiTurnEnv GuessTheNumber": game,
    "ToolEnv chain_sum": tools,
    "EnvGroup": group,
    "group rewards": ranked,
}
