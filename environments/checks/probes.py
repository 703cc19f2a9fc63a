"""The gate's probes of tasks and answers. Each returns its evidence, or raises ProbeFailed or
ProbeSkipped."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import fmean

from environments.base import ChatMessage
from environments.checks import likeness
from environments.checks.answers import (
    FRESH,
    NO_DATE,
    NONSENSE,
    OTHERWISE,
    as_code,
    as_equal,
    cut,
    emptied,
    given_away,
    nearly,
    parts,
)
from environments.checks.constants import best_constant
from environments.checks.playing import Answers, Played, Task, call_values, gold_turns, prompt_text
from environments.checks.report import reward_range, score_text, shown
from environments.checks.splits import repeated_questions, shared_tasks
from environments.checks.trial import Plan, ProbeFailed, ProbeSkipped, Trial, fail_if_many, skip_if
from environments.process.host import EnvironmentFault, Score
from environments.tools import TOOL_ERROR
from environments.untrusted_text import plain_name, quoted

LOW_SHARE = 0.4  # A worthless answer may earn at most this share of the gold answer's reward
HIT_SHARE = 0.25
"""Worthless answers may succeed on at most this share of the tasks: one may be right by chance."""
JUNK_SHARE = 0.5
"""One junk text may succeed on at most this share: some tasks take a few words for right."""
MORE_TASKS = 24  # if one junk text succeeds on a larger share, it is played on so many tasks more
LOOSE_SHARE = 0.1  # where junk is right on more of the tasks, two answers at once may be right too
ECHO_SHARE = 0.6
"""Parts of the prompt may succeed on this share: the answer is often a number of the question."""
CONSTANT_SHARE = 0.85
"""One constant may succeed on less than this share of the tasks, and earn less than this share of
the gold answers' reward. What succeeds on 93 % of all tasks may do so on 87 % of the sample."""
STATED_SHARE = 0.9  # on so many tasks the prompt may state the gold answer
COPIED_SHARE = 0.05  # so small a share of a split may be copies of other tasks
FEWEST_TOLD = 5  # with fewer tasks, replies that hold the gold answer say nothing
REWORDED_SHARE = 1 / 3
"""So many of the eval tasks may be train tasks in other words, as by chance where tasks are few."""
MOST_REWARD = 1000.0
EVERY_GOLD_SHARE = 0.25
"""Of the time that is left, the share in which the gold answers of all tasks are played."""
WROTE = 800  # characters of an environment's own text in evidence
SUCCESS_FIX = "set success in RewardResult: by default a score of at least 1 is a success"
COPIES_FIX = "remove the copies; if other data tells them apart, put that into their input"
AGREE_FIX = "make the gold answer and the scorer agree; success must be true for it"
SHORT_FIX = (
    "give every turn of the model in sft_completion, for an agent one for each of its requests, or "
    "define gold_turn; if none is missing, make the gold answer and the scorer agree"
)
CUT_FIX = (
    "this is right if the first half of a gold answer says all; otherwise make the scorer require "
    "a whole answer"
)
ECHO_FIX = (
    "the prompt contains what the scorer takes for an answer: make it read one place, a tag or the "
    "last line, and set success in RewardResult"
)
SUBSTRING_FIX = (
    "the scorer takes a text that holds the gold answer anywhere. One line makes it strict: "
    "`right = text.strip() == gold.strip()`, with the text of the last tag or line. If it is a "
    "package's scorer, accept=['near_gold', 'constants'] takes it as it is"
)
NONSENSE_FIX = "refuse what is no answer: inf, nan, null, empty fields"
CODE_FIX = (
    "the scorer runs answers as Python: read them with int(), json.loads or ast.literal_eval, and "
    "run what is to be code in a process of its own, of which only the output counts"
)
LETTER_FIX = "compare the whole answer with the gold answer, not one letter"
PAY_FIX = "pay less for what a model can write without solving the task"


