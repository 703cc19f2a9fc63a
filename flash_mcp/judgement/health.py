"""What a run's numbers mean: trends, noise bands, and warning signs with their remedy.

One list of checks (`CHECKS`) judges the steps of a run and the sample before it, with the same
thresholds. A sample is judged as one step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Literal

from flash_mcp.judgement import attempts
from flash_mcp.judgement.statistics import t95
from flash_mcp.protocol.numbers import percent
from flash_mcp.protocol.records import Evaluation, Try, plain_refusal
from flash_mcp.protocol.result_model import ResultModel, Rounded

Metrics = Mapping[str, float | None]
Severity = Literal["warning", "problem"]
SampleOutlook = Literal["good", "doubtful", "hopeless"]
CONTAMINATED = "contaminated_split"
WORSE_ELSEWHERE = "worse_elsewhere"
TRUNCATION = "truncation"
DESTROYED = "destroyed_model"
BARS = "▁▂▃▄▅▆▇█"
WINDOW = 10
"""The newest steps, which most checks look at."""
LEAST_STEPS = 3
"""A run with fewer steps has no warning signs."""
LONG = 20
"""With fewer values, the noise of their first and last third cannot be estimated."""
SOLVED = 0.9
"""Success share from which a run has little left to learn."""
FALLING = 1.5
"""Noise bands by which a reward falls in at most 50 steps, and 0.2 more for each doubling. A run is
looked at after every step: one band calls many steady rewards falling, this one 3 %."""
LEAST_RISE = 0.02
"""Of a reward, as a share of the largest one."""
COLLAPSED = 0.9
"""Share of one final answer among all tasks' from which the answers have collapsed, if it is right
less often than that."""
REFUSED = "refused/"
"""Begins the metrics that count the refusals of one kind."""
TRUNCATED = 0.2
"""Share of tokens with a truncated weight from which a policy is too far from its samples."""
IGNORED = 0.1
"""Share of what prompts did to answers before from which a model does not heed them any more."""
LEAST_EFFECT = 0.05
"""Of prompts, in nats a token: answers that depend on them less tell nothing."""
STILL = 0.03
"""Share of a run's largest gradient from which it has stopped. Where rates of 0.05 to 0.5 destroyed
a tiny model, it was 0.0002 to 0.02; where it learnt, above 0.08."""
SPIKES = {"kl": 0.5, "sampling_kl": 0.05, "is_ratio/clipped_share": 0.05}
"""Metrics that may jump, each with the value below which a jump does not count."""


class Trend(ResultModel):
    """How a metric moved over the training steps so far."""

    first: Rounded
    last: Rounded
    best: Rounded
    over_steps: int
    spark: str


class Flag(ResultModel):
    """A warning sign."""

    name: str
    severity: Severity
    evidence: str
    remedy: str


def trend(values: Sequence[float], *, lower_is_better: bool = False) -> Trend | None:
    """None for no values. Each end is the mean of a fifth of the values, of 1 to 10 of them."""
    if not values:
        return None
    width = min(10, max(1, len(values) // 5))
    return Trend(
        first=fmean(values[:width]),
        last=fmean(values[-width:]),
        best=min(values) if lower_is_better else max(values),
        over_steps=width,
        spark=sparkline(values),
    )


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """At most `width` bars between the least and the greatest value; flat values are flat bars."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low = min(means)
    span = max(means) - low or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


# -- warning signs ---------------------------------------------------------------------------------


def flags(history: Sequence[Metrics]) -> list[Flag]:
    """Warning signs in a run's metrics, one mapping a step, in order; the gravest first. The
    evidence says which steps it is from if the mappings hold their `step`.
    """
    if len(history) < LEAST_STEPS:
        return []
    return _found(Steps(history))


def sample_flags(tries: Sequence[Try], summary: Mapping[str, float]) -> list[Flag]:
    """What a sample of groups, made before training, says against training on them; the gravest
    first. `summary` is that of its evaluation.
    """
    groups = attempts.by_task(tries)
    valid = list(itertools.chain.from_iterable(groups.values()))
    metrics: dict[str, float | None] = {**summary}
    if tries:
        metrics["rollouts/error_share"] = 1 - len(valid) / len(tries)
    if valid:
        metrics |= {
            "rollouts/truncated_share": attempts.mean(valid, "truncated"),
            "groups/uniform_share": attempts.uniform_share(groups),
            "groups/solved_share": attempts.distinct(groups, "success").count({True}) / len(groups),
            "groups/gold_share": fmean(item.has_gold for item in valid),
            "groups/zero_share": attempts.distinct(groups, "reward").count({0.0}) / len(groups),
            "reward/mean": attempts.mean(valid, "reward"),
            "success/rate": attempts.mean(valid, "success"),
        }
    return _found(Steps([metrics], is_sample=True))


