"""Which eval tasks are train tasks too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from environments.process.host import EnvironmentHost
from environments.untrusted_text import plain_name

Tasks = Sequence[tuple[str, str]]
"""(task id, digest of the question and its gold answer), as EnvironmentHost.tasks lists them."""


@dataclass(frozen=True)
class Overlap:
    """Eval tasks that are train tasks too, as pairs (train id, eval id), one for each eval task.

    `same_id` holds the tasks that share an id but not the question.
    """

    eval_tasks: int
    same_question: list[tuple[str, str]]
    same_id: list[tuple[str, str]]

    @property
    def shared(self) -> int:
        return len(self.same_question) + len(self.same_id)

    def __str__(self) -> str:
        """How many there are of each kind, with an example."""
        parts: list[str] = []
        if self.same_question:
            example = " = ".join(map(plain_name, self.same_question[0]))
            count = len(self.same_question)
            parts.append(f"{count} ask what a train task asks, e.g. train {example}")
        if self.same_id:
            example = plain_name(self.same_id[0][1])
            parts.append(f"{len(self.same_id)} have the id of a train task, e.g. {example}")
        return "; ".join(parts)


async def overlap(host: EnvironmentHost) -> Overlap:
    """Compare the splits of a loaded environment. EnvironmentFault if it cannot list its tasks."""
    return shared_tasks(await host.tasks("train"), await host.tasks("eval"))


def shared_tasks(train: Tasks, held_out: Tasks) -> Overlap:
    id_of_question = {digest: task_id for task_id, digest in train}
    train_ids = {task_id for task_id, _ in train}
    result = Overlap(len(held_out), [], [])
    for task_id, digest in held_out:
        if digest in id_of_question:
            result.same_question.append((id_of_question[digest], task_id))
        elif task_id in train_ids:
            result.same_id.append((task_id, task_id))
    return result


def repeated_questions(tasks: Tasks) -> list[tuple[str, str]]:
    """Pairs (earlier id, id) of the tasks that ask what an earlier one asks."""
    first: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for task_id, digest in tasks:
        if digest in first:
            pairs.append((first[digest], task_id))
        else:
            first[digest] = task_id
    return pairs