async def tasks(trial: Trial) -> str:
    train = await trial.host.tasks("train")
    held_out = await trial.host.tasks("eval")
    few: list[str] = []
    for split, rows in (("train", train), ("eval", held_out)):
        counts = Counter(task_id for task_id, _ in rows)
        if len(counts) < len(rows):
            what = f"{len(rows) - len(counts)} of {len(rows)} {split} tasks repeat an id"
            fix = "give each row its own id, or no id: load_dataset derives one from the row"
            repeated, _ = counts.most_common(1)[0]
            raise ProbeFailed(f"{what}, for instance {plain_name(repeated)}", fix)
        if copies := repeated_questions(rows):
            example = " and ".join(" = ".join(map(plain_name, pair)) for pair in copies[:2])
            what = f"{len(copies)} of {len(rows)} {split} tasks ask what another one asks"
            few.append(f"{what}, for instance {example}")
            if len(copies) > COPIED_SHARE * len(rows):
                raise ProbeFailed(few[-1], COPIES_FIX)
    if not held_out:
        fix = "set eval_dataset (datasets/eval.jsonl): only held-out tasks can show learning"
        raise ProbeSkipped("there is no eval split", fix)
    overlap = shared_tasks(train, held_out, await trial.host.reworded())
    if overlap.shared:
        what = f"{overlap.shared} of {len(held_out)} eval tasks are train tasks too: {overlap}"
        fix = "remove them from one split"
        if overlap.same_id:
            fix += ", or give tasks that only share an id different ids"
        if overlap.same_id or overlap.shared > COPIED_SHARE * len(held_out):
            raise ProbeFailed(f"contaminated: {what}", fix)
        few.append(what)
    if few:
        raise ProbeSkipped("; ".join(few), COPIES_FIX)
    sizes = f"{len(train)} train and {len(held_out)} eval tasks"
    return f"{sizes}; ids and questions are unique, no task is in both splits"


async def prompts(trial: Trial) -> str:
    # The first one tells whether the environment is slow, and the others may come at once.
    await trial.open(trial.tasks[0])
    await trial.gather([partial(trial.open, task) for task in trial.tasks[1:]])
    most = max(opening.max_turns for opening in trial.openings.values())
    return f"{len(trial.openings)} tasks opened; turns per task: at most {most}"


async def gold(trial: Trial) -> str:
    calls = [partial(_gold_turns, trial, task) for task in trial.tasks]
    plans = list(zip(trial.tasks, await trial.gather(calls), strict=True))
    for task, answers in plans:
        limit = trial.openings[task].max_turns
        if len(answers) > limit:
            what = f"the gold answer of {task} has {len(answers)} turns, max_episode_turns allows"
            raise ProbeFailed(f"{what} {limit}", "allow as many turns, or give a shorter answer")
    wrong = fix = ""
    for (task, answers), played in zip(plans, await trial.play_all(plans), strict=True):
        if answers and played.score.success:
            trial.keep_gold(task, answers, played)
        elif not wrong:
            wrong = f"the gold answer of {task} is no success: {_earned(answers, played)}"
            fix = SHORT_FIX if played.is_cut else AGREE_FIX
    if wrong:
        raise ProbeFailed(wrong, fix)
    # Find the tasks whose last turn does not count, such as those scored by what tools changed
    several = [task for task, turns in trial.golds.items() if len(turns) > 1]
    plans = [(task, [*trial.golds[task][:-1], FRESH]) for task in several]
    for task, played in zip(several, await trial.play_all(plans), strict=True):
        if played.score.success:
            trial.open_ended.add(task)
    rewards = reward_range([played.score.reward for played in trial.played.values()])
    return f"{len(trial.played)} gold answers are successes, with rewards {rewards}"


def _earned(answers: Answers, played: Played) -> str:
    score = played.score
    earned = f"it earned reward {score.reward:g}, success {str(score.success).lower()}"
    if played.is_cut:
        earned += f"; the episode goes on after turn {len(answers)}"
    return earned + quoted(f"{shown(answers)}\n{score.reason or ''}"[:WROTE])