def sample_outlook(raised: Sequence[Flag]) -> SampleOutlook:
    if any(flag.severity == "problem" for flag in raised):
        return "hopeless"
    return "doubtful" if raised else "good"


def contaminated(shared: int, eval_tasks: int, evidence: str) -> Flag:
    tasks = f"{shared} of {eval_tasks} eval tasks are train tasks too ({evidence})"
    return Flag(
        name=CONTAMINATED,
        severity="problem",
        evidence=f"{tasks}: held-out figures measure memory",
        remedy="take them out of one of the splits, env_test it, env_push it and train again; "
        "trust no held-out figure of this run",
    )


def worse_elsewhere(evidence: str) -> Flag:
    return Flag(
        name=WORSE_ELSEWHERE,
        severity="problem",
        evidence=evidence,
        remedy="train again with a lower learning_rate or fewer steps, and with "
        "kl_penalty_coef=0.01 (grpo) or rows of other tasks among its own (sft)",
    )


def cut_off(evaluation: Evaluation) -> list[Flag]:
    """That the answers of an evaluation after training have no room, whatever was learnt."""
    share = evaluation.summary.get("truncated_share", 0.0)
    if not evaluation.step or share < 0.5:
        return []
    evidence = (
        f"{percent(share)} of the held-out attempts after step {evaluation.step} were cut off"
    )
    remedy = "evaluate with a greater max_tokens (or max_length), or with stop_sequences"
    return [Flag(name=TRUNCATION, severity="problem", evidence=evidence, remedy=remedy)]


def outlook(history: Sequence[Metrics], raised: Sequence[Flag], verdict: str | None = None) -> str:
    """One line on whether to continue, and why: yes, doubtful, no, or too early to say."""
    problem = next((flag for flag in raised if flag.severity == "problem"), None)
    doubt = next((flag for flag in raised if flag.name in DOUBTS), None)
    mind = problem or doubt
    if mind and verdict == "improved":
        answer = "doubtful" if mind.name == WORSE_ELSEWHERE else "yes"
        return f"{answer}: the held-out success rose; mind {mind.name}: {mind.evidence}"
    if problem:
        return f"no: {problem.name}: {problem.evidence}"
    if len(history) < LEAST_STEPS:
        return (
            f"too early to say: {len(history)} of the {LEAST_STEPS} steps that warning signs need"
        )
    if verdict == "regressed":
        return "no: the held-out success fell; an earlier checkpoint may be better"
    if verdict == "constant":
        return "no: the held-out success rose no further than one constant answer does"
    steps = Steps(history)
    recent = steps.recent()
    success = recent.mean("success/rate")
    if success is not None and success > SOLVED:
        return f"no need: solved, success {percent(success)} in {recent}; harder tasks, or the end"
    if doubt:
        return f"doubtful: {doubt.name}: {doubt.evidence}"
    said = _progress(steps, raised)
    if verdict == "improved" and not said.startswith("yes"):
        return f"yes: the held-out success rose; in training {said.partition(': ')[2]}"
    return said


def _progress(steps: Steps, raised: Sequence[Flag]) -> str:
    """The outlook without problems or doubts: by held-out loss, reward or training loss."""
    if len(losses := steps.column("eval_loss")) > 1:
        # Always of the same rows, so that it has no noise of sampling.
        name, first, last = "held-out loss", losses[0], losses[-1]
        is_steady = True
    else:
        measured = [name for name in ("teacher_kl", "reward/mean", "loss") if steps.column(name)]
        metric = next(iter(measured), "loss")
        values = steps.column(metric)
        moved = trend(values)
        if moved is None:
            return "too early to say: nothing was measured yet"
        name, first, last = metric.partition("/")[0], moved.first, moved.last
        count = len(values)
        is_steady = count >= LONG
        if not is_steady:
            # They rise, or fall, more steadily than noise, at 5 %: Mann's test of Kendall's S
            # (1945). Four values or fewer never do.
            rises = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
            noise = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
            is_steady = abs(rises) - 1 > 1.96 * noise
    said = f"{name} went from {first:.3g} to {last:.3g} over {steps}"
    gain = last - first if name == "reward" else first - last
    if gain <= 0:
        return f"doubtful: {said}"
    if not is_steady:
        return f"too early to say: {said}, too unsteadily to call it a trend"
    if raised:
        said += f"; mind {', '.join(flag.name for flag in raised)}"
    return f"yes: {said}"


