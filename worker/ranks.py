"""The processes that train one run together: one for each GPU.

Each rank is a worker with a card, an engine and an environment of its own. It makes and trains its
share of each step's groups, or of each batch's rows. Three things are exchanged: the gradients,
which are summed; the rollouts and metrics, which rank 0 writes; and rank 0's decisions. All ranks
start from the same adapter and apply the same gradients, so that their adapters stay equal.

Rank 0 is the attempt's own process. It starts the others with its own command and --rank, in its
process group; they end with it. The run folder belongs to rank 0: the others write nothing there.
The exchange is a gloo group beside torch's default one, which belongs to vLLM's engine. Where each
rank has a card of its own, NCCL sums the gradients there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from environments.sandbox.kernel import die_with_parent, signal_name
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from worker.heartbeat import Cancelled, Heartbeat
from worker.process import CARDS, close_listening, listening

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
JOB = "job.json"
STORE = "store"
CARD_STORE = "card-store"
PROGRESS = "progress"
POLL_S = (0.0005, 0.02)
"""Between two looks at an exchange, at first and later."""
WATCH_S = 0.1
LEAVE_S = 10.0
"""What the other ranks have to end their environments, before they are killed."""
LONGEST = timedelta(days=30)
"""An exchange waits for the slowest rank. `stall_timeout_s` says when a run hangs."""


class Ranks:
    """What the ranks exchange. Every rank calls the same methods in the same order.

    `Ranks()` is a run of one process. While rank 0 waits, it raises Cancelled after a cancel."""

    def __init__(self, rank: int = 0, count: int = 1, heartbeat: Heartbeat | None = None) -> None:
        self.rank = rank
        self.count = count
        self.scratch = Path()
        """A folder that all ranks have."""
        self.engine_processes: list[Any] = []
        """Those of an engine that the ranks share; their end is that of the attempt, too."""
        self._pulse = heartbeat
        self._group: Any = None
        self._card_group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def connect(self, scratch: Path) -> None:
        """Meet the other ranks, which have the same `scratch` folder."""
        if self.count == 1:
            return
        from torch import distributed  # noqa: PLC0415

        self.scratch = scratch
        others = listening()
        group: Any = distributed.ProcessGroupGloo
        options = group._Options()
        options._devices = [group.create_device(interface="lo")]
        options._timeout = LONGEST
        store = cast(Any, distributed).FileStore(str(scratch / STORE), self.count)
        self._group = group(store, self.rank, self.count, options)
        close_listening(keep=others)  # all are connected

    def use_cards(self) -> None:
        """Sum over NCCL from here on: every rank has a card of its own."""
        from torch import distributed  # noqa: PLC0415

        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        group: Any = distributed.ProcessGroupNCCL
        options = group.Options()
        options._timeout = LONGEST
        store = cast(Any, distributed).FileStore(str(self.scratch / CARD_STORE), self.count)
        self._card_group = group(store, self.rank, self.count, options)

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share: every `count`th item."""
        return list(items[self.rank :: self.count])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""
        if self._group is None:
            return tensor
        if self._card_group:
            self.gather(None)  # while NCCL waits for a rank, its kernel occupies the card
            total = tensor.detach().clone()
            self._finish(self._card_group.allreduce([total]))
            return total
        total = tensor.detach().cpu().clone()
        self._finish(self._group.allreduce([total]))
        return total.to(tensor.device)

    def copy(self, tensor: Tensor) -> None:
        if self._group is None:
            return
        value = tensor.detach().cpu().clone()
        self._finish(self._group.broadcast(value, 0))
        tensor.data.copy_(value)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in their order, on each of them. It is JSON, so that a program
        on this machine that got into the exchange could not run code; tuples become lists.
        """
        if self._group is None:
            return [value]
        import torch  # noqa: PLC0415

        packed = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.count)]
        self._finish(self._group.allgather([sizes], [torch.tensor([len(packed)])]))
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(packed)] = packed
        buffers = [torch.empty_like(padded) for _ in range(self.count)]
        self._finish(self._group.allgather([buffers], [padded]))
        pairs = zip(buffers, lengths, strict=True)
        return [json.loads(bytes(buffer[:length].numpy())) for buffer, length in pairs]

    def share(self, value: T) -> T:
        return self.gather(value if self.is_first else cast(T, None))[0]

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank. The others do not call `make`."""
        return self.share(make() if self.is_first else cast(T, None))

    def _finish(self, work: Any) -> None:
        pause_s = POLL_S[0]
        while not work.is_completed():
            if self._pulse and self._pulse.cancelled.is_set():
                raise Cancelled
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
        work.wait()


