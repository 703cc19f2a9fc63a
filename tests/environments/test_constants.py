from pathlib import Path

import pytest

from environments.checks.constants import best_constant, candidates
from environments.process.host import EnvironmentHost
from tests.folders import environment_folder


def test_the_candidates_hold_common_golds_all_golds_zeros_and_the_tags_of_the_prompt() -> None:
    found = candidates([("12",), ("Yes",), ("Yes",), ("7", "8")], ["Answer in <answer>your answer</answer>."])
    assert found[0] == ("Yes",)
    for turns in (("7", "8"), ("12 Yes",), ("00",), ("<answer>Yes</answer>",)):
        assert turns in found
    assert len(found) == len(set(found))


BALANCED = """
class Sample(Addition):
    def __init__(self):
        outputs = ["yes", "yes", "no"]
        self.dataset = tasks(6)
        self.eval_dataset = [
            dataclasses.replace(task, output=outputs[i % 3]) for i, task in enumerate(tasks(60, first=100))
        ]
"""


async def test_the_commonest_answer_is_found_with_its_share(tmp_path: Path) -> None:
    async with await EnvironmentHost.start(environment_folder(tmp_path, BALANCED)) as host:
        constant = await best_constant(host, "eval", range(60))
    assert constant is not None and constant.answer == "yes"
    assert len(constant.successes) == 60 and 0.6 < constant.success_share < 0.75


@pytest.mark.slow
async def test_a_part_of_the_prompt_is_a_baseline_too(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def build_prompt_messages(self, example):
            numbers = re.findall("[0-9]+", example.input)
            question = f"Which is larger, {' or '.join(numbers[::int(example.id[-1]) % 2 * 2 - 1])}? <n>number</n>"
            return [{"role": "system", "content": "9999"}, {"role": "user", "content": question}]
        def score_response(self, example, text):
            largest = max(re.findall("[0-9]+", example.input), key=int)
            return RewardResult(score=float(text == f"<n>{largest}</n>"))
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        constant = await best_constant(host, "eval", range(4))
        copied = await best_constant(host, "eval", range(4), copies=True)
    assert constant is not None and constant.success_share < 0.5
    assert copied is not None and (copied.success_share, copied.answer) == (
        1.0,
        "copying the largest number of the prompt",
    )


async def test_an_environment_that_fails_has_no_constant(tmp_path: Path) -> None:
    source = """
    class Sample(Addition):
        def score_response(self, example, text): raise ValueError("no")
    """
    async with await EnvironmentHost.start(environment_folder(tmp_path, source)) as host:
        assert await best_constant(host, "train", range(6)) is None
