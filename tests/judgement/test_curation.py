import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.same_task import task_of
from flash_mcp.judgement.curation import (
    Curated,
    CurationPlan,
    HeldBack,
    Select,
    StoredAttempt,
    compile_filter,
    curate,
    is_held_back,
)
from flash_mcp.state.datasets import dump_rows, load_rows

NOTHING = HeldBack()
FAILURE = {"code": "env_error", "what": "it raised"}


def attempt(
    index: int, task_id: str = "t0", reward: float = 1.0, said: str | None = None, **values: Any
) -> StoredAttempt:
    """An attempt at a one-turn task; correct from a reward of 1 on."""
    answer = f"answer {index}" if said is None else said
    messages = [{"role": "user", "content": f"do {task_id}"}, {"role": "assistant", "content": answer}]
    fields = {"step": 1, "success": reward >= 1, "messages": messages, "turns": 1, **values}
    return StoredAttempt(
        run_id=fields.pop("run_id", "run-a"), source="rollouts", index=index, task_id=task_id, reward=reward, **fields
    )


attempts = st.lists(
    st.builds(
        attempt,
        st.integers(0, 12),
        st.sampled_from(["t0", "t1", "t2", "t3"]),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([None, "same", "", "long " * 9]),
        run_id=st.sampled_from(["run-a", "run-b"]),
        split=st.sampled_from(["train", "eval"]),
        error=st.sampled_from([None, FAILURE]),
        truncated=st.booleans(),
    ),
    max_size=40,
)
plans = st.builds(
    CurationPlan,
    keep=st.sampled_from([None, "solved", "pass@3 > 0.3", "n >= 2 and avg < 1"]).map(
        lambda text: compile_filter(text) if text else None
    ),
    select=st.sampled_from(["correct", "best", "best-n", "shortest", "all"]),
    max_per_task=st.sampled_from([None, 1, 3]),
    success_threshold=st.sampled_from([None, 0.5]),
    holdout=st.sampled_from([0.0, 0.5]),
    deduplicate=st.booleans(),
    allow_eval_tasks=st.booleans(),
)


ALIKE = [attempt(0, said="same"), attempt(1, reward=2.0, said="same"), attempt(2)]


def keys(curated: Curated) -> tuple[list[Any], list[Any]]:
    return [each.key for each in curated.train], [each.key for each in curated.holdout]


def told_apart(some: list[StoredAttempt]) -> list[StoredAttempt]:
    """One attempt for each key."""
    return list({each.key: each for each in some}.values())


@given(attempts, plans)
def test_every_attempt_and_every_task_is_accounted_for(some: list[StoredAttempt], plan: CurationPlan):
    distinct = told_apart(some)
    curated = curate([*distinct, *distinct[:3]], plan, NOTHING)
    counts, rows = curated.counts, curated.train + curated.holdout
    assert counts.attempts - counts.repeated == len(distinct) and counts.repeated == len(distinct[:3])
    assert counts.eval_attempts == sum(each.split == "eval" for each in distinct)
    assert counts.tasks == counts.always_solved + counts.sometimes_solved + counts.never_solved
    done = counts.insufficient + counts.filtered + counts.unselected + counts.train_tasks + counts.holdout_tasks
    assert counts.tasks == done
    assert len({each.key for each in rows}) == len(rows)
    assert all(each.learnable == [each] and not each.error for each in rows)
    assert counts.conversations >= counts.truncated + counts.duplicates + len(rows)
    if not plan.allow_eval_tasks:
        assert all(each.split == "train" for each in rows)
    if plan.select in ("correct", "shortest"):
        assert all(plan.is_correct(each) for each in rows)
    if plan.max_per_task:
        assert max(Counter(each.task for each in rows).values(), default=0) <= plan.max_per_task
    if plan.deduplicate:
        assert len({str(each.messages) for each in rows}) == len(rows)
    assert not {each.task_id for each in curated.train} & {each.task_id for each in curated.holdout}


@pytest.mark.slow
@given(attempts, plans, st.randoms())
def test_neither_order_nor_repetition_changes_the_result(
    some: list[StoredAttempt], plan: CurationPlan, chance: random.Random
):
    some = told_apart(some)
    shuffled = [*some, *some]
    chance.shuffle(shuffled)
    first, again = curate(some, plan, NOTHING), curate(shuffled, plan, NOTHING)
    assert keys(first) == keys(again) and again.counts.repeated == len(some)


