"""env_setup, env_push and env_test: from an empty folder to a published environment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
from anyio.to_thread import run_sync
from pydantic import Field

from environments.checks import gate
from environments.checks.gate import HUNT
from environments.checks.playing import GivenTurn, Task, play
from environments.checks.report import Probe as GateProbe
from environments.checks.report import Report as GateReport
from environments.checks.splits import Overlap, overlap
from environments.process.host import EnvironmentFault, EnvironmentHost
from environments.sandbox.confinement import describe
from environments.sandbox.needs import Needs
from environments.settings import identity
from environments.tools import tool_calls_of
from environments.untrusted_text import plain_name
from flash_mcp.judgement.attempts import by_task
from flash_mcp.protocol import extensions
from flash_mcp.protocol.errors import (
    EVIDENCE_CHARACTERS,
    FlashError,
    did_you_mean,
    expanded,
    nearest,
)
from flash_mcp.protocol.records import EnvironmentVersion, Json, text_of
from flash_mcp.protocol.result_model import Rounded
from flash_mcp.state import references, versions
from flash_mcp.state.owners import caller
from flash_mcp.state.references import find_subject
from flash_mcp.state.store import open_store
from flash_mcp.tools.shared import loading, preflight, replaying
from flash_mcp.tools.shared.next_steps import after_sample, after_test, passed_on
from flash_mcp.tools.shared.resolve import env_files
from flash_mcp.tools.shared.tool_base import Result, ResultModel, longest_wait_s, report
from flash_mcp.tools.shared.truncation import shorten, to_text

LOAD_TIMEOUT_S = 25.0
TRACEBACK = "\n| Traceback"
"""How a traceback begins within evidence."""
CALL_TIMEOUT_S = 15.0
SLOW_OPENING_S = 12.0
"""Less than CALL_TIMEOUT_S: then the opening is left out."""
TEST_DEADLINE_S = 38.0
_under_way: dict[str, asyncio.Task[GateReport]] = {}
"""Checks that outlast the calls that began them."""
KEPT_S = 600.0
"""How long after their end checks that nobody waits for are kept for the same call."""
MOST_REPLIES = 6
"""Of what the environment answers to an answer's turns."""
HUNT_LIMIT_S = 43.0
"""A call with hunt ends within this time: clients give up on longer ones."""


class EnvPush(Result):
    """A published version."""

    environment: str
    """NAME@DIGEST: always exactly these files. NAME alone is the newest push."""
    created: bool
    """False if the same files were pushed under this name before."""
    train_tasks: int | None = None
    """Rows of the train split; absent with load=false."""
    eval_tasks: int | None = None
    """Rows of the eval split; absent with load=false."""
    asks: dict[str, Any] | None = None
    """What its environment.toml asks for, for example network."""
    files: int
    """Number of files."""
    size_bytes: int
    """Size of all files."""
    contaminated: str | None = None
    """Present if eval tasks are train tasks too: how many, and which."""
    gate: str
    """What env_test last found of these files: passed, failed with its checks, or never run."""
    certificate: str | None = None
    """The answers of `flash-mcp certify` on exactly these files, if it was made."""


class CheckView(ResultModel):
    """One check."""

    name: str
    result: Literal["failed", "open"] | None = None
    evidence: str
    fix: str | None = None


class Scored(ResultModel):
    """What an answer earned."""

    answer: str
    replies: list[str] | None = None
    goes_on: bool | None = None
    reward: Rounded
    success: bool
    reason: str | None = None
    metrics: dict[str, Rounded] | None = None


class EnvTest(Result):
    """What the checks found."""

    environment: str
    """What was checked: a folder or NAME@DIGEST."""
    passed: bool | None = None
    """Whether no check failed. Absent if some are unfinished: the verdict is open."""
    unfinished: list[str] | None = None
    """The checks for which there was no time."""
    accepted: list[str] | None = None
    """The checks that failed, and whose failure `accept` took."""
    train_tasks: int
    """Rows of the train split; 0 if it did not load."""
    eval_tasks: int
    """Rows of the eval split; 0 if there is none."""
    seconds: float
    """Seconds that all checks took."""
    probes: list[CheckView]
    """Every check, in order."""
    sandbox: str | None = None
    """What of this machine is protected from the environment's code, and what is not; absent if
    everything is, or it did not load."""
    scored: list[Scored] | None = None
    """With answers: what each of them earned."""
    replay: replaying.Replay | None = None
    """With replay: what the run's rollouts earn in this version."""
    sample: preflight.Sample | None = None
    """With model: its attempts at a few train tasks."""