async def _gold_turns(trial: Trial, task: Task) -> tuple[str, ...]:
    try:
        return await trial.timed(task, (), "sft_completion", gold_turns(trial.host, task))
    except EnvironmentFault as fault:
        if fault.code == "environment_timeout":
            raise
        if not fault.traceback:  # it gave one that breaks the contract
            fix = "give rows an output that is text, or correct sft_completion"
            raise ProbeFailed(f"a gold answer is not valid: {fault.shown}", fix) from fault
        fix = "give rows an output, or override sft_completion: algorithm='sft' needs it too"
        raise ProbeSkipped(f"no gold answer: {fault.shown}", fix) from fault


async def every_gold(trial: Trial) -> str:
    """The gold answers of all tasks, for a part of the time that is left."""
    if not trial.golds:
        raise ProbeSkipped("there is no gold answer that succeeds", "")
    ends = time.monotonic() + EVERY_GOLD_SHARE * trial.left_s
    everything = trial.all_tasks
    rest = [task for task in everything if task not in trial.golds]
    wrong: dict[Task, str] = {}
    while rest and time.monotonic() < ends:
        batch, rest = rest[: trial.at_once], rest[trial.at_once :]
        answers = await trial.gather([partial(_gold_turns, trial, task) for task in batch])
        plans = list(zip(batch, answers, strict=True))
        for (task, turns), played in zip(plans, await trial.play_all(plans), strict=True):
            if not played.score.success:
                wrong[task] = _earned(turns, played)
            elif turns:
                trial.see(task, turns, played)
    done = len(everything) - len(rest)
    if wrong:
        task, earned = next(iter(wrong.items()))
        what = f"the gold answers of {len(wrong)} of {done} tasks are no success, for instance"
        fix = "correct or remove these rows: nothing that a model writes can be right there"
        raise ProbeFailed(f"{what} {task}: {earned}", fix)
    return f"the gold answers of {done} of {len(everything)} tasks are successes"


# -- worthless answers -----------------------------------------------------------------------------


async def junk(trial: Trial) -> str:
    return await _worthless(trial, [[text] for text in trial.junk])


async def empty(trial: Trial) -> str:
    return await _worthless(trial, [[""], [" \n"]])


async def none(trial: Trial) -> str:
    return await _worthless(trial, [[None]])


@dataclass
class _Earned:
    """What answers earned that must win nothing."""

    rewards: list[float] = field(default_factory=list[float])
    paid: dict[Task, str] = field(default_factory=dict[Task, str])  # what is too much, in words

    async def play(
        self,
        trial: Trial,
        plans: Sequence[Plan],
        is_part: Callable[[Plan], bool] = lambda plan: False,
    ) -> list[tuple[Plan, str]]:
        """Play these conversations. Those that are successes, in words; see `_overpaid`."""
        wins: list[tuple[Plan, str]] = []
        for plan, played in zip(plans, await trial.play_all(plans, repeat=True), strict=True):
            task, answers = plan
            score = played.score
            self.rewards.append(score.reward)
            if score.success:
                said = f"{task}: {shown(answers)} counts as a success"
                wins.append((plan, f"{said}, with {score_text(score)}"))
            elif overpaid := _overpaid(trial, plan, score, is_part=is_part(plan)):
                self.paid.setdefault(task, overpaid)
        return wins

    def __str__(self) -> str:
        count = len(self.rewards)
        return f"{count} answers, no success, rewards {reward_range(self.rewards)}"


