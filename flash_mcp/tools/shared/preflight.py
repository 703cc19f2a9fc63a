"""A few groups of rollouts before any training: what GRPO can learn from, and how long it takes.

The groups are an evaluation of the train split, sampled as in training: with the same queue, engine
and scheduler. A second call with the same values finds the same evaluation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from anyio.to_thread import run_sync

from flash_mcp.judgement import health
from flash_mcp.judgement.health import Flag, SampleOutlook
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, Json, Run
from flash_mcp.protocol.result_model import ResultModel
from flash_mcp.state.references import Subject
from flash_mcp.state.store import Store
from flash_mcp.tools.shared import resolve
from flash_mcp.tools.shared.scores import Scores, scores_of
from flash_mcp.tools.shared.truncation import error_text
from flash_mcp.tools.shared.waiting import ended, submit

GROUPS = 8
GROUP_SIZE = 8
SAMPLE_LIMIT_S = 40.0
"""How long a call waits for its sample; the sample itself goes on."""


class Sample(ResultModel):
    """Groups that the untrained model generated."""

    run_id: str
    state: str
    done: int
    of: int
    groups: int
    group_size: int
    made_before: bool | None = None
    scores: Scores | None = None
    outlook: SampleOutlook | None = None
    findings: list[Flag] | None = None
    error: str | None = None


async def sample_groups(
    store: Store,
    environment: EnvironmentVersion,
    subject: Subject,
    *,
    tasks: int,
    group_size: int,
    arguments: Json,
    deadline: float,
    env_files: Sequence[str] = (),
) -> Sample:
    """GROUPS groups of the train split's `tasks`; waits until `deadline` (of time.monotonic)."""
    chosen = sorted(
        random.Random(arguments.get("seed") or 0).sample(range(tasks), min(GROUPS, tasks))
    )
    resolved = resolve.resolve_eval(
        subject, environment, split="train", tasks=chosen, attempts=group_size, arguments=arguments
    )
    lineage: Json = {"env_files": env_files}
    run, created, trouble = await submit(
        store, resolved, environment, subject, any_name=True, lineage=lineage
    )
    if trouble is None:
        run = await ended(store, run.id, deadline)
    sampled = await run_sync(_describe, store, run, trouble)
    sampled.made_before = None if created else True
    return sampled


def _describe(store: Store, run: Run, trouble: FlashError | None) -> Sample:
    spec = run.evaluation
    sample = Sample(
        run_id=run.id,
        state=run.state,
        done=run.step,
        of=spec.steps,
        groups=len(spec.tasks),
        group_size=spec.attempts,
    )
    error = trouble.to_dict() if trouble else None
    if run.state == "failed":
        error = run.error
    sample.error = error_text(error, 1000)
    evaluations = store.evals(run.id) if run.ended else []
    if evaluations:
        tries = store.tries(run.id, evaluations[-1].step)
        findings = health.sample_flags(tries, evaluations[-1].summary)
        sample.scores = scores_of(evaluations[-1], tries)
        sample.findings = findings or None
        sample.outlook = health.sample_outlook(findings)
    return sample