# -- env_push --------------------------------------------------------------------------------------


async def env_push(
    name: Annotated[
        str,
        Field(
            min_length=1, max_length=64, description=f"Name to publish under: {versions.NAME_RULE}."
        ),
    ],
    folder: str | None = None,
    files: dict[str, str] | None = None,
    load: bool = True,
    environment_args: loading.Arguments = None,
    secrets: loading.Secrets = None,
) -> EnvPush:
    """Publish an environment as NAME@DIGEST, a version that never changes. Each run uses one
    version.

    The same files give the same digest, so a second push changes nothing. NAME alone then means the
    newest push; existing runs keep their version. To check an environment more thoroughly, call
    env_test.

    Args:
        folder: Folder on the server with environment.py at its top, or reasoning-gym:DATASET.
            The packages of its requirements.txt, or else pyproject.toml, are all that it sees.
        files: Instead of folder: {relative path: text}, if the server does not see it.
        load: Load it and open an episode first, and refuse what fails. false: for one that
            loads only where it trains.
    """
    versions.check_name(name)
    values = loading.secret_values(secrets, _env_files(folder))
    source = await run_sync(_source, folder, files)
    return await publish(name, source, load=load, environment_args=environment_args, values=values)


async def publish(
    name: str,
    source: versions.Files,
    *,
    load: bool = True,
    environment_args: dict[str, Any] | None = None,
    values: Mapping[str, str] | None = None,
) -> EnvPush:
    """`env_push`, wherever the files come from; `values` are those of the secrets."""
    splits: dict[str, int] = {}
    shared = None
    generated: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stage = await run_sync(stack.enter_context, versions.staged(name, source))
        try:
            asks = Needs.from_folder(stage.folder).requested()
        except ValueError as error:
            fix = "correct it, or leave it out: most environments need none"
            what = "its environment.toml cannot be used"
            raise FlashError("environment_invalid", what, fix=fix, wrote=str(error)) from error
        if load:
            splits, shared, generated = await _splits(stage, environment_args, dict(values or {}))
        data = {"tasks": splits} if splits else {}
        pushed, version = await run_sync(open_store().publish, stage, data)
        await run_sync(versions.keep_generated, version.path, generated)
    gate_verdict = await run_sync(open_store().gate, version.digest, environment_args)
    if gate_verdict.is_refused and not gate_verdict.failed:
        next_step = f"env_test(environment={name!r}, time_s=600) finishes its checks"
    elif gate_verdict.is_refused:
        next_step = "do what the failed checks of env_test say, then env_test and env_push again"
    elif shared and shared.shared:
        next_step = "take the shared tasks out of one of the splits, env_test and env_push again"
    else:
        options = f"validate_only=true{passed_on(values, environment_args)}"
        next_step = f"train(environment={name!r}, {options})"
        if gate_verdict.time is None:
            next_step = f"env_test(environment={name!r}), then {next_step}"
    return EnvPush(
        environment=f"{version.name}@{version.digest}",
        created=version.created,
        train_tasks=splits.get("train"),
        eval_tasks=splits.get("eval"),
        asks=asks or None,
        files=version.files,
        size_bytes=version.size_bytes,
        contaminated=loading.contamination_note(shared) if shared else None,
        gate=str(gate_verdict),
        certificate=await run_sync(references.certificate_of, pushed),
        next=next_step,
    )


def _env_files(folder: str | None) -> list[str]:
    if folder is None:
        return []
    path = expanded(folder)
    return env_files(path / "configs", path)


def _source(folder: str | None, files: dict[str, str] | None) -> versions.Files:
    if (folder is None) == (files is None):
        files_example = "{'environment.py': '...', 'datasets/train.jsonl': '...'}"
        fix = f"pass folder='/path/of/it', or files={files_example}"
        raise FlashError("invalid_argument", "either folder or files is needed, not both", fix=fix)
    if folder is None:
        return versions.inline_files(files or {})
    return references.files_of(folder) or versions.folder_files(Path(folder))


