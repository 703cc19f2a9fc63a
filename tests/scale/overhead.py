"""What a target costs against this machine: seconds to the first step, seconds of a step, and requests to the store."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.scale.rehearsal import Rehearsal

STEPS = 40
COUNTED_FROM = 5
IDLE_S = 60.0


@dataclass
class Cost:
    """Of one run of the tiny model. Requests of a step are those of the supervisor and the node, without those that
    an idle run makes in its time."""

    target: str
    first_step_s: float
    step_s: float
    step_requests: float | None = None
    idle_requests: int | None = None  # in a minute in which the run makes no progress


def measure(rehearsal: Rehearsal, target: str) -> Cost:
    """A run of STEPS steps, and on a target a minute of one that waits for its environment."""
    called = time.time()
    run_id = rehearsal.train(target, steps=STEPS, save_every=STEPS)
    store, objects = rehearsal.store, rehearsal.objects
    rehearsal.until(lambda: store.run(run_id).step >= COUNTED_FROM, "the first steps")
    before = objects.requests()
    first = store.run(run_id).step
    began = time.monotonic()
    rehearsal.until(lambda: store.run(run_id).step >= STEPS - 5, "the last steps but some")
    made = objects.requests() - before
    steps = store.run(run_id).step - first
    seconds = time.monotonic() - began
    rehearsal.ended(run_id)
    times = [row.time for row in store.metrics(run_id)]
    step_s = (times[-1] - times[0]) / (STEPS - 1)
    cost = Cost(target, times[0] - called, step_s)
    if target != "local":
        cost.idle_requests = _while_idle(rehearsal, target)
        cost.step_requests = (made - cost.idle_requests * seconds / IDLE_S) / max(1, steps)
    return cost


def _while_idle(rehearsal: Rehearsal, target: str) -> int:
    """Requests of a minute in which the environment scores one answer."""
    arguments = f"{{pause_s = {2 * IDLE_S}}}"
    run_id = rehearsal.train(target, steps=1, environment_args=arguments, env_timeout_s=300)
    store, objects = rehearsal.store, rehearsal.objects
    rehearsal.until(lambda: str(store.run(run_id).phase).startswith("rollout"), "its rollouts")
    time.sleep(10)
    before = objects.requests()
    time.sleep(IDLE_S)
    made = objects.requests() - before
    rehearsal.flash("cancel", run_id)
    rehearsal.until(lambda: store.run(run_id).ended, "the end of a cancelled run")
    return made
