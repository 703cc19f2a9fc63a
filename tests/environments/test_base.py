"""environments/base.py: datasets and defaults of the contract."""

from pathlib import Path

import pytest

from environments import (
    DatasetError,
    EnvironmentEpisode,
    EnvironmentSingleTurn,
    RewardResult,
    TaskExample,
    load_dataset,
)
from environments.process.host import EnvironmentFault, EnvironmentHost


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"input": "a"}\n{"input": "b"\n', "rows.jsonl line 2: not JSON"),
        (b'{"input": "a"}\n' + b"[" * 100_000, "rows.jsonl line 2: not JSON: maximum recursion depth"),
        (b'{"input": "a"}\n\n[1]\n', "rows.jsonl line 3: expected an object, got list"),
        (b'{"input": "a"}\n{"question": "b"}\n', "rows.jsonl line 2: 'input' must be a string, got None"),
        (b'{"input": 3}\n', "rows.jsonl line 1: 'input' must be a string, got 3"),
        (b'{"input": "a", "metadata": "easy"}\n', "rows.jsonl line 1: 'metadata' must be an object, got 'easy'"),
        (
            b'{"input": "a", "id": "x"}\n{"input": "b", "id": "x"}\n',
            "rows.jsonl line 2: id 'x' is already used on line 1",
        ),
        (b'{"input": "a"}\n{"input": "a"}\n', "rows.jsonl line 2: id "),
        (b'{"input": "a"}\n{"input": "\xff"}\n', "rows.jsonl line 2: not UTF-8"),
        (b"", "rows.jsonl: no rows"),
        (b"\n \n", "rows.jsonl: no rows"),
    ],
)
def test_a_bad_dataset_is_refused_with_file_and_line(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=expected):
        load_dataset(tmp_path / "rows.jsonl")


def test_a_missing_dataset_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match=r"rows.jsonl: there is no such file in .*own folder"):
        load_dataset(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    for path in ("rows.jsonl", tmp_path / "rows.jsonl"):
        with pytest.raises(DatasetError, match=r"there is no such file in \S+$"):
            load_dataset(path)


def test_rows_keep_their_ids_and_get_stable_ones(tmp_path: Path) -> None:
    rows = '{"input": "a", "output": "A", "id": 7, "metadata": {"k": 1}, "group": 3}\r\n{"input": "line\u2028break"}\n'
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    first, second = load_dataset(tmp_path / "rows.jsonl")
    assert (first.id, first.input, first.output, first.metadata) == ("7", "a", "A", {"k": 1})
    assert (first.group, second.group) == ("3", None) and second.input == "line\u2028break"
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8-sig")
    assert load_dataset(tmp_path / "rows.jsonl") == [first, second]
    assert second.id == load_dataset(tmp_path / "rows.jsonl")[1].id


@pytest.mark.parametrize(
    ("result", "success"),
    [
        (RewardResult(0.0), False), (RewardResult(0.9), False), (RewardResult(0.1 + 0.2 + 0.7), True),
        (RewardResult(1.0, error="broken"), False), (RewardResult(0.0, success=True), True),
        (RewardResult(1.0, success=False), False),
    ],
)  # fmt: skip
def test_success_is_given_or_derived(result: RewardResult, success: bool) -> None:
    assert result.resolved_success() is success


class Upper(EnvironmentSingleTurn):
    def build_prompt_messages(self, example):
        return [{"role": "user", "content": example.input}]

    def score_response(self, example, response_text):
        return RewardResult(float(response_text == example.output))

    def normalize_response_text(self, example, response_text):
        return response_text.strip().upper()


TASK = TaskExample({}, "shout", output="HEY")


def test_a_single_turn_environment_is_an_episode_of_one_turn() -> None:
    environment = Upper()
    assert environment.start_episode(TASK) == [{"role": "user", "content": "shout"}]
    assert environment.max_episode_turns(TASK) == 1
    step = environment.step_episode(TASK, [], " hey ")
    assert (step.done, step.final_response_text) == (True, "HEY")
    assert environment.score_episode(TASK, EnvironmentEpisode([], "HEY")).score == 1.0


async def test_a_scorer_that_would_never_be_called_is_refused_when_the_environment_loads(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(
        "from environments import EnvironmentSingleTurn\n"
        "class Batched(EnvironmentSingleTurn):\n"
        "    def score_responses(self, example, texts): return []\n"
    )
    with pytest.raises(
        EnvironmentFault, match=r"Batched\.score_responses would never be called.*score_response"
    ) as fault:
        await EnvironmentHost.start(tmp_path)
    assert fault.value.code == "environment_invalid"


def test_a_scorer_of_many_that_its_own_scorer_of_one_calls_is_nobodys_business() -> None:
    class Batched(EnvironmentSingleTurn):
        def build_prompt_messages(self, example):
            return []

        def score_response(self, example, response_text):
            return self.score_responses(example, [response_text])[0]

        def score_responses(self, example, texts):
            return [RewardResult(0.5) for _ in texts]

    class Heir(Batched): ...

    assert Heir().score_response(TASK, "").score == 0.5
    mixin = type("Mixin", (), {"score_responses": lambda self, example, texts: []})
    with pytest.raises(TypeError, match="would never be called"):
        type("Mixed", (mixin, EnvironmentSingleTurn), {})


@pytest.mark.parametrize(
    ("output", "gold"),
    [
        ("text", [{"role": "assistant", "content": "text"}]),
        ({"a": 1}, [{"role": "assistant", "content": '{"a": 1}'}]),
        ({"messages": [{"role": "assistant", "content": "x"}]}, [{"role": "assistant", "content": "x"}]),
        ([{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "x"}]),
    ],
)
def test_gold_messages_are_made_from_the_output(output, gold) -> None:
    assert Upper().sft_completion(TaskExample({}, "q", output=output)) == gold


def test_a_task_without_gold_output_says_what_to_override() -> None:
    with pytest.raises(ValueError, match="override sft_completion"):
        Upper().sft_completion(TaskExample({}, "q"))
