"""Which attempts to fine-tune on: at which tasks, which of them, and which are held back.

    curated = curate(attempts, Plan(keep=compile_filter("pass@4 < 0.9")), held_out)

Pure functions. Nothing depends on the order of the attempts, on chance or on the clock: the same
attempts and plan always give the same dataset."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from environments import same_task
from flash_mcp.judgement.statistics import pass_at_k
from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import Json, Rollout

# -- the language in which curate selects tasks: a boolean expression over one task's attempts -----
#     keep = compile_filter("pass@4 >= 0.25 and not avg > 0.9")
#     keep(TaskScores(n=8, n_correct=3, avg=0.5, best=1.0, worst=0.0))  # True
#
# Python's `ast` parses it, so the precedence is Python's. Only nodes of a short list are computed,
# by `_value`: nothing of the text is ever executed.

NUMBERS = ("avg", "best", "worst", "n", "n_correct")
MAX_CHARACTERS = 500
MAX_DEPTH = 40
PASS_AT = re.compile(r"\bpass\s*@\s*([1-9]\d{0,3})(?![\w.])", re.ASCII)
FORM = (
    "compare avg, best, worst, n, n_correct or pass@k (k from 1 to 9999) with a number, as in "
    "`pass@4 >= 0.25 and n >= 4`; `solved` needs no operator; and, or, not and parentheses join "
    "them; + - * compute"
)
OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}


@dataclass(frozen=True)
class TaskScores:
    """One or more attempts at one task; `avg`, `best` and `worst` are rewards."""

    n: int
    n_correct: int
    avg: float
    best: float
    worst: float

    @property
    def solved(self) -> bool:
        return self.n_correct > 0

    def pass_at(self, k: int) -> float | None:
        """None if fewer than k attempts were made."""
        if self.n >= k:
            return pass_at_k(self.n, self.n_correct, k)
        return None


@dataclass(frozen=True)
class TaskFilter:
    """A compiled filter. Called with a task's scores it says whether the task passes.

    None means that this cannot be told: the task has fewer attempts than a pass@k needs, and the
    rest of the filter does not decide without it."""

    text: str
    _tree: ast.expr

    def __call__(self, scores: TaskScores) -> bool | None:
        return _value(self._tree, scores)


def compile_filter(text: str) -> TaskFilter:
    """FlashError(invalid_argument), which says what is expected, for a text that is no filter."""
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters, and {MAX_CHARACTERS} are the most")
        source = " ".join(PASS_AT.sub(r"pass_\1", text).split())
        tree = ast.parse(source, mode="eval").body
        if not _is_truth(tree, 0):
            raise ValueError(f"it is a number: compare it, as in `{_shown(tree)} > 0.5`")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"this filter cannot be used: {getattr(error, 'msg', error)}"
        raise FlashError("invalid_argument", what, filter=text[:80], fix=FORM) from error
    return TaskFilter(text, tree)


def _is_truth(node: ast.expr, depth: int) -> bool:
    """Whether the node is true or false, not a number. ValueError if it is neither."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.BoolOp(values=parts) | ast.UnaryOp(op=ast.Not(), operand=ast.expr() as parts):
            kind, parts = "true or false", parts if isinstance(parts, list) else [parts]
        case ast.Compare(left=left, ops=ops, comparators=rest) if {*map(type, ops)} <= {
            *OPERATIONS
        }:
            kind, parts = "a number", [left, *rest]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            kind, parts = "a number", [left, right]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            kind, parts = "a number", [operand]
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if not math.isfinite(value):
                raise ValueError(f"{_shown(node)} is too large")
            return False
        case ast.Name(id=name) if name in (*NUMBERS, "solved") or re.fullmatch(
            "pass_[1-9][0-9]{0,3}", name
        ):
            return name == "solved"
        case ast.Name(id=name):
            raise ValueError(f"there is no {name!r}{did_you_mean(name, (*NUMBERS, 'solved'))}")
        case _:
            raise ValueError(f"`{_shown(node)}` is not part of the language")
    for part in parts:
        if _is_truth(part, depth + 1) != (kind == "true or false"):
            raise ValueError(f"`{_shown(part)}` should be {kind}")
    return kind == "true or false" or isinstance(node, ast.Compare)


