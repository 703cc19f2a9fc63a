"""The launcher seam: three methods. A target is a launcher, and what an attempt needs to run
there.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from flash_mcp.protocol.records import Json, Run
from flash_mcp.state.targets import TargetSettings


@dataclass(frozen=True)
class Launch:
    """One attempt of one run: what to execute, with which environment variables, and the file that
    gets its output; None if the attempt stores its output itself.
    """

    run_id: str
    attempt: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None
    gpus: int = 1
    """The cards that it gets, on a machine that has any; with 0 it takes no slot of it."""
    options: Sequence[str] = ()
    """Arguments of sbatch of this attempt, beside those of its target."""
    card_gib: float = 0.0
    """The memory that each card must have, for an engine that chooses cards; 0 if that is open."""
    secrets: Collection[str] = ()
    """The variables that hold the run's secrets."""

    @property
    def key(self) -> str:
        return f"{self.run_id}-{self.attempt}"


@dataclass(frozen=True)
class Handle:
    """A submitted attempt. `id` is the engine's own name for it (a pid, a job number)."""

    key: str
    id: str

    @classmethod
    def of(cls, run: Run) -> Handle:
        """That of the run's newest attempt, which may not have been submitted."""
        return cls(f"{run.id}-{run.attempt}", run.handle or "")


@dataclass(frozen=True)
class JobStatus:
    """The state that the engine reports. It may be wrong; the run folder decides.

    A pending attempt was submitted and waits for a machine. `detail` says what it waits for, or how
    it ended, in the engine's own words.
    """

    state: Literal["pending", "alive", "gone", "unknown"]
    detail: str = ""
    is_preempted: bool = False
    """The engine ended it for its own reasons: that is no fault of the attempt."""
    is_by_hand: bool = False
    """Somebody ended it by the engine's own commands."""


class Launcher(ABC):
    """Gives attempts a machine. Attempts that together take `capacity` slots may be under way at
    once.
    """

    capacity: int = 1
    reaches_nodes = True
    """Whether this machine can connect to a node, which serving there needs."""

    @classmethod
    def of(cls, settings: TargetSettings, tag: str = "") -> Self:
        """That of a target. `tag` marks the jobs of one state directory: others may have jobs of
        the same user.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, settings: TargetSettings) -> None:
        """ValueError if the engine does not take these settings."""
        return

    @classmethod
    def chooses_cards(cls, settings: TargetSettings) -> bool:
        """Whether the engine finds a card for each run, by the memory that it needs."""
        return False

    def slots_of(self, gpus: int) -> int:
        """The slots that an attempt with so many GPUs takes: all of them if it needs more."""
        return min(gpus, self.capacity)

    @abstractmethod
    def submit(self, launch: Launch) -> Handle:
        """Start the attempt, or find it where its key was submitted before, by whichever process,
        even if it ended.
        """

    @abstractmethod
    def poll(self, handles: Sequence[Handle]) -> dict[str, JobStatus]:
        """{key: status} of each; an attempt that the engine never heard of is gone, one it cannot
        ask about unknown.
        """

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """End the attempt and all its processes, without asking it: at once, or as soon as the
        engine can. Nothing happens where it has ended.
        """

    def rest(self) -> bool:
        """Called again and again while this process has nothing to start: whether something is kept
        ready for the next attempt."""
        return False

    def addresses_of(self, handle: Handle) -> list[str] | None:
        """Where the machine of the attempt is reached, by IPv4; None if the engine does not say."""
        return None

    def under_way(self) -> list[Handle]:
        """The attempts of this state directory that the engine has not ended. Maintenance ends
        those that no run waits for. Empty if the launcher cannot list them.
        """
        return []


def exported(environment: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


class Target(ABC):
    """A place where attempts run. All that its methods and its launcher do may take long, or fail,
    where the place does not answer.
    """

    name: str
    launcher: Launcher
    retry_s: float
    """How long the supervisor retries while the place of the run folders does not answer."""
    threads: int = 8
    """Attempts that are submitted at once, and run folders that are read at once."""
    look_s: float = 0.5
    """A look waits so long for what it began; the rest goes on, and the next look does not wait for
    it."""
    shares_disk: bool = False
    """Whether its attempts write to the disk of the state directory."""
    read_every_s: float = 60.0
    """A folder is read so often even though its attempt's heartbeat names nothing new."""
    beats_per_s: float = 50.0
    """Heartbeats that are asked for: with many runs, each less often."""
    beat_every_s: float = 10.0
    """Between two reads of a heartbeat in an object store: each is a request."""

    @abstractmethod
    def job(self, run: Run, variables: Mapping[str, str]) -> Json:
        """The contents of the run's job.json, once all that it names is there: `variables` say how
        this machine fetches it.
        """

    @abstractmethod
    def launch(self, run: Run, variables: Mapping[str, str]) -> Launch:
        """How the run's attempt is started. Its environment holds what the place gives, and on this
        machine `variables`: the run's secrets, and the surroundings of its client.
        """

    def seal(self, run: Run, offer: Mapping[str, Any], secrets: Mapping[str, str]) -> bytes | None:
        """The secrets for the run's attempt alone, which made the offer; None where it has them
        from its environment.
        """
        return None