async def _worthless(trial: Trial, texts: Sequence[Answers]) -> str:
    """Texts that say nothing must win on few tasks, and earn little."""
    count = len(trial.tasks)
    doubts: list[str] = []
    earned = _Earned()
    for answers in texts:
        played = list(trial.tasks)
        wins = await earned.play(trial, [(task, answers) for task in played])
        trial.junk_rewards[tuple(answers)] = earned.rewards[-count:]
        if len(wins) > JUNK_SHARE * count:  # these few tasks may be those that ask for little
            more = trial.other_tasks(MORE_TASKS)
            wins += await earned.play(trial, [(task, answers) for task in more])
            played += more
        hits = {task: win for (task, _), win in wins}
        trial.junk_successes = max(trial.junk_successes, len(hits) / len(played))
        doubts.append(fail_if_many(hits, len(played), SUCCESS_FIX, JUNK_SHARE))
    doubts.append(fail_if_many(earned.paid, count, PAY_FIX, HIT_SHARE))
    skip_if(*doubts)
    return str(earned)


async def truncated(trial: Trial) -> str:
    """Beginnings of gold answers must not win."""
    plans: list[Plan] = []
    for task, (*turns, last) in trial.golds.items():
        half = len(last) // 2
        if task not in trial.open_ended:
            plans += [(task, [*turns, last[:size]]) for size in sorted({half, min(1, half)})]
    if not plans:
        raise ProbeSkipped("there is no gold answer whose end counts", "")
    earned = _Earned()
    hits: dict[Task, str] = {}
    says_all = ""
    for (task, answers), win in await earned.play(trial, plans, lambda plan: True):
        begun = answers[-1] or ""
        # Whether it ends within the first word
        if begun.isalnum() and trial.last_gold(task)[len(begun) :][:1].isalnum():
            hits.setdefault(task, win)
        else:
            # Half of a long answer may hold all that counts.
            says_all = says_all or win
    count = len(trial.tasks)
    skip_if(
        fail_if_many(hits, count, CUT_FIX, _most_hits(trial)),
        fail_if_many(earned.paid, count, PAY_FIX, HIT_SHARE),
    )
    if says_all:
        raise ProbeSkipped(says_all, CUT_FIX)
    return str(earned)


async def prompt_echo(trial: Trial) -> str:
    """Parts of the prompt must not win, and it must not give the gold answer away."""
    plans: list[Plan] = []
    for task, opening in trial.openings.items():
        texts = [opening.messages[-1]["content"], trial.prompt(task), trial.question(task)]
        plans += [(task, [text]) for text in texts if text]
    earned = _Earned()
    hits: dict[Task, str] = {}
    wins = await earned.play(trial, plans, lambda plan: plan[1] == [trial.question(plan[0])])
    for (task, _), win in wins:
        hits.setdefault(task, win)
    count = len(trial.tasks)
    # "Answer yes or no" names the gold answer of half the tasks.
    fix = "remove the gold answer from the prompt"
    skip_if(
        fail_if_many(hits, count, ECHO_FIX, _most_hits(trial, ECHO_SHARE)),
        fail_if_many(earned.paid, count, PAY_FIX, ECHO_SHARE),
        fail_if_many(_stated(trial), count, fix, STATED_SHARE),
    )
    return str(earned)


def _stated(trial: Trial) -> dict[Task, str]:
    """The tasks whose prompt states the gold answer."""
    stated: dict[Task, str] = {}
    golds = {task: trial.told(turns) for task, turns in trial.golds.items()}
    for task, inner in golds.items():
        others = [trial.prompt(other) for other, gold in golds.items() if gold != inner]
        if said := given_away(inner, trial.prompt(task), others):
            stated[task] = f"{task}: the prompt states the gold answer{quoted(said)}"
    return stated


def _overpaid(trial: Trial, plan: Plan, score: Score, *, is_part: bool) -> str:
    """What earned about as much as the gold answer, else "". A part only has to earn less."""
    task, answers = plan
    if task not in trial.played:
        return ""
    gold_reward = trial.played[task].score.reward
    is_low = score.reward <= LOW_SHARE * gold_reward
    if is_part or gold_reward <= 0:
        is_low = score.reward < gold_reward
    if is_low:
        return ""
    return f"{task}: {shown(answers)} earned {score_text(score)}, the gold answer {gold_reward:g}"