def _value(node: ast.expr, scores: TaskScores) -> Any:
    match node:
        case ast.BoolOp(op=op, values=parts):
            truths = [_value(part, scores) for part in parts]
            decides = isinstance(op, ast.Or)
            if decides in truths:
                return decides
            return None if None in truths else not decides
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = pairwise(_value(side, scores) for side in [left, *rest])
            truths = [_computed(op, *pair) for op, pair in zip(ops, sides, strict=True)]
            if False in truths:
                return False
            return None if None in truths else True
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _value(left, scores), _value(right, scores))
        case ast.UnaryOp(op=op, operand=operand):
            return _computed(op, _value(operand, scores))
        case ast.Name(id=name) if name.startswith("pass_"):
            return scores.pass_at(int(name.removeprefix("pass_")))
        case ast.Name(id=name):
            return getattr(scores, name)
        case _:
            return float(ast.literal_eval(node))


def _computed(op: ast.AST, *values: Any) -> Any:
    return None if None in values else OPERATIONS[type(op)](*values)


def _shown(node: ast.expr) -> str:
    return re.sub(r"\bpass_(\d+)", r"pass@\1", ast.unparse(node))


Select = Literal["correct", "best", "best-n", "shortest", "all"]
Source = Literal["rollouts", "evaluations", "recordings"]
Task = tuple[str, str]
"""Split and id."""
Key = tuple[str, Source, int, int, int]
PROVENANCE = (
    *("run_id", "source", "step", "index", "conversation"),
    *("task_id", "split", "reward", "success"),
)


@dataclass(frozen=True, kw_only=True)
class StoredAttempt(Rollout):
    """A rollout of a run, or one conversation of it: `key` identifies it."""

    run_id: str
    source: Source

    @property
    def task(self) -> Task:
        """An id alone is not enough: train and eval rows may be numbered alike."""
        return self.split, self.task_id

    @property
    def key(self) -> Key:
        return self.run_id, self.source, self.step, self.index, self.conversation

    @property
    def learnable(self) -> list[Self]:
        """Its conversations to learn from: a cut-off one would teach to stop in the middle."""
        results: list[Self] = []
        for item in self.conversations:
            if not item.truncated and "".join(item.answers).strip():
                results.append(item)
        return results

    def row(self) -> Json:
        """The conversation as a line of a dataset, up to its last answer."""
        messages = self.messages
        while messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        tools = {"tools": self.tools} if self.tools else {}
        provenance = {name: getattr(self, name) for name in PROVENANCE}
        if not self.is_scored:
            provenance["reward"] = None
        return {
            "messages": messages,
            **tools,
            "prompt_messages": self.prompt_messages,
            "provenance": provenance,
        }


@dataclass(frozen=True)
class CurationPlan:
    """What to read and what to keep; filter and selection share `success_threshold`."""

    source: Source | None = None
    """None: both."""
    since_step: int = 0
    keep: TaskFilter | None = None
    select: Select = "correct"
    max_per_task: int | None = None
    success_threshold: float | None = None
    holdout: float = 0.0
    deduplicate: bool = True
    allow_eval_tasks: bool = False

    def is_correct(self, attempt: StoredAttempt) -> bool:
        """As the environment judged it, or by its reward where a threshold is given."""
        if self.success_threshold is None:
            return attempt.success
        return attempt.is_scored and attempt.reward >= self.success_threshold

    def to_dict(self) -> Json:
        values = dict(vars(self))
        keep: TaskFilter | None = values.pop("keep")
        return {"filter": keep.text if keep else None, **values}


class Counts(BaseModel):
    """Where every attempt and every task went."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    attempts: int = 0
    """Attempts read."""
    repeated: int = 0
    """Left out: the same attempt a second time."""
    eval_attempts: int = 0
    """At tasks of the eval split; left out unless allowed."""
    eval_tasks: int = 0
    """Those tasks."""
    errors: int = 0
    """Left out: environment code failed, which says nothing of the model."""
    tasks: int = 0
    """Tasks with attempts that count."""
    always_solved: int = 0
    """Tasks whose attempts were all correct."""
    sometimes_solved: int = 0
    """Tasks of which some attempts were correct."""
    never_solved: int = 0
    """Tasks without a correct attempt."""
    unrated: int = 0
    """Tasks without a reward: nobody rated what was recorded."""
    insufficient: int = 0
    """Tasks left out: fewer attempts than the filter's pass@k needs, or none with a reward."""
    filtered: int = 0
    """Tasks left out by the filter."""
    unselected: int = 0
    """Tasks that passed the filter without an attempt to select."""
    conversations: int = 0
    """Conversations of the attempts at tasks that passed: an agent may have several in one."""
    truncated: int = 0
    """Of these left out: cut off or empty answers."""
    duplicates: int = 0
    """Of these left out: word for word another one."""
    train_tasks: int = 0
    """Tasks to train on."""
    train_rows: int = 0
    """Conversations to train on."""
    holdout_tasks: int = 0
    """Tasks held back."""
    holdout_rows: int = 0
    """Conversations held back."""
    used: list[str] = Field(default_factory=list, exclude_if=operator.not_)
    """Columns of rows that were read."""
    ignored: dict[str, int] = Field(default_factory=dict, exclude_if=operator.not_)
    """Columns and fields of rows that change nothing that is learnt, and how many have each."""