async def _splits(
    stage: versions.Stage, args: dict[str, Any] | None, secrets: dict[str, str]
) -> tuple[dict[str, int], Overlap, dict[str, str]]:
    """Load the staged environment and open an episode: split sizes, overlap, generated tasks."""
    await report("loading the environment in a child process")
    async with loading.hosted(
        stage.folder,
        stage.parent.name,
        known_as=identity(caller().owner, stage.parent.name),
        args=args,
        secrets=secrets,
        timeout_s=CALL_TIMEOUT_S,
        start_timeout_s=LOAD_TIMEOUT_S,
        fix="nothing was published: correct it and push again; load=false skips the loading",
    ) as host:
        needs = Needs.from_folder(stage.folder)
        opening_s = LOAD_TIMEOUT_S
        if needs.endpoint or needs.call_timeout_s > CALL_TIMEOUT_S:
            opening_s = SLOW_OPENING_S  # an agent may work for longer before it asks the model
        with anyio.move_on_after(opening_s):
            opening = await host.open("train", 0)
            await host.close(opening.episode)
        return host.splits, await overlap(host), await host.generated()


# -- env_test --------------------------------------------------------------------------------------


async def env_test(
    environment: Annotated[str | None, Field(min_length=1)] = None,
    folder: Annotated[str | None, Field(min_length=1)] = None,
    call_timeout_s: Annotated[float, Field(gt=0, le=20)] = 5.0,
    time_s: Annotated[float, Field(gt=0, le=3600)] = TEST_DEADLINE_S,
    accept: list[str] | None = None,
    answers: Annotated[list[str | list[Json]] | None, Field(min_length=1, max_length=100)] = None,
    task_id: str | None = None,
    replay: str | None = None,
    model: Annotated[str | None, Field(min_length=1)] = None,
    max_tokens: Annotated[int | None, Field(ge=1, le=131_072)] = None,
    hunt: bool = False,
    environment_args: loading.Arguments = None,
    secrets: loading.Secrets = None,
) -> EnvTest:
    """Load an environment in a child process and check, on 5 train and 3 eval tasks, for what
    breaks training runs.

    Fails it if tasks repeat or are in both splits; a gold answer is no success; junk, empty, None,
    truncated or prompt-echo answers often succeed or earn over 0.4 of the gold answer's reward; the
    gold answer succeeds with a character changed or beside another answer; nonsense raises; junk
    earns more than a wrong answer of the right form; one answer wins nearly everywhere; episodes at
    once go differently than alone; two processes disagree; a call is slow. Publishes nothing. A
    failed check is a result with a fix, not an error.

    Args:
        environment: A published environment, NAME or NAME@DIGEST; or reasoning-gym:DATASET.
        folder: Instead of environment: a folder on the server.
        call_timeout_s: Seconds for one call into environment code.
        time_s: Seconds for all checks. Ask for over 40 only if your client waits that long.
        accept: Names of checks whose failure you take: the verdict passes and names them.
        answers: What to score instead of the checks: each a text, or the turns of a conversation,
            [{"content": "", "tool_calls": [{"name": "find", "arguments": {"id": 3}}]}].
        task_id: The task of answers; default the first.
        replay: Instead of the checks: a run whose newest 1,000 rollouts are scored.
        model: If all checks pass, a base model that plays a few train groups: could it learn?
        max_tokens: With model: tokens per turn; default 512.
        hunt: Also search up to 40 s for a cheap answer that pays; with model, its best of n.
    """
    started = time.monotonic()
    hunting = extensions.find("flash_mcp.checks", HUNT) if hunt else None
    values = loading.secret_values(secrets, _env_files(folder))
    arguments = {"max_tokens": max_tokens, "environment_args": environment_args, "secrets": secrets}
    sample = None
    with contextlib.ExitStack() as stack:
        what, known_as, path = await run_sync(_locate, environment, folder, stack)
        subject = _Subject(what, known_as, path, environment_args, values, call_timeout_s)
        if answers is not None:
            return await _scored(subject, answers, task_id)
        if replay is not None:
            named = f"folder={folder!r}"
            if environment:
                named = f"environment={environment!r}"
            return await _replayed(subject, replay, named)
        reference = environment or folder or ""
        for name in sorted({*(accept or ())} - {*gate.PROBES}):
            what = f"there is no check {name!r} to accept{did_you_mean(name, gate.PROBES)}"
            raise FlashError("invalid_argument", what, fix=f"use: {', '.join(gate.PROBES)}")
        result = await _at_last(reference, subject, time_s, max_tokens, accept or [])
        if hunting and result.splits:
            result.probes.append(await _hunted(hunting, subject, started + HUNT_LIMIT_S))
            await run_sync(_keep, subject, result, True)
        if model is not None and result.passed:
            ends = started + preflight.SAMPLE_LIMIT_S
            sample = await _sampled(model, environment, path, result, arguments, ends)
        if hunting and sample and sample.scores:
            groups = await run_sync(_groups, sample)
            look = f"rollouts(run_id={sample.run_id!r}, which='best')"
            result.probes.append(hunting.best_of_n(groups, look))
    trainable = environment or (folder if folder and references.files_of(folder) else None)
    needed = passed_on(secrets, environment_args)
    next_step = after_test(result, trainable, path, needed)
    return EnvTest(
        environment=what,
        passed=None if result.verdict == "unfinished" else result.passed,
        unfinished=result.unfinished or None,
        accepted=result.accepted or None,
        train_tasks=result.splits.get("train", 0),
        eval_tasks=result.splits.get("eval", 0),
        seconds=round(result.seconds, 2),
        probes=list(map(_shown, _without_repeats(result.probes))),
        sandbox=describe(result.sandbox) if any(result.sandbox.values()) else None,
        sample=sample,
        next=after_sample(sample) if sample else next_step,
    )


