"""The example environments: their rewards, their datasets, their arithmetic."""

import importlib.util
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import environments
from environments import EnvironmentEpisode, RewardResult
from flash_mcp.protocol.spec import read_toml, validate

EXAMPLES = Path(environments.__file__).parent / "examples"


def load(example: str, module: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{example}_{module}", EXAMPLES / example / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


calculator, sort_words = load("calculator", "environment"), load("sort_words", "environment")
SUM, SORT = calculator.load_environment(), sort_words.load_environment()
TASK = next(task for task in SUM.dataset if "*" in task.input)
ASK, ANSWER = f"<calc>{TASK.record['expression']}</calc>", f"<answer>{TASK.output}</answer>"


def play(*answers: str) -> tuple[list[str], RewardResult]:
    """What the calculator replied, and the reward, for a model that says `answers`."""
    episode = SUM.new_episode(TASK)
    messages = episode.start_episode(TASK)
    prompt = len(messages)
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        result = episode.step_episode(TASK, messages, answer)
        if result.done:
            break
        messages += result.messages
    reward = episode.score_episode(TASK, EnvironmentEpisode(messages, answers[-1], prompt))
    return [turn["content"] for turn in messages[prompt:] if turn["role"] == "user"], reward


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (("I do not know.",), 0.0), (("<answer>1</answer>",), 0.0), (("<calc>twelve</calc>", "no"), 0.1),
        (("<calc>1 + 1</calc>", "no"), 0.3), (("<calc>1 + 1</calc>", "<answer>2</answer>"), 0.35), ((ANSWER,), 0.35),
        ((ASK, "no"), 0.6), ((f"{ASK} {ANSWER}", "no"), 0.6), ((ASK, "<answer>1</answer>"), 0.65), ((ASK, ANSWER), 1.0),
        (("<calc>1 / 0</calc>", ASK, ANSWER), 1.0),
    ],
)  # fmt: skip
def test_each_part_of_the_way_pays_more_than_the_one_before(answers: tuple[str, ...], score: float) -> None:
    _, reward = play(*answers)
    assert (reward.score, reward.success) == (score, score == 1) and (score < 1 or reward.reason is None)


def test_what_the_calculator_replies() -> None:
    assert play(ASK, ANSWER)[0] == [f"The result is {TASK.output}."]
    assert play("<calc>1 / 0</calc>", ASK)[0][0] == "The calculator cannot do that: it divides by zero."
    assert play(f"{ASK} {ANSWER}", "no")[0] and play(f"{ANSWER} {ASK}")[0] == []


@pytest.mark.parametrize("text", ["<answer>1,0</answer>", "<answer> -0.50 </answer>", "<answer>,</answer>", "<answer>"])
def test_answers_of_any_form_are_read_without_raising(text: str) -> None:
    assert not play(ASK, text)[1].success


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", 84), ("2+3*4", 14), ("(2 + 3) * 4", 20), ("10 - 4 - 3", 3), ("-(2 - 5)", 3),
        ("7 / 2", Fraction(7, 2)), ("0.1 + 0.2", Fraction(3, 10)), ("2 - -3", 5),
    ],
)  # fmt: skip
def test_arithmetic_is_exact(expression: str, value: Fraction) -> None:
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "1 +", "* 2", "(1", "1)", "()", "1 2", "2 ** 3", "1 / 0", "1 / (2 - 2)", "x", "__import__('os')",
        "1e9", "1" * 65,
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_with_a_reason(expression: str) -> None:
    with pytest.raises(ValueError, match=r"it |is in the wrong place|is missing|is not closed"):
        calculator.calculate(expression)


@given(st.text(alphabet="0123456789.+-*/() e_x\n", max_size=70))
def test_arithmetic_gives_a_number_or_refuses_whatever_it_is_asked(expression: str) -> None:
    try:
        value = calculator.calculate(expression)
    except ValueError:
        return
    assert isinstance(value, Fraction) and calculator.number_text(value)


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_makes_the_scorers_raise_or_succeed(first: str, second: str) -> None:
    assert not play(first, second)[1].success and not SORT.score_response(SORT.dataset[0], first).success


def test_sorting_pays_for_words_in_their_place() -> None:
    task = SORT.dataset[0]
    gold = task.output.split(", ")
    assert len(gold) == 4
    swapped = ", ".join([gold[1], gold[0], *gold[2:]])
    texts = ("", gold[0], swapped, f"{task.output}.", f"{task.output}, fig")
    rewards = [SORT.score_response(task, text) for text in texts]
    assert [reward.score for reward in rewards] == [0.0, 0.2, 0.6, 1.0, 0.64]
    assert [reward.success for reward in rewards] == [False, False, False, True, False]
    assert not SORT.score_response(task, task.input).success


@pytest.mark.parametrize("example", ["calculator", "sort_words"])
def test_datasets_are_what_their_script_writes(example: str, tmp_path: Path) -> None:
    load(example, "make_datasets").write(tmp_path)
    for split in ("train", "eval"):
        kept = EXAMPLES / example / "datasets" / f"{split}.jsonl"
        assert (tmp_path / f"{split}.jsonl").read_bytes() == kept.read_bytes()


@pytest.mark.parametrize(("example", "environment"), [("calculator", SUM), ("sort_words", SORT)])
def test_splits_are_large_enough_and_disjoint(example: str, environment) -> None:
    train, held_out = environment.dataset, environment.eval_dataset
    assert (len(train), len(held_out)) == (500, 200)

    def content(task) -> object:
        return task.record.get("expression") or task.output

    assert len({content(task) for task in [*train, *held_out]}) == 700, example
    assert len({task.id for task in [*train, *held_out]}) == 700


def test_gold_conversations_of_the_calculator_are_right() -> None:
    for task in [*SUM.dataset, *SUM.eval_dataset]:
        assert calculator.number_text(calculator.calculate(task.record["expression"])) == task.output


@pytest.mark.parametrize("example", ["calculator", "sort_words", "tool_calculator", "agent_calculator"])
@pytest.mark.parametrize(("config", "algorithm"), [("rl", "grpo"), ("sft", "sft")])
def test_configs_are_valid_runs_of_their_environment(example: str, config: str, algorithm: str) -> None:
    spec = validate(read_toml(EXAMPLES / example / "configs" / f"{config}.toml"))
    assert (spec.environment, spec.algorithm, spec.eval_after) == (example, algorithm, True)
    begins_from_sft = (example, config) == ("agent_calculator", "rl")
    assert spec.eval_before is not begins_from_sft


@pytest.mark.slow
def test_a_number_that_the_agents_tool_cannot_take_is_an_error_for_the_model() -> None:
    pytest.importorskip("openai")
    agent = load("agent_calculator", "agent")
    assert agent.calculate('{"left": 1e999, "operator": "+", "right": 1}').startswith("error: cannot convert")
