"""Which eval tasks are train tasks too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.process.host import EnvironmentHost
from environments.untrusted_text import plain_name

Tasks = Sequence[tuple[str, str]]
"""(task id, digest of the question and its gold answer), as EnvironmentHost.tasks lists them."""


CHANCE = 0.1
"""Up to this share, eval tasks are train tasks in other words by chance, as 3 + 4 is 4 + 3."""


@dataclass(frozen=True)
class Overlap:
    """Eval tasks that are train tasks too, as pairs (train id, eval id), one for each eval task.

    `same_id` holds the tasks that share an id but not the question, `reworded` those in other
    words, if they are more than by chance.
    """

    eval_tasks: int
    same_question: list[tuple[str, str]]
    same_id: list[tuple[str, str]]
    reworded: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def shared(self) -> int:
        return len(self.same_question) + len(self.same_id) + len(self.reworded)

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
        if self.reworded:
            pairs = [" = ".join(map(plain_name, pair)) for pair in self.reworded[:2]]
            said = f"{len(self.reworded)} are a train task in other words"
            parts.append(f"{said}, e.g. train {' and '.join(pairs)}")
        return "; ".join(parts)


async def overlap(host: EnvironmentHost) -> Overlap:
    """Compare the splits of a loaded environment. EnvironmentFault if it cannot list its tasks."""
    train, held_out = await host.tasks("train"), await host.tasks("eval")
    return shared_tasks(train, held_out, await host.reworded() if held_out else ())


def shared_tasks(
    train: Tasks, held_out: Tasks, reworded: Sequence[tuple[int, int]] = ()
) -> Overlap:
    """`reworded` are places in train and eval."""
    id_of_question = {digest: task_id for task_id, digest in train}
    train_ids = {task_id for task_id, _ in train}
    result = Overlap(len(held_out), [], [])
    for task_id, digest in held_out:
        if digest in id_of_question:
            result.same_question.append((id_of_question[digest], task_id))
        elif task_id in train_ids:
            result.same_id.append((task_id, task_id))
    if len(reworded) > CHANCE * len(held_out):
        known = {eval_id for _, eval_id in result.same_question + result.same_id}
        pairs = [(train[place][0], held_out[other][0]) for place, other in reworded]
        result.reworded.extend(pair for pair in pairs if pair[1] not in known)
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