@dataclass(frozen=True)
class _Subject:
    what: str
    known_as: str
    path: Path
    args: Json | None
    secrets: dict[str, str]
    call_timeout_s: float

    def opened(self, fix: str) -> AbstractAsyncContextManager[EnvironmentHost]:
        return loading.hosted(
            self.path,
            self.what,
            known_as=self.known_as,
            args=self.args,
            secrets=self.secrets,
            timeout_s=self.call_timeout_s,
            start_timeout_s=LOAD_TIMEOUT_S,
            fix=fix,
        )


async def _at_last(
    reference: str, subject: _Subject, time_s: float, max_tokens: int | None, accepted: list[str]
) -> GateReport:
    """The report of checks that may outlast the call. They go on, and the same call joins them."""
    checking = partial(_checked, subject, time_s, max_tokens, accepted)
    # Generated files are gone after the call.
    if time_s <= longest_wait_s() or references.files_of(reference):
        return await checking()
    digest = ""
    with contextlib.suppress(FlashError):  # a folder that cannot be pushed has none
        digest = await run_sync(
            lambda: versions.digest_of_files(versions.folder_files(subject.path))
        )
    if not digest:  # a later call could not tell whether its files are still the same
        return await _checked(subject, longest_wait_s(), max_tokens, accepted)
    key = repr((caller().owner, digest, checking.args))
    if key not in _under_way:
        _under_way[key] = asyncio.create_task(checking())
        loop = asyncio.get_running_loop()
        _under_way[key].add_done_callback(lambda task: loop.call_later(KEPT_S, _drop, key, task))
    task = _under_way[key]
    await asyncio.wait((task,), timeout=longest_wait_s())
    if not task.done():
        fix = "call env_test again with the same arguments: it waits for them"
        raise FlashError("not_ready", "the checks go on after this call", fix=fix)
    _under_way.pop(key, None)
    return task.result()


def _drop(key: str, task: asyncio.Task[GateReport]) -> None:
    if _under_way.get(key) is task:
        del _under_way[key]


async def _checked(
    subject: _Subject, time_s: float, max_tokens: int | None, accepted: list[str]
) -> GateReport:
    await report("checking the environment in child processes")
    try:
        result = await gate.check(
            subject.path,
            known_as=subject.known_as,
            args=subject.args,
            secrets=subject.secrets,
            timeout_s=subject.call_timeout_s,
            deadline_s=time_s,
            max_tokens=max_tokens,
            accepted=accepted,
            install_timeout_s=loading.INSTALL_TIMEOUT_S,
            on_progress=report,
        )
    except EnvironmentFault as fault:
        raise loading.as_flash_error(fault, subject.what, "env_test again") from fault
    if result.splits:  # what does not load has its fault already
        try:
            await run_sync(versions.folder_files, subject.path)
        except FlashError as error:
            evidence = f"env_push refuses the folder: {error.what}"
            result.probes.append(GateProbe("files", False, evidence, error.fix))
    await run_sync(_keep, subject, result, False)
    return result