ALONE = Ranks()
"""The ranks of a run of one process."""


# -- processes -------------------------------------------------------------------------------------


def variables(count: int) -> list[dict[str, str]]:
    """The environment variables of each rank: its card, and its share of the processor's threads.

    FlashError(device_unsupported) if fewer cards are visible. To be called before torch is
    imported."""
    cards = os.environ.get(CARDS, ",".join(map(str, range(count)))).split(",")
    if cards in ([""], ["-1"]):  # the processor on purpose
        cards *= count
    if len(cards) < count:
        what = f"the attempt sees {len(cards)} of the {count} cards that it needs"
        fix = f"lower gpus to {len(cards)}, or let the attempt see more cards"
        raise FlashError("device_unsupported", what, cards=cards, fix=fix)
    threads: dict[str, str] = {}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    return [{CARDS: card, **threads} for card in cards[:count]]


@contextmanager
def started(
    job: Json,
    others: Sequence[dict[str, str]],
    heartbeat: Heartbeat,
    scratch: Path,
    on_lost: Callable[[FlashError, bool], None],
) -> Generator[Ranks]:
    """Rank 0 of a group with `others`, whose environment variables these are; connected. They run
    until the context ends.

    `on_lost` is called on a thread of its own when one of them ends before its time, with the error
    and whether the process was lost: then another attempt may succeed."""
    count = 1 + len(others)
    ranks = Ranks(0, count, heartbeat)
    if count == 1:
        yield ranks
        return
    body = {"job": job, "parent": os.getpid(), "count": count}
    (scratch / JOB).write_text(json.dumps(body))
    (scratch / PROGRESS).write_bytes(bytes(8 * count))
    heartbeat.elsewhere = lambda: sum(memoryview((scratch / PROGRESS).read_bytes()).cast("q"))
    children = [
        subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:], "--rank", str(rank), "--scratch", str(scratch)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        for rank, environment in enumerate(others, start=1)
    ]
    is_over = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(children, ranks, scratch, is_over, on_lost), name="ranks", daemon=True
    )
    watch.start()
    try:
        ranks.connect(scratch)
        yield ranks
        if not heartbeat.cancelled.is_set():  # else they wait for a step that this rank leaves out
            deadline = time.monotonic() + LEAVE_S
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
    except RuntimeError:
        # Perhaps a connection broke because a rank ended. Then the watch says why, and ends us all.
        watch.join(LEAVE_S)
        raise
    finally:
        is_over.set()
        watch.join()
        for child in children:
            child.kill()
            child.wait()


def _watch(
    children: Sequence[subprocess.Popen[bytes]],
    ranks: Ranks,
    scratch: Path,
    is_over: threading.Event,
    on_lost: Callable[[FlashError, bool], None],
) -> None:
    while not is_over.wait(WATCH_S):
        for rank, child in enumerate(children, start=1):
            if child.poll():
                # By its own error, or by its process's end: then it was lost.
                file = _error_file(scratch, rank)
                try:
                    on_lost(FlashError.from_dict(json.loads(file.read_text())), False)
                except (OSError, ValueError):
                    what = f"process {rank} of the attempt, of those for each GPU,"
                    on_lost(_ended(what, child.returncode), True)
                return
        for process in ranks.engine_processes:
            if process.exitcode is not None:
                on_lost(_ended(f"process {process.name} of the engine", process.exitcode), True)
                return