# -- wrong answers ---------------------------------------------------------------------------------


async def near_gold(trial: Trial) -> str:
    """Wrong answers that hold the gold answer, or all of it but a character."""
    tried = [
        task for task in trial.tasks if trial.other_gold(task) and task not in trial.open_ended
    ]
    if not tried:
        raise ProbeSkipped("this needs gold answers that succeed and differ between tasks", "")
    changed: dict[Task, str] = {}
    hedged: dict[Task, str] = {}
    by_letter: dict[Task, str] = {}
    for task in tried:
        *turns, last = trial.golds[task]
        near = nearly(last)
        before, inner, after = parts(last)
        ends = (inner[:1] + OTHERWISE, OTHERWISE + inner[-1:])
        letters = [before + text + after for text in ends if inner[:1].isalpha()]
        other = trial.other_gold(task)
        # One of the two orders may be right: the first or the last answer counts.
        both = [f"{last}\n{other}", f"{other}\n{last}"]
        texts = (*near, *both, *letters)
        played = await trial.play_all([(task, [*turns, text]) for text in texts])
        successes = [item.score.success for item in played]
        for text, success in zip(near, successes[: len(near)], strict=True):
            if success:
                what = "an answer that differs from the gold answer counts as a success"
                wrote = quoted(f"{shown([text])}\ngold: {shown([last])}")
                changed.setdefault(task, f"{task}: {what}{wrote}")
        for text, success in zip(texts[len(near) + 2 :], successes[len(near) + 2 :], strict=True):
            if success:
                by_letter[task] = f"{task}: {shown([text])} counts as a success"
        if all(successes[len(near) : len(near) + 2]):
            hedged[task] = f"{task}: {shown(both)}: both count as successes"
    whole = "compare the whole answer with the gold answer, not a part or a rounded form of it"
    if hedged and changed:
        whole = SUBSTRING_FIX
        trial.is_substring_scorer = True
    skip_if(
        fail_if_many(by_letter, len(tried), LETTER_FIX, STATED_SHARE),
        fail_if_many(changed, len(tried), whole, _most_hits(trial)),
        fail_if_many(hedged, len(tried), SUBSTRING_FIX, _most_hits(trial)),
    )
    return f"{len(tried)} tasks: a changed character and two answers at once are no successes"


async def nonsense(trial: Trial) -> str:
    """Answers of the gold answer's form that mean nothing must not raise, and must not win on two
    tasks with different gold answers.
    """
    plans: list[Plan] = []
    first = trial.tasks[0]
    second = next(
        (task for task in trial.golds if trial.last_gold(task) != trial.last_gold(first)),
        trial.tasks[-1],
    )
    codes: set[str] = set()
    for task in (first, second):
        *turns, last = trial.golds.get(task, [""])
        before, inner, after = parts(last)
        texts = [cut(text, trial.max_tokens) for text in (*NONSENSE, *emptied(inner))]
        if code := as_code(inner) or as_equal(inner):
            codes.add(before + code + after)
            texts.append(code)
        for digit in "09\u00b2":
            texts.append(re.sub(r"\d", digit, inner))
        texts.append(re.sub(r"\d{4}-\d\d-\d\d", NO_DATE, inner))
        plans += [(task, [*turns, before + text + after]) for text in texts if text != inner]
    won: dict[str, Task] = {}
    for (task, answers), played in zip(
        plans, await trial.play_all(plans, repeat=True), strict=True
    ):
        text = answers[-1] or ""
        if not played.score.success or task in trial.open_ended:
            continue
        earlier = won.setdefault("" if text in codes else text, task)
        if earlier != task and trial.other_gold(task) and not trial.junk_successes:
            what = f"{shown([text])} counts as a success on {earlier} and on {task}"
            raise ProbeFailed(what, CODE_FIX if text in codes else NONSENSE_FIX)
    return f"{len(plans)} answers, none raised"