async def _hunted(hunting: Any, subject: _Subject, deadline: float) -> GateProbe:
    try:
        async with subject.opened("correct what the checks say") as host:
            left = max(1.0, deadline - time.monotonic())
            return await hunting.check(host, subject.path, left, report)
    except FlashError as error:  # what the checks found is no less true
        return GateProbe(HUNT, None, f"not made: {error}", "correct what the checks say", False)


def _turns(answer: str | list[Json]) -> list[GivenTurn]:
    """The model's turns of an answer. FlashError(invalid_argument) if it has none."""
    if isinstance(answer, str):
        return [GivenTurn(answer, [])]
    turns: list[GivenTurn] = []
    try:
        for message in answer:
            fields: Json = {"role": "assistant", "content": "", "tool_calls": [], **message}
            role, text, calls = map(fields.pop, ("role", "content", "tool_calls"))
            if role != "assistant" or fields or not isinstance(text, str | None):
                raise ValueError(f"a turn has content and tool_calls, got {message!r:.100}")
            turns.append(GivenTurn(text or "", tool_calls_of(calls or [])))
        if not turns:
            raise ValueError("an answer has no turns")
    except ValueError as error:
        example = "{'content': '', 'tool_calls': [{'name': 'find', 'arguments': {'id': 3}}]}"
        fix = f"list the model's turns alone, each as {example}: the environment answers them"
        raise FlashError("invalid_argument", f"answers: {error}", fix=fix) from error
    return turns


async def _scored(
    subject: _Subject, answers: Sequence[str | list[Json]], task_id: str | None
) -> EnvTest:
    started = time.monotonic()
    results: list[Scored] = []
    turns = list(map(_turns, answers))
    async with subject.opened("return a low score instead of raising") as host:
        task = await _task(host, task_id)
        with anyio.move_on_after(started + longest_wait_s() - time.monotonic()):
            for answer, taken in zip(answers, turns, strict=True):
                said = answer
                if not isinstance(said, str):
                    said = to_text(said)
                played = await play(host, task, taken, repeat=said is answer)
                score = played.score
                replies = list(map(text_of, played.replies[:MOST_REPLIES]))
                earned = Scored(
                    answer=shorten(said, 200),
                    replies=list(map(partial(shorten, limit=200), replies)) or None,
                    goes_on=played.is_cut or None,
                    reward=score.reward,
                    success=score.success,
                    reason=score.reason,
                    metrics=score.metrics or None,
                )
                results.append(earned)
        splits = host.splits
    cut = None
    if len(results) < len(answers):
        scored = f"{len(results)} of {len(answers)} answers"
        cut = f"the time of a call ended after {scored}; call again with the others"
    return EnvTest(
        environment=subject.what,
        train_tasks=splits["train"],
        eval_tasks=splits["eval"],
        seconds=round(time.monotonic() - started, 2),
        probes=[],
        scored=results,
        cut=cut,
        next="if an answer is scored wrongly, correct the scorer; without answers the checks run",
    )


async def _replayed(subject: _Subject, run_id: str, named: str) -> EnvTest:
    started = time.monotonic()
    stored = await run_sync(replaying.stored_rollouts, open_store(), run_id)
    await report(f"playing {len(stored.rows)} rollouts of {run_id} again")
    async with subject.opened("return a low score instead of raising") as host:
        left = started + longest_wait_s() - time.monotonic()
        result = await replaying.played_again(host, stored, left)
        splits = host.splits
    cut = None
    if result.late:
        cut = f"the time of a call ended before {result.late} rollouts were played"
    return EnvTest(
        environment=subject.what,
        train_tasks=splits["train"],
        eval_tasks=splits["eval"],
        seconds=round(time.monotonic() - started, 2),
        probes=[],
        replay=result,
        cut=cut,
        next=replaying.after_replay(result, named),
    )


async def _task(host: EnvironmentHost, task_id: str | None) -> Task:
    if task_id is None:
        return Task("train", 0)
    names: list[str] = []
    for split in host.splits:
        own = [name for name, _ in await host.tasks(split)]
        if task_id in own:
            return Task(split, own.index(task_id))
        names += own
    fix = f"use an id like {', '.join(map(plain_name, nearest(task_id, names) or names[:3]))}"
    raise FlashError("invalid_argument", f"there is no task {task_id!r:.100}", fix=fix)