@given(attempts, st.sampled_from([0.0, 0.2, 0.7]))
def test_a_task_stays_on_its_side_when_attempts_are_added(some: list[StoredAttempt], share: float):
    plan = CurationPlan(select="all", holdout=share)
    some = told_apart(some)
    before, after = (curate(part, plan, NOTHING) for part in (some[: len(some) // 2], some))
    assert {each.task for each in before.holdout} <= {each.task for each in after.holdout}
    assert not {each.task for each in before.holdout} & {each.task for each in after.train}


def test_the_holdout_is_about_the_share_that_was_asked_for():
    assert 0.18 < sum(is_held_back(f"task-{number}", 0.2) for number in range(5000)) / 5000 < 0.22
    assert not any(is_held_back(f"task-{number}", 0.0) for number in range(100))
    curated = curate([attempt(number, f"t{number}") for number in range(40)], CurationPlan(holdout=0.5), NOTHING)
    assert (curated.counts.train_tasks, curated.counts.holdout_tasks) == (len(curated.train), len(curated.holdout))
    assert curated.counts.tasks == 40 and len(curated.train) > 9 < len(curated.holdout)


@pytest.mark.parametrize(
    ("select", "max_per_task", "chosen"),
    [
        ("correct", None, {0, 1, 2}),
        ("correct", 1, {0}),
        ("best", None, {0}),
        ("best-n", 2, {0, 1}),
        ("best-n", 4, {0, 1, 2}),
        ("shortest", None, {2}),
        ("shortest", 2, {2, 1}),
        ("all", None, {0, 1, 2, 3, 4}),
    ],
)
def test_each_selection_takes_what_it_says(select: Select, max_per_task: int | None, chosen: set[int]):
    rewards = [3.0, 2.0, 1.0, 0.5, 0.0]
    texts = ["a long answer", "shorter", "short", "s", ""]
    some = [
        attempt(n, reward=reward, said=text or "x") for n, (reward, text) in enumerate(zip(rewards, texts, strict=True))
    ]
    curated = curate(some, CurationPlan(select=select, max_per_task=max_per_task), NOTHING)
    assert {each.index for each in curated.train} == chosen


@pytest.mark.parametrize(
    ("keep", "some", "fields", "chosen", "counted"),
    [
        # One threshold decides for the filter and for the selection.
        ("solved", [attempt(0, reward=0.6), attempt(1, "t1", reward=0.4)], {}, [], {"filtered": 2}),
        (
            "solved",
            [attempt(0, reward=0.6), attempt(1, reward=0.4), attempt(2, "t1", reward=0.4)],
            {"success_threshold": 0.5},
            [0],
            {"filtered": 1, "sometimes_solved": 1},
        ),
        # What the environment failed counts neither for nor against its task.
        ("avg == 1 and n == 1", [attempt(0), attempt(1, reward=0.0, error=FAILURE)], {}, [0], {"errors": 1}),
        (
            "pass@4 > 0",
            [attempt(n) for n in range(3)] + [attempt(n, "t1") for n in range(3, 7)],
            {},
            [3, 4, 5, 6],
            {"insufficient": 1, "filtered": 0},
        ),
        # An answer that was cut off counts for its task and is not learnt.
        ("n == 3", [attempt(0), attempt(1, truncated=True), attempt(2, said=" ")], {}, [0], {"truncated": 2}),
        # Tasks of two splits with one id are two.
        (
            None,
            [attempt(0, reward=0.0), attempt(1, split="eval")],
            {"select": "all", "allow_eval_tasks": True},
            [0, 1],
            {"never_solved": 1, "always_solved": 1},
        ),
        (None, ALIKE, {}, [1, 2], {"duplicates": 1}),  # those rewarded best stay
        (None, ALIKE, {"deduplicate": False}, [0, 1, 2], {"duplicates": 0}),
    ],
)
def test_attempts_count_for_their_task_and_are_chosen(
    keep: str | None, some: list[StoredAttempt], fields: dict[str, Any], chosen: list[int], counted: dict[str, int]
):
    curated = curate(some, CurationPlan(keep=compile_filter(keep) if keep else None, **fields), NOTHING)
    assert sorted(each.index for each in curated.train) == chosen
    assert {name: getattr(curated.counts, name) for name in counted} == counted


# -- agents ----------------------------------------------------------------------------------------


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def team(
    index: int, task_id: str = "t0", *, works: str = "worked", cut: tuple[int, ...] = (), **values: Any
) -> StoredAttempt:
    """A merger's conversation, with a planner's and a worker's beside it; the worker has a tool."""
    calls = [
        {"number": number, "conversation": conversation, "finish": "length" if conversation in cut else "stop"}
        for number, conversation in enumerate((1, 2, 2, 0))
    ]
    branches = [
        {"after": 0, "turns": 1, "messages": said("plan", "a plan"), "tools": []},
        {"after": 0, "turns": 2, "messages": said("work", works, "more", f"{task_id} more"), "tools": [{"name": "f"}]},
    ]
    messages = said(f"merge {task_id}", f"merged {index}")
    parts = {"messages": messages, "branches": branches, "calls": calls, "turns": 4, "truncated": bool(cut), **values}
    return attempt(index, task_id, **parts)


def test_every_conversation_of_an_agents_attempt_is_a_row_with_its_own_turns_and_tools():
    curated = curate([team(0)], CurationPlan(), NOTHING)
    rows = [item.row() for item in curated.train]
    assert [(row["messages"][0]["content"], row["prompt_messages"]) for row in rows] == [
        ("merge t0", 1),
        ("plan", 1),
        ("work", 1),
    ]
    assert [row.get("tools") for row in rows] == [None, None, [{"name": "f"}]]
    assert [row["provenance"]["conversation"] for row in rows] == [0, 1, 2]
    counts = curated.counts
    assert (counts.attempts, counts.conversations, counts.train_rows, counts.train_tasks) == (1, 3, 3, 1)


def test_a_branch_is_learnt_from_its_own_first_turn_on():
    branch = {"after": 2, "turns": 1, "messages": said("again", "b"), "tools": []}
    calls = [{"number": number, "conversation": number == 1, "finish": "stop"} for number in range(3)]
    some = attempt(0, messages=said("q", "a", "on", "c"), branches=[branch], calls=calls, turns=3)
    rows = [item.row() for item in curate([some], CurationPlan(), NOTHING).train]
    assert rows[0]["messages"] == said("q", "a", "on", "c") and rows[0]["prompt_messages"] == 1
    assert rows[1]["messages"] == said("q", "a", "again", "b") and rows[1]["prompt_messages"] == 3


def test_conversations_that_repeat_are_learnt_once_and_those_cut_off_not_at_all():
    some = [team(0), team(1, reward=2.0), team(2, "t1", cut=(2,))]
    curated = curate(some, CurationPlan(), NOTHING)
    seen = [(item.index, item.conversation) for item in curated.train]
    # The plan and the work of attempt 1, which earned most; attempt 2's plan is the same.
    assert sorted(seen) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    counts = curated.counts
    assert (counts.conversations, counts.truncated, counts.duplicates) == (9, 1, 3)
    all_of_them = curate(some, CurationPlan(deduplicate=False), NOTHING)
    assert (all_of_them.counts.train_rows, all_of_them.counts.duplicates) == (8, 0)


def test_the_best_attempt_keeps_what_a_better_one_of_another_task_does_not_teach():
    some = [team(0, reward=2.0, success=False), team(1)]
    curated = curate(some, CurationPlan(), NOTHING)
    assert sorted((item.index, item.conversation) for item in curated.train) == [(1, 0), (1, 1), (1, 2)]


def test_an_eval_prompt_in_any_conversation_keeps_the_attempt_out():
    held_out = HeldBack(prompts=[task_of([{"content": "Work"}])])
    curated = curate([team(0), attempt(1)], CurationPlan(), held_out)
    assert [item.index for item in curated.train] == [1] and curated.counts.eval_attempts == 1


# -- contamination ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_out", "split", "refused"),
    [
        (HeldBack(), "train", False),
        (HeldBack(), "eval", True),
        (HeldBack(ids=frozenset({"t0"})), "train", True),
        (HeldBack(ids=frozenset({"t0"}), train_questions={"t0": "another"}), "train", False),
        (HeldBack(questions=frozenset({"q"}), train_questions={"t0": "q"}), "train", True),
        (HeldBack(prompts=[task_of([{"content": " DO  t0\n"}])]), "train", True),
        (HeldBack(prompts=[task_of([{"content": "do t00"}])]), "train", False),
    ],
    ids=["other", "its split", "its id", "numbered alike", "its question", "its prompt", "a longer prompt"],
)
def test_a_task_of_the_eval_split_is_known_by_any_of_its_marks(held_out: HeldBack, split: str, refused: bool):
    curated = curate([attempt(0, split=split)], CurationPlan(), held_out)
    assert (len(curated.train), curated.counts.eval_tasks) == (int(not refused), int(refused))
    allowed = curate([attempt(0, split=split)], CurationPlan(allow_eval_tasks=True), held_out)
    assert (len(allowed.train), allowed.counts.eval_tasks) == (1, int(refused))


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_ends_with_the_last_answer_and_says_where_it_came_from():
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "cut off here")]
    messages = [{"role": role, "content": text} for role, text in said]
    row = attempt(7, step=3, messages=messages, turns=2).row()
    assert row["messages"] == messages[:4]
    assert row["provenance"] == {
        "run_id": "run-a", "source": "rollouts", "step": 3, "index": 7, "conversation": 0, "task_id": "t0",
        "split": "train", "reward": 1.0, "success": True,
    }  # fmt: skip


@given(st.lists(st.builds(attempt, st.integers(0, 9), st.text(max_size=5), said=st.text(max_size=9).map("{}.".format))))
def test_rows_survive_being_written_and_read_whatever_they_say(some: list[StoredAttempt]):
    rows = [each.row() for each in some]
    assert list(load_rows(dump_rows(rows))) == rows