async def order(trial: Trial) -> str:
    """Gold answers earn more than wrong ones of the right form, and those no less than junk."""
    golds = [played.score.reward for played in trial.played.values()]
    most = max(map(abs, chain(golds, *trial.junk_rewards.values())), default=0.0)
    if most > MOST_REWARD:
        what = f"a reward is {most:g}; advantages and losses suit rewards of about 1"
        raise ProbeFailed(what, "scale the rewards, for instance to 0 to 1")
    plans: list[Plan] = []
    for task in trial.tasks:
        if other := trial.other_gold(task):
            plans.append((task, [*trial.golds[task][:-1], other]))
    if not plans or not trial.junk_rewards:
        raise ProbeSkipped("this needs gold answers that succeed and differ between tasks", "")
    wrong = fmean(played.score.reward for played in await trial.play_all(plans))
    best = max(map(fmean, trial.junk_rewards.values()))
    mean_gold = fmean(golds)
    if best > wrong + (mean_gold - wrong) * HIT_SHARE and not _is_loose(trial):
        what = f"a junk answer earned {best:.3g}, well-formed wrong answers {wrong:.3g}"
        fix = "pay a wrong answer of the right form at least as much as junk"
        raise ProbeFailed(f"{what} on average", fix)
    return f"gold {mean_gold:.3g}, well-formed wrong {wrong:.3g}, junk at most {best:.3g}"


def _is_loose(trial: Trial) -> bool:
    """Whether the tasks ask for so little that junk is right on some, though not on most."""
    return LOOSE_SHARE < trial.junk_successes <= JUNK_SHARE


def _most_hits(trial: Trial, share: float = HIT_SHARE) -> float:
    """The share of the tasks on which a wrong answer may be right; `share` is the usual one."""
    return 1.0 if _is_loose(trial) else share


async def constants(trial: Trial) -> str:
    """One answer must not win everywhere."""
    split = "eval" if trial.report.splits["eval"] else "train"
    every = range(trial.report.splits[split])
    player = partial(trial.play, repeat=True)
    at_once = trial.at_once
    constant = await best_constant(trial.host, split, every, at_once=at_once, player=player)
    if constant is None:
        raise ProbeSkipped("no constant could be scored", "")
    count = f"{sum(constant.successes)} of {len(constant.successes)} {split} tasks"
    text = f"the best constant succeeds on {count}, with a mean reward of "
    text += f"{constant.mean_reward:.3g}{quoted(shown([constant.answer]))}"
    rewards = [played.score.reward for played in trial.played.values()]
    gold_reward = fmean(rewards or [0.0])
    pays = gold_reward > 0 and constant.mean_reward >= CONSTANT_SHARE * gold_reward
    wins = constant.success_share >= CONSTANT_SHARE
    if len(constant.successes) > 2 and (wins or pays):
        fix = "make the scorer read the task, or balance the tasks: no one answer may win"
        if trial.is_substring_scorer:
            fix = SUBSTRING_FIX
        raise ProbeFailed(text, fix)
    return text


async def leaks(trial: Trial) -> str:
    """Signs that a model could answer from something else than the task. What any model would find
    fails, the others warn.
    """
    if not trial.seen:
        raise ProbeSkipped("there is no gold answer that succeeds", "")
    rows: list[likeness.Row] = []
    ids = {split: await trial.host.tasks(split) for split in ("train", "eval")}
    for task, (prompt, turns) in trial.seen.items():
        task_id = ids[task.split][task.index][0]
        rows.append(likeness.Row(task_id, prompt, trial.told(turns), task.split, task.index))
    if said := _without_data(trial):
        raise ProbeFailed(said, "put what tells the tasks apart into their prompts")
    if told := await _told(trial):
        raise ProbeFailed(told, "let the reply to a wrong turn say what is wrong, not the answer")
    near = await trial.host.reworded()
    pairs = [(ids["train"][one][0], ids["eval"][other][0]) for one, other in near]
    known = {other for _, other in pairs}
    pairs += [pair for pair in likeness.paraphrased(rows) if pair[1] not in known]
    reworded = likeness.alike(pairs, len(ids["eval"]))
    if len(pairs) > REWORDED_SHARE * len(ids["eval"]):
        raise ProbeFailed(reworded, "put all wordings of a task into one split")
    skip_if(*(sign(rows) for sign in likeness.SIGNS), reworded)
    return f"{len(rows)} tasks: no sign that answers can be had without solving them"