def _groups(sample: preflight.Sample) -> list[list[tuple[float, bool]]]:
    """(reward, success) of its attempts, by task."""
    store = open_store()
    step = store.run(sample.run_id).evaluation.step
    scored: list[list[tuple[float, bool]]] = []
    for group in by_task(store.tries(sample.run_id, step)).values():
        scored.append([(item.reward, item.success) for item in group])
    return scored


def _keep(subject: _Subject, result: GateReport, has_hunted: bool) -> None:
    """Store the verdict with the digest that the folder has, or would have once it is pushed. A
    failed hunt stays until another hunt, and a pass stays where there was no time to test again.
    """
    store = open_store()
    failed = result.failed
    with contextlib.suppress(FlashError):  # a folder that cannot be pushed has none
        digest = versions.digest_of_files(versions.folder_files(subject.path))
        before = store.gate(digest, subject.args)
        if not has_hunted and HUNT in before.failed:
            failed = [*failed, HUNT]
        has_passed = before.time is not None and not before.is_refused
        if not failed and result.unfinished and has_passed:
            return
        store.put_gate(digest, subject.args, failed, result.unfinished, result.accepted)


async def _sampled(
    model: str,
    environment: str | None,
    path: Path,
    result: GateReport,
    arguments: Json,
    deadline: float,
) -> preflight.Sample:
    store = open_store()
    subject = await run_sync(find_subject, store, model)
    loading.check_machine()
    return await preflight.sample_groups(
        store,
        await run_sync(_version, environment, path),
        subject,
        tasks=result.splits["train"],
        group_size=preflight.GROUP_SIZE,
        arguments=arguments,
        deadline=deadline,
    )


def _locate(
    environment: str | None, folder: str | None, stack: contextlib.ExitStack
) -> tuple[str, str, Path]:
    """What is tested, its name in settings.toml, and its folder, there until `stack` closes."""
    if (environment is None) == (folder is None):
        fix = "pass environment='NAME' for a published one, or folder='/path/of/it'"
        what = "either environment or folder is needed, not both"
        raise FlashError("invalid_argument", what, fix=fix)
    reference = environment or folder or ""
    if files := references.files_of(reference):
        name = references.published_name(reference)
        stage = stack.enter_context(versions.staged(name, files))
        return reference, identity(caller().owner, name), stage.folder
    if environment is not None:
        version = open_store().environment(environment)
        return version.reference, version.identity, Path(version.path)
    path = expanded(folder or "").absolute()
    if not path.is_dir():
        fix = "pass the folder that holds environment.py; env_setup writes one to start from"
        what = f"there is no folder {str(path)!r} on the server"
        raise FlashError("invalid_argument", what, fix=fix)
    return str(path), identity(caller().owner, path.name), path


def _version(environment: str | None, path: Path) -> EnvironmentVersion:
    """What a worker loads: a published version, or a copy of the folder that no name leads to."""
    if environment is not None and references.files_of(environment) is None:
        return open_store().environment(environment)
    name = path.name if versions.NAME.fullmatch(path.name) else "unpublished"
    with versions.staged(name, versions.folder_files(path)) as stage:
        version = stage.commit()
    return EnvironmentVersion(
        owner=caller().owner,
        name=name,
        digest=version.digest,
        path=str(version.path),
        size_bytes=version.size_bytes,
        pushed=0.0,
        data={},
    )


def _without_repeats(probes: Sequence[GateProbe]) -> list[GateProbe]:
    first: dict[str, str] = {}
    kept: list[GateProbe] = []
    for probe in probes:
        what, mark, traceback = probe.evidence.partition(TRACEBACK)
        frames = traceback.rpartition("\n")[0]  # the last line has the answer, which `what` has too
        if frames in first:
            kept.append(replace(probe, evidence=f"{what}\n| (traceback as in {first[frames]})"))
            continue
        if mark:
            first[frames] = probe.name
        kept.append(probe)
    return kept


def _shown(probe: GateProbe) -> CheckView:
    limit = EVIDENCE_CHARACTERS if probe.passed is False else EVIDENCE_CHARACTERS // 3
    evidence = shorten(probe.evidence, limit)
    shown = CheckView(name=probe.name, evidence=evidence, fix=probe.fix or None)
    if not probe.passed:
        shown.result = "open" if probe.passed is None else "failed"
    return shown