@dataclass(frozen=True)
class Curated:
    train: list[StoredAttempt]
    holdout: list[StoredAttempt]
    counts: Counts
    left_out: list[StoredAttempt]
    """An attempt at each eval task."""


def curate(attempts: Iterable[StoredAttempt], plan: CurationPlan, held_out: HeldBack) -> Curated:
    counts = Counts()
    tasks, eval_tasks = _by_task(attempts, plan, held_out, counts)
    learnable: dict[Task, list[StoredAttempt]] = {}
    for task in sorted(tasks):
        if _passes(tasks[task], plan, counts):
            learnable[task] = []
            for item in tasks[task]:
                counts.conversations += len(item.conversations)
                if item.learnable:
                    learnable[task].append(item)
    left = _size(learnable)
    counts.truncated = counts.conversations - left
    if plan.deduplicate:
        # Whole attempts first: what is selected among them has to differ.
        learnable = _without_duplicates(learnable)
        counts.duplicates = left - _size(learnable)
    selected: dict[Task, list[StoredAttempt]] = {}
    for task, candidates in learnable.items():
        selected[task] = []
        for item in _select(candidates, plan):
            selected[task] += item.learnable
    if plan.deduplicate:
        left = _size(selected)
        selected = _without_duplicates(selected)
        counts.duplicates += left - _size(selected)
    train: list[StoredAttempt] = []
    holdout: list[StoredAttempt] = []
    for task, chosen in selected.items():
        if not chosen:
            counts.unselected += 1
        elif is_held_back(task[1], plan.holdout):
            holdout += chosen
            counts.holdout_tasks += 1
        else:
            train += chosen
            counts.train_tasks += 1
    counts.train_rows = len(train)
    counts.holdout_rows = len(holdout)
    return Curated(train, holdout, counts, list(eval_tasks.values()))


def _size(tasks: Mapping[Task, list[StoredAttempt]]) -> int:
    return sum(len(item.learnable) for attempts in tasks.values() for item in attempts)