def lost_process(processes: Sequence[Any]) -> FlashError | None:
    """The end of the first of an engine's processes that was not told to end."""
    for process in processes:
        if process.exitcode not in (None, 0, -signal.SIGTERM):
            return _ended(f"process {process.name} of the engine", process.exitcode)
    return None


def _ended(what: str, code: int) -> FlashError:
    how = f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"
    fix = "read the end of the attempt's log in status"
    return FlashError("worker_failed", f"{what} ended with {how}", fix=fix)


def _error_file(scratch: Path, rank: int) -> Path:
    return scratch / f"error-{rank}.json"


class RankHeartbeat(Heartbeat):
    """The heartbeat of the other ranks: rank 0 writes it, with their progress."""

    def __init__(self, writer: RunWriter, rank: int, scratch: Path) -> None:
        super().__init__(writer)
        self._place = 8 * rank
        self._file = os.open(scratch / PROGRESS, os.O_WRONLY)

    def advance(self, *, by_work: bool = True) -> None:
        super().advance(by_work=by_work)
        os.pwrite(self._file, self.progress.to_bytes(8, sys.byteorder), self._place)


class ReadingWriter(RunWriter):
    """The writer of the other ranks: the first has claimed the folder, and writes to it."""

    def _claim(self) -> None:
        pass

    def _write(self, name: str, body: bytes) -> None:
        pass


def serve_rank(
    folder: RunFolder,
    attempt: int,
    rank: int,
    scratch: Path,
    work: Callable[[Json, RunWriter, Heartbeat, Path, Ranks], object],
    explain: Callable[[BaseException, str], FlashError],
) -> int:
    """Be one of the other ranks: `work` as rank 0 does; the exit code."""
    arguments: Json = json.loads((scratch / JOB).read_text())
    die_with_parent(arguments["parent"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 decides
    heartbeat = RankHeartbeat(ReadingWriter(folder, attempt), rank, scratch)
    own = scratch / f"rank-{rank}"
    own.mkdir()
    try:
        ranks = Ranks(rank, arguments["count"], heartbeat)
        ranks.connect(scratch)
        work(arguments["job"], heartbeat.writer, heartbeat, own, ranks)
    except BaseException as raised:  # the last place where this rank can say why it ended
        if isinstance(raised, RuntimeError):
            time.sleep(LEAVE_S)  # perhaps another rank ended: see `started`
        error = explain(raised, heartbeat.phase)
        _error_file(scratch, rank).write_text(json.dumps(error.to_dict()))
        return 1
    return 0


def check_devices(ranks: Ranks) -> None:
    """Choose what sums gradients. FlashError(device_unsupported) if only some of the ranks have a
    GPU."""
    import torch  # noqa: PLC0415

    card: str | None = None
    if torch.cuda.is_available():
        card = "{0.pci_domain_id}:{0.pci_bus_id}:{0.pci_device_id}".format(
            cast(Any, torch.cuda).get_device_properties(0)
        )
    cards = ranks.gather(card)
    lacking = [rank for rank, address in enumerate(cards) if address is None]
    if 0 < len(lacking) < ranks.count:
        what = f"{len(lacking)} of the attempt's {ranks.count} processes can use no GPU"
        fix = "run `flash-mcp doctor` on that machine, or lower gpus"
        raise FlashError("device_unsupported", what, ranks=lacking, fix=fix)
    if backend_of(cards) == "nccl":
        ranks.use_cards()


def backend_of(cards: Sequence[str | None]) -> str:
    """What sums gradients of ranks on these cards (None: the processor). NCCL refuses two ranks on
    one card, and parts of one (MIG)."""
    return "nccl" if None not in cards and len(set(cards)) == len(cards) > 1 else "gloo"