class Steps:
    """Metrics of steps in their order, or of a sample; as text, which steps these are."""

    def __init__(self, metrics: Sequence[Metrics], *, is_sample: bool = False) -> None:
        self.metrics = metrics
        self.is_sample = is_sample

    def __len__(self) -> int:
        return len(self.metrics)

    def __str__(self) -> str:
        if self.is_sample:
            return "the sample"
        first = self.metrics[0].get("step")
        last = self.metrics[-1].get("step")
        if first is None or last is None:
            return f"the last {len(self)} steps"
        return f"steps {first:g} to {last:g}"

    def recent(self) -> Steps:
        return Steps(self.metrics[-WINDOW:], is_sample=self.is_sample)

    def column(self, name: str) -> list[float]:
        values = (metrics.get(name) for metrics in self.metrics)
        return [value for value in values if value is not None and math.isfinite(value)]

    def mean(self, name: str) -> float | None:
        values = self.column(name)
        if values:
            return fmean(values)
        return None

    def share(self, name: str) -> float:
        """The mean; 0 if the metric is absent."""
        return self.mean(name) or 0.0


@dataclass(frozen=True)
class Sign:
    evidence: str
    remedy: str
    is_problem: bool = False


Check = Callable[[Steps, Steps], Sign | None]
"""Looks at all steps, and at the newest; None if nothing is wrong."""
CHECKS: dict[str, Check] = {}
"""By the name of the flag, in the order of showing. A sample has the metrics of six of them."""
LETTERS: dict[str, str] = {}
"""How a cursor of status names each flag. Agents hold cursors: a letter stays with its flag."""
OF_REWARD: set[str] = set()
"""Signs of a run that learns from a reward. A distillation learns from each token."""
DOUBTS: set[str] = set()
"""Warnings that make going on doubtful. With the others it is worth it while the numbers move."""


def _check(
    letter: str, *, of_reward: bool = False, is_doubt: bool = False
) -> Callable[[Check], Check]:
    """Add a function, whose name is the flag's, to the checks."""

    def add(check: Check) -> Check:
        CHECKS[check.__name__] = check
        LETTERS[check.__name__] = letter
        if of_reward:
            OF_REWARD.add(check.__name__)
        if is_doubt:
            DOUBTS.add(check.__name__)
        return check

    return add


def _found(steps: Steps) -> list[Flag]:
    recent = steps.recent()
    flags: list[Flag] = []
    is_distilled = bool(steps.column("teacher_kl"))
    for name, check in CHECKS.items():
        if is_distilled and name in OF_REWARD:
            continue
        sign = check(steps, recent)
        if sign:
            severity: Severity = "problem" if sign.is_problem else "warning"
            flags.append(
                Flag(name=name, severity=severity, evidence=sign.evidence, remedy=sign.remedy)
            )
    return sorted(flags, key=lambda flag: flag.severity != "problem")


@_check("a")
def environment_errors(steps: Steps, recent: Steps) -> Sign | None:
    share = recent.share("rollouts/error_share")
    if share < 0.02:
        return None
    return Sign(
        f"{percent(share)} of the rollouts of {recent} failed in environment code: "
        "nothing is learnt from them",
        "read them with rollouts (which=worst; see each row's error), fix environment.py, "
        "env_test, env_push",
        is_problem=share >= 0.2,
    )


