"""Whether the eval split holds other tasks than the train split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from environments.process.host import EnvironmentHost

Tasks = Sequence[tuple[str, str]]
"""(task id, digest of what the model is asked), as EnvironmentHost.tasks lists them."""


@dataclass(frozen=True)
class Overlap:
    """Eval tasks that are train tasks too. Pairs are (train id, eval id), one an eval task.

    `same_id` are those whose ids agree although their questions do not.
    """

    eval_tasks: int
    same_question: list[tuple[str, str]]
    same_id: list[tuple[str, str]]

    @property
    def shared(self) -> int:
        return len(self.same_question) + len(self.same_id)

    def __str__(self) -> str:
        """The evidence: how many, and an instance of each kind."""
        parts: list[str] = []
        if self.same_question:
            train, held_out = self.same_question[0]
            parts.append(
                f"{len(self.same_question)} ask what a train task asks, e.g. train {train!r} = {held_out!r}"
            )
        if self.same_id:
            parts.append(
                f"{len(self.same_id)} have the id of a train task, e.g. {self.same_id[0][1]!r}"
            )
        return "; ".join(parts)


async def overlap(host: EnvironmentHost) -> Overlap:
    """Compare the splits of a loaded environment. EnvironmentFault where it cannot list its tasks."""
    return shared_tasks(await host.tasks("train"), await host.tasks("eval"))


def shared_tasks(train: Tasks, held_out: Tasks) -> Overlap:
    asked, ids = {digest: task_id for task_id, digest in train}, {task_id for task_id, _ in train}
    same_question = [(asked[digest], task_id) for task_id, digest in held_out if digest in asked]
    same_id = [
        (task_id, task_id) for task_id, digest in held_out if digest not in asked and task_id in ids
    ]
    return Overlap(len(held_out), same_question, same_id)
