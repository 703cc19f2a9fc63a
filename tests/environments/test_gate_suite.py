"""Bad and good environments for the gate. Each bad one must fail the check that is named; every
good one must pass. They are built on `Addition`: 'Add 3 and 4.' with the gold answer '7'.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.checks.gate import check
from tests.folders import environment_folder

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SCORE = "def score_response(self, example, text):\n        "
TEXT = 'text = text or ""\n        '
TAGGED = """
    def build_prompt_messages(self, example, prompt_text):
        return [{"role": "user", "content": example.input + " Write <answer>your answer</answer>."}]
    def sft_completion(self, example):
        return [{"role": "assistant", "content": f"<answer>{example.output}</answer>"}]
"""
BAD = {
    "an answer anywhere in the text": (
        SCORE + "return RewardResult(float(example.output in (text or '').split()))",
        "near_gold",
    ),
    "any of many tags": (
        TAGGED
        + "    "
        + SCORE
        + "return RewardResult(float(example.output in re.findall('<answer>(.*?)</answer>', text or '')))",
        "near_gold",
    ),
    "numbers that are nearly right": (
        SCORE
        + "found = re.fullmatch('[0-9]+', (text or '').strip())\n        "
        + "return RewardResult(float(bool(found) and abs(int(found[0]) - int(example.output)) <= 1))",
        "near_gold",
    ),
    "any number": (
        SCORE + "return RewardResult(float(bool(re.fullmatch('[0-9]+', (text or '').strip()))))",
        "constants",
    ),
    "a right sum without a look at the task": (
        SCORE
        + "return RewardResult(float(bool(re.fullmatch('[0-9]*[13579]', (text or '').strip()))))",
        "constants",
    ),
    "tasks with one answer": (
        "def __init__(self):\n"
        "        super().__init__()\n"
        "        self.dataset = [dataclasses.replace(task, output='0') for task in self.dataset]\n"
        "        self.eval_dataset = [dataclasses.replace(t, output='0') for t in self.eval_dataset]",
        "constants",
    ),
    "full pay but for a flag": (
        SCORE
        + "right = (text or '') == example.output\n        "
        + "shaped = 0.95 if (text or '').isdigit() else 0.0\n        "
        + "return RewardResult(1.0 if right else shaped, success=right)",
        "constants",
    ),
    "a reward of a million": (
        SCORE + "return RewardResult(1e6 * float((text or '') == example.output))",
        "order",
    ),
    "length that pays": (
        SCORE
        + "right = (text or '') == example.output\n        "
        + "return RewardResult(1.0 if right else min(0.45, len(text or '') / 10000), success=right)",
        "order",
    ),
    "junk that earns more than a wrong number": (
        SCORE
        + "right = (text or '') == example.output\n        "
        + "return RewardResult(1.0 if right else 0.0 if (text or '').isdigit() else 0.4, success=right)",
        "order",
    ),
    "politeness": (
        SCORE
        + "right = (text or '') == example.output\n        "
        + "return RewardResult(float(right or 'cannot' in (text or '')))",
        "junk",
    ),
    "the prompt holds the answer": (
        "def build_prompt_messages(self, example, prompt_text):\n"
        "        return [{'role': 'user', 'content': f'{example.input} (It is {example.output}.)'}]\n"
        "    " + SCORE + "return RewardResult(float(example.output in re.findall('[0-9]+', text or '')))",
        "prompt_echo",
    ),
    "a dict that episodes share": (
        "def __init__(self):\n"
        "        super().__init__()\n"
        "        self.now = {}\n"
        "    def build_prompt_messages(self, example, prompt_text):\n"
        "        self.now['answer'] = example.output\n"
        "        return [{'role': 'user', 'content': example.input}]\n"
        "    " + SCORE + "return RewardResult(float((text or '') == self.now['answer']))",
        "isolation",
    ),
    "a generator that episodes share": (
        "def __init__(self):\n"
        "        super().__init__()\n"
        "        self.generator = random.Random(0)\n"
        "    def build_prompt_messages(self, example, prompt_text):\n"
        "        extra = self.generator.random()\n"
        "        return [{'role': 'user', 'content': f'{example.input} ({extra})'}]",
        "isolation",
    ),
    "the clock": (
        "def build_prompt_messages(self, example, prompt_text):\n"
        "        return [{'role': 'user', 'content': f'{example.input} It is {time.time()}.'}]",
        "determinism",
    ),
}  # fmt: skip
GOOD = {
    "exact answers": "pass",
    "answers in tags, the last one counts": (
        TAGGED
        + "    "
        + SCORE
        + "found = re.findall('<answer>(.*?)</answer>', text or '')\n        "
        + "return RewardResult(float(bool(found) and found[-1] == example.output))"
    ),
    "the last number counts": (
        SCORE
        + "found = re.findall('[0-9]+', text or '')\n        "
        + "return RewardResult(float(bool(found) and found[-1] == example.output))"
    ),
    "the first line counts": (
        SCORE + "return RewardResult(float((text or '').strip().split('\\n')[0] == example.output))"
    ),
    "a little pay for the form": (
        SCORE
        + "right = (text or '').strip() == example.output\n        "
        + "form = 0.1 * (text or '').strip().isdigit()\n        "
        + "return RewardResult(1.0 if right else form, success=right)"
    ),
    "pay for being near": (
        SCORE
        + "right = (text or '').strip() == example.output\n        "
        + "is_number = re.fullmatch('[0-9]{1,9}', (text or '').strip())\n        "
        + "near = 0.4 / (1 + abs(int(text) - int(example.output))) if is_number else 0.0\n        "
        + "return RewardResult(1.0 if right else near, success=right)"
    ),
    "yes or no": (
        "def __init__(self):\n"
        "        super().__init__()\n"
        "        for name in ('dataset', 'eval_dataset'):\n"
        "            rows = [dataclasses.replace(t, output=('yes', 'no')[i % 2])\n"
        "                    for i, t in enumerate(getattr(self, name))]\n"
        "            setattr(self, name, rows)"
    ),
    "a negative reward for a wrong answer": (
        SCORE
        + "right = (text or '').strip() == example.output\n        "
        + "return RewardResult(1.0 if right else -1.0, success=right)"
    ),
    "one task whose answer a junk text happens to be": (
        "def __init__(self):\n"
        "        super().__init__()\n"
        "        first = dataclasses.replace(self.dataset[0], output='asdf qwer zxcv')\n"
        "        self.dataset = [first, *self.dataset[1:]]"
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_environment_is_refused_by_the_check_for_it(tmp_path: Path, name: str) -> None:
    body, probe = BAD[name]
    report = await check(environment_folder(tmp_path, f"class Sample(Addition):\n    {body}\n"))
    failed = {each.name: each for each in report.probes if each.passed is False}
    assert probe in failed, [(each.name, each.passed, each.evidence) for each in report.probes]
    assert failed[probe].fix


@pytest.mark.parametrize("name", GOOD)
async def test_a_good_environment_passes(tmp_path: Path, name: str) -> None:
    folder = environment_folder(tmp_path, f"class Sample(Addition):\n    {GOOD[name]}\n")
    report = await check(folder)
    assert report.passed, [each for each in report.probes if each.passed is False]
