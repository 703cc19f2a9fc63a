"""Several environments in one run: the order of their tasks, and a real worker that learns and measures both."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_mcp.protocol.run_folder import RunFolder
from tests.attempts import Attempt, held, make_run
from tests.places import VOWELS
from worker.rollouts.task_choice import CYCLE, Source, examples_of

RATIOS = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@given(RATIOS, st.integers(1, 9), st.integers(0, 3000))
def test_every_stretch_of_a_run_has_the_ratio_of_its_environments(ratios: list[int], count: int, step: int) -> None:
    sources = {f"e{number}": Source(7 + number, float(ratio)) for number, ratio in enumerate(ratios)}
    drawn = Counter(example.environment for example in examples_of(step + 1, 40 * count, sources, 0))
    for number, ratio in enumerate(ratios):
        due = 40 * count * ratio / sum(ratios)
        assert abs(drawn[f"e{number}"] - due) <= 2 * len(ratios)


def test_a_cycle_has_the_ratio_exactly_and_each_environment_passes_through_its_tasks() -> None:
    sources = {"a": Source(10, 1.0), "b": Source(6, 3.0)}
    examples = [example for step in range(1, 2 * CYCLE // 8 + 1) for example in examples_of(step, 8, sources, 5)]
    for cycle in (examples[:CYCLE], examples[CYCLE:]):
        assert Counter(example.environment for example in cycle) == {"a": CYCLE // 4, "b": 3 * CYCLE // 4}
    for at in range(0, len(examples), 4):
        assert Counter(example.environment for example in examples[at : at + 4]) == {"a": 1, "b": 3}
    for name, source in sources.items():
        own = [example.number for example in examples if example.environment == name]
        alone = [example.number for example in examples_of(1, len(own), {"": source}, 5)]
        assert own == alone, "as in a run on it alone"
        for start in range(0, len(own) - source.total, source.total):
            assert sorted(own[start : start + source.total]) == list(range(source.total))


FIELDS: dict[str, Any] = {"steps": 4, "group_size": 4, "max_tokens": 8, "eval_before": True, "eval_after": True}
DIGITS = """
import os
def score_episode(self, example, episode):
    text = "".join(message["content"] for message in episode.messages if message["role"] == "assistant")
    share = sum(letter.isdigit() for letter in text) / max(1, len(text))
    secrets = sorted(name for name in os.environ if name.endswith("_KEY"))
    return RewardResult(share, success=share > 0.1, reason=" ".join(secrets))
Vowels.score_episode = score_episode
"""


def environments(folder: Path, saved: Path) -> tuple[list[dict[str, Any]], Path]:
    """Two of them as job.json has them, and the file for which the episodes of the first wait."""
    first, flag = held(folder / "vowels", saved=saved)
    second = folder / "digits"
    shutil.copytree(VOWELS, second)
    with (second / "environment.py").open("a") as file:
        file.write(DIGITS)
    common = {"digest": "0", "owner": "local"}
    own = {"ratio": 3.0, "args": {"question": "Count", "held_out": 12}, "secrets": ["DIGITS_KEY"]}
    parts = [
        {"name": "vowels", "path": str(first), "ratio": 1.0, "args": {}, "secrets": ["VOWELS_KEY"], **common},
        {"name": "digits", "path": str(second), **own, **common},
    ]
    return parts, flag


def tried(run: RunFolder, step: int) -> list[tuple[str, float]]:
    return [(row["task_id"], row["reward"]) for row in run.rollouts(step)]


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_mixture_goes_on_with_the_data_of_an_undisturbed_one_and_measures_both(tiny_model: Path, tmp_path):
    parts, flag = environments(tmp_path, tmp_path / "run" / "checkpoints" / "2")
    flag.unlink()
    fields = {**FIELDS, "environment": Path(parts[0]["path"]), "job": {"mixture": parts}, "mixture": {"digits": 3}}
    fields |= {"secrets": ["VOWELS_KEY", "DIGITS_KEY"], "env_timeout_s": 600}
    keys = {"VOWELS_KEY": "v" * 20, "DIGITS_KEY": "d" * 20}
    whole = make_run(tmp_path / "whole", tiny_model, **fields)
    Attempt(whole, one_by_one=True, **keys).ended()
    flag.touch()
    run = make_run(tmp_path / "run", tiny_model, **fields)
    with Attempt(run, one_by_one=True, **keys) as first:
        first.wait_until(lambda: 2 in run.checkpoints.steps())
    assert not list(run.rollouts(3))
    flag.unlink()
    Attempt(run, 2, one_by_one=True, **keys).ended()
    for step in (1, 2, 3, 4):
        assert tried(run, step) == tried(whole, step)
        names = [task.partition("/")[0] for task, _ in tried(run, step)]
        assert Counter(names) == {"vowels": 4, "digits": 12}
        assert all(len({*group}) == 1 for group in zip(*[iter(names)] * 4, strict=True)), "a group is of one task"
        metrics = run.metrics(step)["metrics"]
        means = [metrics[f"{name}:reward/mean"] for name in ("vowels", "digits")]
        assert metrics["reward/mean"] == pytest.approx((means[0] + 3 * means[1]) / 4)
        assert metrics["vowels:groups/uniform_share"] == 0
    reasons = {row["reason"] for row in run.rollouts(1) if row["task_id"].startswith("digits/")}
    assert reasons == {"DIGITS_KEY"}, "it sees its own secret and no other"
    trained = "adapter_model.safetensors"
    assert run.checkpoints.manifest(4)["files"][trained] == whole.checkpoints.manifest(4)["files"][trained]
    for step in (0, 4):
        evaluation = run.evaluation(step)
        tasks = [row["task_id"] for row in evaluation["rollouts"]]
        assert tasks == [*(f"vowels/v{n}" for n in range(5)), *(f"digits/v{n}" for n in range(12))]
        summary = evaluation["summary"]
        assert (summary["n"], summary["vowels:n"], summary["digits:n"]) == (17, 5, 12)
        solved = [row["success"] for row in evaluation["rollouts"]]
        assert summary["digits:success"] == sum(solved[5:]) / 12
        assert "constant_success" not in summary and summary["digits:constant_n"] == 12