@_check("z")
def destroyed_model(steps: Steps, recent: Steps) -> Sign | None:
    level = recent.mean("frequencies/loss")
    losses = steps.column("loss")
    if level is None or len(losses) < LEAST_STEPS:
        return None
    newest = losses[-LEAST_STEPS:]
    # A model that answers everything alike has at least the loss of the frequencies.
    if min(newest) < level:
        return None
    norms = steps.column("grad_norm")
    fell = _fall_of_effect(steps)
    leaps = fmean(newest) > 2 * max(level, losses[0])
    stands = len(norms) >= WINDOW and max(norms[-WINDOW // 2 :]) < STILL * max(norms)
    if not (leaps or stands or fell):  # it has not learnt anything yet
        return None
    said = f"the loss is {fmean(newest):.3g}, from {losses[0]:.3g}"
    if stands:
        said += f", and the gradient {norms[-1]:.2g} after {max(norms):.2g}"
    said += f": no better than that of token frequencies alone ({level:.3g})"
    if fell:
        said += f"; {fell}"
    return Sign(
        f"{said}, so that the answers no longer depend on what is asked",
        "cancel it, and train with a far lower learning_rate from the base model or an earlier "
        "checkpoint (init_from_adapter)",
        is_problem=True,
    )


@_check("y", is_doubt=True)
def ignored_prompts(steps: Steps, recent: Steps) -> Sign | None:
    fell = _fall_of_effect(steps)
    if fell is None or destroyed_model(steps, recent):
        return None
    return Sign(
        f"answers are alike whatever is asked: {fell}",
        "look whether the rows' answers follow from their prompts; train with a lower "
        "learning_rate, and with about as many rows of each answer",
    )


def _fall_of_effect(steps: Steps) -> str | None:
    """In words, that prompts do nothing to answers any more; None if they do, or never did."""
    effects = steps.column("prompt_effect")
    before = max(steps.column("prompt_effect/before"), default=0.0)
    if not effects or before < LEAST_EFFECT or effects[-1] > IGNORED * before:
        return None
    return (
        f"another prompt makes an answer {effects[-1]:.2g} nats a token less likely, before "
        f"training {before:.2g}"
    )


@_check("t")
def refused_requests(steps: Steps, recent: Steps) -> Sign | None:
    # A step without a refusal has no such metric.
    shares = [metrics.get("rollouts/refused_share") or 0.0 for metrics in recent.metrics]
    share = fmean(shares)
    if share < 0.05:
        return None
    counts: Counter[str] = Counter()
    for metrics in recent.metrics:
        for name, value in metrics.items():
            if name.startswith(REFUSED):
                counts[name.removeprefix(REFUSED)] += round(value or 0)
    kinds = [f"{plain_refusal(kind)} {count} times" for kind, count in counts.most_common(3)]
    return Sign(
        f"in {percent(share)} of the rollouts of {recent} the model's API refused requests of the "
        f"agent or left something out: {', '.join(kinds)}",
        "let the agent leave these fields out; docs/agents.md lists what each API honours, and "
        "rollouts shows each rollout's as `refused`",
    )


@_check("w")
def untrained_answers(steps: Steps, recent: Steps) -> Sign | None:
    answers = sum(recent.column("schema/answers"))
    untrained = sum(recent.column("schema/untrained"))
    if not answers or untrained / answers < 0.05:
        return None
    return Sign(
        f"answers under a schema were not trained in {recent}: {untrained:.0f} of {answers:.0f}",
        "where a schema decides every token the model learns nothing of the answer: let it write "
        "freely and parse the text, or let the schema leave it a choice",
        is_problem=untrained == answers,
    )


@_check("b", of_reward=True)
def no_gradient(steps: Steps, recent: Steps) -> Sign | None:
    norms = recent.column("grad_norm")
    if len(norms) < LEAST_STEPS or max(norms) > 1e-9 or _is_solved(recent):
        return None
    remedy = "every group is uniform: change the reward or the tasks; see rollouts"
    if untrained_answers(steps, recent):
        remedy = "see untrained_answers first; otherwise every group is uniform"
    return Sign(
        f"the gradient was 0 in each of the last {len(norms)} steps", remedy, is_problem=True
    )


def _is_solved(recent: Steps) -> bool:
    return recent.share("success/rate") > 0.8


@_check("c", of_reward=True)
def uniform_groups(steps: Steps, recent: Steps) -> Sign | None:
    """Groups in which all rollouts score the same have no advantage: GRPO's gradient is zero."""
    share = recent.share("groups/uniform_share")
    if share < 0.6:
        return None
    right = recent.share("groups/solved_share")
    zero = recent.share("groups/zero_share")
    is_solved = _is_solved(recent) or right > share / 2
    if is_solved:
        remedy = "the tasks are solved: stop here, or train on harder ones"
    elif zero > 0.5 and recent.share("groups/gold_share") > 0.5:
        remedy = (
            "nothing is ever paid: train(algorithm='sft', ...) on the gold answers first, let the "
            "scorer pay for partial progress, or use easier tasks"
        )
    elif zero > 0.5:
        remedy = (
            "nothing is ever paid: let the scorer pay for partial progress, use easier tasks, "
            "or train sft first"
        )
    else:
        remedy = (
            "make partial progress pay, use easier tasks, or train with a greater group_size "
            "or temperature"
        )
    shares = f"all zero in {percent(zero)}, all right in {percent(right)}"
    return Sign(
        f"in {percent(share)} of the groups of {recent} all rollouts scored the same (mean reward "
        f"{recent.share('reward/mean'):.2f}; {shares}): they teach nothing",
        remedy,
        # A run that ends with solved tasks is done; one that begins with them learns nothing.
        is_problem=share >= 0.95 and (steps.is_sample or not is_solved),
    )


@_check("d", of_reward=True, is_doubt=True)
def too_hard(steps: Steps, recent: Steps) -> Sign | None:
    unsolved = recent.share("groups/unsolved_share")
    if len(recent) < WINDOW or unsolved < 0.8 or uniform_groups(steps, recent):
        return None
    return Sign(
        f"in {percent(unsolved)} of the groups of {recent} no rollout succeeded, in "
        f"{percent(_middle(recent))} some did: success itself is hardly ever compared",
        "train on easier tasks first, on sft gold answers first, or with a greater group_size",
    )


@_check("e", of_reward=True, is_doubt=True)
def too_easy(steps: Steps, recent: Steps) -> Sign | None:
    solved = recent.share("groups/solved_share")
    if len(recent) < WINDOW or solved < 0.8 or uniform_groups(steps, recent):
        return None
    return Sign(
        f"in {percent(solved)} of the groups of {recent} every rollout succeeded, in "
        f"{percent(_middle(recent))} only some did",
        "stop here, or train on harder tasks: what is left to learn is in the reward's other parts",
    )


def _middle(recent: Steps) -> float:
    ends = recent.share("groups/solved_share") + recent.share("groups/unsolved_share")
    return max(0.0, 1 - ends)


@_check("f")
def truncation(steps: Steps, recent: Steps) -> Sign | None:
    share = recent.share("rollouts/truncated_share")
    if share < 0.2:
        return None
    return Sign(
        f"{percent(share)} of the rollouts of {recent} were cut off at max_tokens or max_length",
        "train with a greater max_tokens (and max_length) or stop_sequences, or ask for shorter "
        "answers in the prompt",
        is_problem=share >= 0.5,
    )


@_check("g")
def solved(steps: Steps, recent: Steps) -> Sign | None:
    """For a sample alone: the outlook says the same of a run."""
    success = recent.share("success/rate")
    if not steps.is_sample or success < SOLVED:
        return None
    return Sign(
        f"{percent(success)} of the rollouts succeed already, before any training",
        "take harder tasks: there is little left to learn from these",
    )


@dataclass(frozen=True)
class Difference:
    """Mean of the last third of the values less that of the first, and its noise."""

    change: float
    band: float
    falling: float
    """Bands of a fall."""

    @property
    def is_fall(self) -> bool:
        return self.change < -self.falling * self.band

    def __str__(self) -> str:
        return f"{self.change:+.3f} ± {self.band:.3f}"


def _difference(values: Sequence[float]) -> Difference | None:
    """None for fewer than LONG values."""
    if len(values) < LONG:
        return None
    third = len(values) // 3
    first = values[:third]
    last = values[-third:]
    band = t95(2 * (third - 1)) * math.sqrt((variance(first) + variance(last)) / third)
    falling = FALLING + 0.2 * max(0.0, math.log2(len(values) / 50))
    return Difference(fmean(last) - fmean(first), band, falling)


def _reward_change(steps: Steps, recent: Steps) -> Difference | None:
    """None for a run that is solved, or too short to tell."""
    if recent.share("success/rate") > SOLVED:
        return None
    return _difference(steps.column("reward/mean"))


def _reward_evidence(steps: Steps, moved: Difference) -> str:
    return f"mean reward of the last third of {steps} less that of the first: {moved}"


@_check("h", of_reward=True, is_doubt=True)
def reward_flat(steps: Steps, recent: Steps) -> Sign | None:
    moved = _reward_change(steps, recent)
    if moved is None or moved.is_fall or moved.change > moved.band:
        return None
    return Sign(
        _reward_evidence(steps, moved),
        "look at rollouts for what is paid; raise learning_rate (LoRA often takes 1e-4 to 2e-4) "
        "or make partial progress pay",
    )


@_check("i", of_reward=True)
def reward_falling(steps: Steps, recent: Steps) -> Sign | None:
    moved = _reward_change(steps, recent)
    if moved is None or not moved.is_fall:
        return None
    return Sign(
        _reward_evidence(steps, moved),
        "lower learning_rate, or look for a reward that pays for the wrong thing",
        is_problem=True,
    )


@_check("j", of_reward=True, is_doubt=True)
def reward_without_success(steps: Steps, recent: Steps) -> Sign | None:
    reward = _reward_change(steps, recent)
    success = _difference(steps.column("success/rate"))
    if reward is None or success is None:
        return None
    # Rewards have any unit: what is small is so beside the largest of them.
    least = LEAST_RISE * max(map(abs, steps.column("reward/mean")))
    if reward.change <= max(reward.band, least) or success.change > success.band:
        return None
    share = recent.share("success/rate")
    return Sign(
        f"from the first to the last third of {steps} the reward changed by {reward}, "
        f"success by {success}, to {percent(share)}",
        "read rollouts (which=best): what is paid that is no success? Pay less for it in the "
        "scorer, env_test, env_push, train again",
        is_problem=success.change < -success.band,
    )


@_check("k", of_reward=True, is_doubt=True)
def length_collapse(steps: Steps, recent: Steps) -> Sign | None:
    lengths = trend(steps.column("tokens/completion_mean"))
    if steps.column("tokens/thinking_penalty"):  # the run pays for short thinking
        return None
    rewards = trend(steps.column("reward/mean"))
    if not lengths or not rewards or len(steps) < WINDOW:
        return None
    if lengths.last > 0.5 * lengths.first or rewards.last < rewards.first + 0.02:
        return None
    success = trend(steps.column("success/rate"))
    is_earned = success is not None and success.last > success.first + 0.1
    # A success that is never false is none: as a rule the environment does not judge it apart from
    # the score.
    is_held = (
        success is not None and 0.3 < success.last < 0.999 and success.last >= success.first - 0.05
    )
    change = ""
    if success:
        change = f", success from {percent(success.first)} to {percent(success.last)}"
    return Sign(
        f"answers shrank from {lengths.first:.0f} to {lengths.last:.0f} tokens over {steps} while "
        f"the reward rose from {rewards.first:.3f} to {rewards.last:.3f}{change}",
        "read rollouts (which=best): where they exploit the scorer, change the scorer and "
        "env_push; short answers may also be right",
        is_problem=not is_earned and not is_held,
    )


@_check("v", of_reward=True)
def overthinking(steps: Steps, recent: Steps) -> Sign | None:
    tokens = trend(steps.column("tokens/thinking_mean"))
    success = trend(steps.column("success/rate"))
    if not tokens or not success:
        return None
    cut_off = recent.share("rollouts/overthinking_share")
    grows = len(steps) >= WINDOW and tokens.last >= 1.5 * tokens.first
    is_vain = grows and success.last <= success.first + 0.05
    if cut_off < 0.2 and not is_vain:
        return None
    what = f"{percent(cut_off)} of the rollouts of {recent} were cut off"
    what += " while the model still thought"
    if is_vain:
        what += f"; thinking grew over {steps}, success did not"
    coef = 0.2 / max(tokens.last, 1.0)
    return Sign(
        f"{what}: from {tokens.first:.0f} to {tokens.last:.0f} tokens of thinking, success from "
        f"{percent(success.first)} to {percent(success.last)}",
        f"where some succeed, train with settings={{'thinking_length_penalty_coef': {coef:.1g}}}; "
        "where few do, raise max_tokens or ask for short reasoning in the prompt",
    )


@_check("l", of_reward=True, is_doubt=True)
def reward_follows_length(steps: Steps, recent: Steps) -> Sign | None:
    result = recent.column("tokens/reward_correlation")
    if len(result) < 5 or abs(fmean(result)) < 0.7:
        return None
    which = "longer" if fmean(result) > 0 else "shorter"
    return Sign(
        f"among rollouts of one prompt with the same success, {which} ones are paid more: "
        f"correlation {fmean(result):+.2f} in {len(result)} of {recent}",
        "read rollouts (which=best) and look at what the scorer counts; take length out of it, "
        "unless it is the goal",
    )


@_check("m", of_reward=True, is_doubt=True)
def entropy_collapse(steps: Steps, recent: Steps) -> Sign | None:
    entropy = trend(steps.column("entropy"))
    success = recent.mean("success/rate")
    if success is None or success > SOLVED:  # sft has no success: its aim is to be sure
        return None
    if not entropy or entropy.first <= 0 or entropy.last > 0.15 * entropy.first:
        return None
    fall = f"entropy fell from {entropy.first:.3f} to {entropy.last:.3f}"
    return Sign(
        f"{fall} at {percent(success)} success: little else is tried",
        "lower learning_rate, raise temperature, or add kl_penalty_coef=0.01",
    )


@_check("n", is_doubt=True)
def repeated_outputs(steps: Steps, recent: Steps) -> Sign | None:
    share = recent.share("rollouts/repeated_share")
    success = recent.share("success/rate")
    are_words = recent.share("tokens/completion_mean") < 8  # these repeat by themselves
    if share < 0.75 or success > 0.7 or are_words:
        return None
    return Sign(
        f"{percent(share)} of the rollouts of {recent} repeat another of their group word for "
        f"word, at {percent(success)} success: nothing new is tried",
        "train with a higher temperature or a lower learning_rate from an earlier checkpoint "
        "(init_from_adapter)",
    )


def has_collapsed(common_share: float, common_success: float) -> bool:
    """Whether nearly all tasks get one answer, which is wrong for some of them."""
    return common_share >= COLLAPSED and common_success < COLLAPSED


@_check("o", is_doubt=True)
def answer_collapse(steps: Steps, recent: Steps) -> Sign | None:
    share = recent.share("answers/common_share")
    right = recent.share("answers/common_success")
    if not has_collapsed(share, right):
        return None
    return Sign(
        f"{percent(share)} of the rollouts of {recent} end in the same answer whatever the task, "
        f"and it is right in {percent(right)}: the model guesses",
        "balance the tasks so that no answer is right more often than others, train sft on gold "
        "answers first, or take an earlier checkpoint (init_from_adapter); compare names the best "
        "constant answer",
    )


@_check("p")
def policy_mismatch(steps: Steps, recent: Steps) -> Sign | None:
    ratio = recent.mean("is_ratio/mean")
    if ratio is None or abs(ratio - 1) < 0.2:
        return None
    return Sign(
        "the trainer's and the engine's probabilities differ: "
        f"mean ratio {ratio:.2f} instead of about 1",
        "with top_p below 1 that is so by itself, the engine's being of the nucleus alone: set "
        "top_p=1; else keep importance_sampling on and lower learning_rate",
    )


@_check("q")
def policy_spike(steps: Steps, recent: Steps) -> Sign | None:
    for name, least in SPIKES.items():
        values = recent.column(name)
        if len(values) < 5 or max(values) < max(least, 5 * median(values)):
            continue
        at = next(step.get("step") for step in recent.metrics if step.get(name) == max(values))
        where = f"in one of {recent}" if at is None else f"at step {at:g}"
        jump = f"{name} jumped to {max(values):.3g} {where}"
        return Sign(
            f"{jump}; the median of {recent} is {median(values):.3g}",
            "train with a lower learning_rate or max_grad_norm; if the reward fell too, go on from "
            "the checkpoint before it (init_from_adapter=RUN_ID@STEP)",
        )
    return None


@_check("r", is_doubt=True)
def overfitting(steps: Steps, recent: Steps) -> Sign | None:
    losses = steps.column("eval_loss")
    if len(losses) < 3 or losses[-1] <= 1.05 * min(losses):
        return None
    return Sign(
        f"the held-out loss rose from {min(losses):.3f} to {losses[-1]:.3f}",
        "use an earlier checkpoint, fewer epochs, or more data",
    )


@_check("u")
def stale_policy(steps: Steps, recent: Steps) -> Sign | None:
    share = recent.share("is_ratio/clipped_share")
    if share < TRUNCATED:
        return None
    effective = recent.share("is_ratio/effective_share")
    return Sign(
        f"{percent(share)} of the trained tokens of {recent} count less than their advantage says, "
        f"because the policy has moved away from the one that sampled them; they weigh as much as "
        f"{percent(effective)} of them would",
        "train with a lower max_staleness or learning_rate",
    )