def is_held_back(task_id: str, share: float) -> bool:
    """Whether a task belongs to the holdout. Its id alone decides, so that none ever moves."""
    digest = hashlib.sha256(task_id.encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def scores_of(attempts: list[StoredAttempt], plan: CurationPlan) -> TaskScores:
    """What the attempts at one task came to; at least one with a reward."""
    rewards = [attempt.reward for attempt in attempts if attempt.is_scored]
    correct = sum(map(plan.is_correct, attempts))
    return TaskScores(len(rewards), correct, fmean(rewards), max(rewards), min(rewards))


def _by_task(
    attempts: Iterable[StoredAttempt], plan: CurationPlan, held_out: HeldBack, counts: Counts
) -> tuple[dict[Task, list[StoredAttempt]], dict[Task, StoredAttempt]]:
    """The attempts that count, each once, by task and in an order that depends on them alone; and
    one at each eval task."""
    results: dict[Key, StoredAttempt] = {}
    for attempt in attempts:
        counts.attempts += 1
        results.setdefault(attempt.key, attempt)
    counts.repeated = counts.attempts - len(results)
    tasks: dict[Task, list[StoredAttempt]] = {}
    eval_tasks: dict[Task, StoredAttempt] = {}
    for key in sorted(results):
        attempt = results[key]
        is_held_out = held_out.holds(attempt)
        if is_held_out:
            counts.eval_attempts += 1
            eval_tasks.setdefault(attempt.task, attempt)
        if is_held_out and not plan.allow_eval_tasks:
            continue
        if attempt.error:  # it says nothing about the model
            counts.errors += 1
        else:
            tasks.setdefault(attempt.task, []).append(attempt)
    counts.eval_tasks = len(eval_tasks)
    counts.tasks = len(tasks)
    return tasks, eval_tasks


def _passes(attempts: list[StoredAttempt], plan: CurationPlan, counts: Counts) -> bool:
    if not any(attempt.is_scored for attempt in attempts):
        counts.unrated += 1
        counts.insufficient += plan.keep is not None
        return plan.keep is None
    scores = scores_of(attempts, plan)
    if scores.n_correct == scores.n:
        counts.always_solved += 1
    elif scores.solved:
        counts.sometimes_solved += 1
    else:
        counts.never_solved += 1
    verdict = True
    if plan.keep:
        verdict = plan.keep(scores)
    if verdict is None:
        counts.insufficient += 1
    elif not verdict:
        counts.filtered += 1
    return verdict is True


def _without_duplicates(tasks: dict[Task, list[StoredAttempt]]) -> dict[Task, list[StoredAttempt]]:
    """Of attempts with the same words, at any tasks, keep the one with the best reward."""
    first: dict[str, StoredAttempt] = {}
    for attempt in sorted(itertools.chain.from_iterable(tasks.values()), key=_best_first):
        words = [item.row()["messages"] for item in attempt.learnable]
        first.setdefault(_digest(words), attempt)
    kept = {attempt.key for attempt in first.values()}
    results: dict[Task, list[StoredAttempt]] = {}
    for task, attempts in tasks.items():
        results[task] = [attempt for attempt in attempts if attempt.key in kept]
    return results


def _select(attempts: list[StoredAttempt], plan: CurationPlan) -> list[StoredAttempt]:
    """In the order of preference; a hash breaks ties, without regard to step or length."""
    correct = list(filter(plan.is_correct, attempts))
    match plan.select:
        case "best":
            return sorted(correct, key=_best_first)[:1]
        case "correct" | "best-n":
            return sorted(correct, key=_best_first)[: plan.max_per_task]
        case "shortest":
            return sorted(correct, key=_shortest_first)[: plan.max_per_task or 1]
        case "all":
            return sorted(attempts, key=lambda attempt: _digest(attempt.key))[: plan.max_per_task]


def _best_first(attempt: StoredAttempt) -> tuple[float, str]:
    return -attempt.reward, _digest(attempt.key)


def _shortest_first(attempt: StoredAttempt) -> tuple[int, str]:
    """By characters: attempts of models with different tokenizers may be pooled."""
    size = 0
    for item in attempt.conversations:
        size += sum(map(len, item.answers))
    return size, _digest(attempt.key)


# -- contamination ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldBack:
    """What an environment holds back for evaluation, so that a task can be told by its id, its
    question or its prompt.

    A question that several eval tasks share does not tell them apart and is not among `questions`,
    which are digests; their prompts do. `prompts` are those of the eval tasks that were opened, of
    `total`."""

    ids: frozenset[str] = frozenset()
    questions: frozenset[str] = frozenset()
    prompts: Sequence[same_task.TaskTexts] = ()
    train_questions: Mapping[str, str] = field(default_factory=dict[str, str])
    total: int = 0

    def holds(self, attempt: StoredAttempt) -> bool:
        """Whether it is an attempt at a task of the eval split, under whatever name."""
        question = self.train_questions.get(attempt.task_id)
        return (
            attempt.split == "eval"
            or (question is None and attempt.task_id in self.ids)
            or question in self.questions
            or self.prompt_like(attempt) is not None
        )

    def prompt_like(self, attempt: StoredAttempt) -> same_task.TaskTexts | None:
        """The eval task that asks what the prompt of one of its conversations asks, if one does."""
        for item in attempt.conversations:
            task = same_task.task_of(item.messages[: item.prompt_messages])
            if task not in self._found:
                places = self._index.find(task)
                self._found[task] = self.prompts[places[0]] if places else None
            if found := self._found[task]:
                return found
        return None

    @cached_property
    def _index(self) -> same_task.SameTasks:
        return same_task.SameTasks(self.prompts)

    @cached_property
    def _found(self) -> dict[same_task.TaskTexts, same_task.TaskTexts | None]:
        """What was found for a prompt: a task has many attempts."""
        return {}


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