def _without_data(trial: Trial) -> str:
    """Whether tasks of a single turn have one prompt and different gold answers: nothing in them
    says which is right, and chance decides what is learnt.
    """
    if any(opening.max_turns > 1 for opening in trial.openings.values()):
        return ""  # a later turn may tell
    golds: dict[str, dict[str, Task]] = {}
    for task, (prompt, turns) in trial.seen.items():
        golds.setdefault(prompt, {}).setdefault(trial.told(turns), task)
    alike = max(golds.values(), key=len)
    if len(alike) < max(3, COPIED_SHARE * len(trial.seen)):
        return ""
    which = " and ".join(map(str, [*alike.values()][:2]))
    return f"{len(alike)} tasks have the same prompt and different gold answers, such as {which}"


async def _told(trial: Trial) -> str:
    """Whether the reply to a wrong first turn tells the gold answer, and not only what the replies
    on other tasks say too, or what the gold conversation is told.
    """
    tasks = [task for task in trial.golds if trial.openings[task].max_turns > 1]
    if len(tasks) < FEWEST_TOLD:
        return ""
    secrets = {task: _secrets(trial, task) for task in tasks}
    wrong: list[list[str]] = [[FRESH] * len(tasks)]
    for place in (0, -1):  # another task's gold turns: the first may be a call, the last an answer
        golds = [trial.golds[task][place] for task in tasks]
        wrong.append([*golds[1:], golds[0]])
    for turns in wrong:
        plans: list[Plan] = [(task, [turn]) for task, turn in zip(tasks, turns, strict=True)]
        replies = [played.replies for played in await trial.play_all(plans)]
        hits: list[tuple[Task, str, str]] = []
        for task, turn, said in zip(tasks, turns, replies, strict=True):
            is_refused = any(message["content"].startswith(TOOL_ERROR) for message in said)
            for value in secrets[task][is_refused]:
                others = sum(_says(reply, value) for reply in replies)
                if _says(said, value) and value not in turn and others <= len(tasks) / 2:
                    hits.append((task, turn, value))
                    break
        if len(hits) >= STATED_SHARE * len(tasks):
            task, turn, value = hits[0]
            what = f"{task}: the reply to a wrong turn tells the gold answer"
            what += f" (so on {len(hits)} of {len(tasks)} tasks)"
            return what + quoted(f"turn: {shown([turn])}\nanswer: {shown([value])}")
    return ""


def _secrets(trial: Trial, task: Task) -> tuple[set[str], set[str]]:
    """What of the gold answer no reply may tell, and no reply to a call that failed."""
    turns, played = trial.golds[task], trial.played[task]
    values = {parts(turn)[1].strip() for turn in turns}.union(call_values(turns))
    first = {parts(turns[0])[1].strip(), *call_values(turns[:1])}
    unasked = {value for value in values if len(value) > 1 and not _says(played.prompt, value)}
    # What the gold answer says before it is told is the answer; later it may be data.
    told = {value for value in unasked - first if _says(played.replies, value)}
    return unasked - told, unasked


def _says(messages: Sequence[ChatMessage], value: str) -> bool:
    pattern = rf"(?<!\w){re.escape(value)}(?!\w)"
    return re.search(pattern, prompt_text(messages), re.IGNORECASE) is not None
