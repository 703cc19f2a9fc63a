"""Looks after the runs of one target: gives queued runs to workers, reads what they say into the
store, replaces them when they are lost, and ends them.

It keeps nothing that it could not find again in the store, the run folders and the launcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flash_mcp.protocol.errors import FULL, FlashError
from flash_mcp.protocol.records import Json, Run
from flash_mcp.protocol.run_files import FinalResult
from flash_mcp.protocol.run_folder import RunFolder, RunWriter, final_result, read_beats
from flash_mcp.protocol.spec import MAX_GPUS
from flash_mcp.state import costs, queue
from flash_mcp.state.disk import LEAST_FREE_BYTES, has_space
from flash_mcp.state.removal import add_removed
from flash_mcp.state.retention import prune_checkpoints
from flash_mcp.state.store import Store
from flash_mcp.supervisor.attempt import STALE_S, Attempt, Reader, Timeouts, Trouble
from flash_mcp.supervisor.launch.base import Handle, JobStatus, Target
from flash_mcp.supervisor.maintenance import Maintenance
from flash_mcp.supervisor.secrets import Vault

log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 4000
MAINTAIN_S = 0.05
CLAIM_S = 0.5
"""Attempts are started for so long before the others are looked after again."""
SHORT_OF_MEMORY = 0.05
"""If less than this share of memory was free at the last heartbeat, report `out_of_memory`."""
OF_THE_MACHINE = (
    "disk_full",
    "not_ready",
    "state_busy",
    "state_corrupt",
    "store_refused",
    "store_unreachable",
    "target_refused",
    "target_unreachable",
)
"""Errors that another attempt would meet as well: a run waits until they pass."""
COUNTS_AS: dict[str, queue.Loss] = {
    "disk_full": "nothing",
    "held": "nothing",
    "preempted": "preemption",
}
"""What a lost attempt counts as, by the code of its error. All others count as attempts."""
SERVED_WELL_S = 600.0
"""A model server that was lost after so long is started anew, as often as that happens."""
RESTART_S = 20.0
"""An engine that takes a machine away says within this time what becomes of the job."""
MOST_DOUBLINGS = 10
"""Of the delay before an attempt, which has a limit of its own."""
MAX_DAMAGED = 10
"""Damaged files of a run that are reported."""


class RunReconciler:
    """Looks after the runs of one target: starts, reads, replaces and ends their attempts."""

    def __init__(
        self,
        store: Store,
        target: Target,
        vault: Vault,
        timeouts: Timeouts,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.base = store.base
        self.store = store
        self.target = target
        self.launcher = target.launcher
        self.vault = vault
        self.timeouts = timeouts
        self.maintenance = Maintenance(store, target)
        self.alive = alive
        """Called again and again while it works."""
        self.is_refused = False
        """The store refused this process's keys; whoever looks at it resets it."""
        self._attempts: dict[str, Attempt] = {}
        self._troubles: dict[tuple[str, str], Trouble] = {}
        self._starting = Crew(store, target.threads)
        """Uploads what attempts need, and submits them."""
        self._reading = Crew(store, target.threads)
        """Reads run folders, and ends attempts."""
        self._clearing = Crew(store, threads=1)

    def maintain(self) -> bool:
        """Clear up, without keeping runs waiting for long; whether that goes on."""
        if self._clearing.is_free("maintenance"):
            self._clearing.do("maintenance", self.maintenance.step)
        self._clearing.wait(MAINTAIN_S)
        return not self._clearing.is_free("maintenance")

    def close(self) -> None:
        """Let the threads end. None is waited for: it may wait for what does not answer."""
        for crew in (self._starting, self._reading, self._clearing):
            crew.close()

    def attend(self, taken: Sequence[Run]) -> None:
        """Do whatever is due for the target's runs that are under way, and start others. If the
        target does not answer or refuses us, they say so, and nothing is concluded from it.
        """
        try:
            self._attend(taken)
        except FlashError as error:
            self.is_refused |= error.code == "store_refused"
            if is_of_the_machine(error):
                for run in taken:
                    if run.pending_reason != error.what:
                        queue.record_wait(self.store, run.id, run.attempt, error.what)
            raise

    def _attend(self, taken: Sequence[Run]) -> None:
        for run in taken:
            refused = self._troubles.get((run.id, "attach"))
            is_due = refused is None or time.monotonic() >= refused.again_at
            if is_due and not self._attempt_of(run):
                self._start(run)
        attempts = list(self._attempts.values())  # others may come meanwhile
        handles = [attempt.handle for attempt in attempts]
        statuses = self.launcher.poll(handles) if handles else {}
        self._read_beats(taken)
        self._take_beats(taken)
        for run in taken:
            self._guarded("look", run, partial(self._advance_if_due, statuses=statuses))
        self._claim_all(taken)
        for crew in (self._starting, self._reading):
            crew.wait(self.target.look_s)

    def _claim_all(self, taken: Sequence[Run]) -> None:
        room = self.launcher.capacity - sum(self._slots(run) for run in taken)
        until = time.monotonic() + CLAIM_S
        while server := queue.claim_server(self.store, self.target.name):
            self._start(server)
        while room > 0 and (claimed := self._claim(room)):
            for run in claimed:
                room -= self._slots(run)
                self._start(run)
            if time.monotonic() > until:
                return

    def _start(self, run: Run) -> None:
        if self._starting.is_free(run.id):
            self._starting.do(run.id, lambda: self._guarded("attach", run, self._attach))

    def _attempt_of(self, run: Run) -> Attempt | None:
        existing = self._attempts.get(run.id)
        if existing and existing.number == run.attempt:
            return existing
        return None

    def _read_beats(self, taken: Sequence[Run]) -> None:
        """Read all heartbeats that are due: those of a store at once, local ones one by one, as all
        local files are read. What lies there may be a pipe.
        """
        now = time.monotonic()
        attached = [run for run in taken if run.id in self._attempts]
        share_s = len(attached) / self.target.beats_per_s
        remote: list[Attempt] = []
        for run in attached:
            attempt = self._attempts[run.id]
            if now < attempt.beat_due_at:
                continue
            if attempt.folder.is_local:
                self._guarded("heartbeat", run, lambda _, it=attempt: it.take(it.folder.beat()))
            else:
                remote.append(attempt)
            attempt.beat_due_at = now + max(share_s, self._beat_every_s(attempt))
        try:
            beats = read_beats([attempt.folder for attempt in remote])
        except FlashError:
            for attempt in remote:
                attempt.could_be_read = False
            raise
        for attempt, beat in zip(remote, beats, strict=True):
            attempt.take(beat)

    def _beat_every_s(self, attempt: Attempt) -> float:
        return 0.0 if attempt.folder.is_local else self.target.beat_every_s

    def _slots(self, run: Run) -> int:
        if run.serves:
            return 0
        return self.launcher.slots_of(run.spec.gpus)

    def _claim(self, room: int) -> list[Run]:
        """The oldest runs that do not have to wait, if `room` slots are enough. Younger ones do not
        overtake one: else one that needs many GPUs might never start. Several, since those that
        have to wait are looked for among all that are queued.
        """
        claimed: list[Run] = []
        with self.store.transaction():  # a run that is enqueued after the look cannot be claimed
            runs = self.store.may_have_to_wait(self.target.name)
            waiting = [run.id for run in runs if self._has_to_wait(run)]
            over = costs.over_limit(self.store)
            while room > 0 and len(claimed) <= self.target.threads:
                gpus = MAX_GPUS if self.launcher.slots_of(MAX_GPUS) <= room else room
                run = queue.claim(self.store, waiting, self.target.name, gpus=gpus, over=over)
                if run is None:
                    break
                room -= self._slots(run)
                claimed.append(run)
        return claimed

    def _has_to_wait(self, run: Run) -> bool:
        """Whether it lacks secrets, or the space for the checkpoint that did not fit, or a decision
        of its owner.
        """
        if queue.is_held(run) or self.vault.lacking(run.id, run.spec.secrets):
            return True
        if not self.target.shares_disk or not run.error or run.error["code"] != "disk_full":
            return False
        values = run.error.get("values", {})
        needed = values.get("needed_bytes")
        full = values.get("path")  # that of temporary files may be another disk
        return not has_space(
            [self.base, Path(full if isinstance(full, str) else self.base)],
            LEAST_FREE_BYTES + (needed if isinstance(needed, int) else 0),
        )

    def _guarded(self, what: str, run: Run, act: Callable[[Run], None]) -> None:
        # One run's trouble (a full disk, a damaged file) is not another's. It is logged once, and
        # tried again; if it does not pass, the attempt ends.
        try:
            act(run)
        except Exception as error:
            now = time.monotonic()
            trouble = self._troubles.setdefault((run.id, what), Trouble(run.attempt, now))
            if trouble.attempt != run.attempt or is_of_the_machine(error):
                trouble.attempt, trouble.since = run.attempt, now
            is_new = trouble.last != repr(error)
            trouble.last = repr(error)
            if isinstance(error, FlashError):
                self.is_refused |= error.code == "store_refused"
                if error.code == "target_refused":
                    trouble.again_at = now + self.timeouts.refused_s
            if is_new:
                log.exception("%s: trouble with attempt %s", run.id, run.attempt)
                with suppress(FlashError):  # a full disk, which others may not mind
                    if isinstance(error, FlashError):  # those come by themselves, and go
                        queue.record_wait(self.store, run.id, run.attempt, error.what)
                    else:
                        what = f"the supervisor had trouble with attempt {run.attempt}"
                        message = f"{what}, and tried again: {error!r}"
                        self._note(run, "trouble", message, kind="warning")
            if now - trouble.since > self.timeouts.trouble_s:
                self._give_up(run, error)
        else:
            self._troubles.pop((run.id, what), None)

    def _give_up(self, run: Run, error: Exception) -> None:
        """End the attempt after trouble that did not pass."""
        if not queue.is_under_way(self.store, run):
            return
        attempt = self._attempt_of(run) or self._new_attempt(run)
        cause = f"{type(error).__name__}: {error}"
        what = f"trouble with attempt {run.attempt} that did not pass: {cause}"
        try:
            self._replace(run, attempt, self._error("worker_failed", what, run, attempt))
        except Exception:
            log.exception("%s: attempt %s could not be ended", run.id, run.attempt)

    def _attach(self, run: Run) -> None:
        existing = self._attempts.get(run.id)
        attempt = self._new_attempt(run)
        folder = attempt.folder
        # Without its secrets an attempt cannot be started: one that an earlier supervisor started
        # is found, another is gone, and the run waits in the queue. An engine forgets attempts that
        # have ended: what it took is not submitted again.
        may_start = not run.handle and not self.vault.lacking(run.id, run.spec.secrets)
        if may_start and not final_result(folder):
            variables = self.vault.surroundings(run)
            if variables is None:  # its client is about to give them: the next look tries again
                return
            folder.create(self.target.job(run, variables))
            # What it needs may have taken an hour to upload.
            if self.store.server_run(run.id).cancel_requested:
                attempt.handle = Handle.of(run)
            else:
                handle = self.launcher.submit(
                    self.target.launch(run, {**variables, **self._secrets_of(run)})
                )
                if handle.id:
                    queue.record_handle(self.store, run.id, run.attempt, handle.id)
                self._note(run, "launched", f"attempt {run.attempt} of {run.max_attempts} started")
                attempt.handle = handle
        if existing:
            attempt.reader = existing.reader
            attempt.reader.folder = folder
        self._attempts[run.id] = attempt

    def _new_attempt(self, run: Run) -> Attempt:
        folder = RunFolder(run.folder, retry_s=self.target.retry_s)
        reader = Reader(self.store, run.id, folder, self.alive)
        return Attempt(run.attempt, folder, Handle.of(run), reader)

    def _take_beats(self, taken: Sequence[Run]) -> None:
        """Store all new heartbeats at once: each transaction waits for the disk."""
        new: list[tuple[Run, Attempt, bool]] = []
        is_full = self.target.shares_disk and not has_space([self.base], LEAST_FREE_BYTES)
        for run in taken:
            if attempt := self._attempt_of(run):
                attempt.look(self.timeouts.max_gap_s)
                attempt.is_short_of_space |= is_full
                self._follow(run, attempt)
                is_new, moved = attempt.observe()
                if is_new:
                    new.append((run, attempt, moved))
        if not new:
            return
        with self.store.transaction():
            for run, attempt, moved in new:
                assert attempt.beat
                queue.mark_running(self.store, run.id, attempt.number)
                queue.record_beat(
                    self.store,
                    run.id,
                    attempt.number,
                    attempt.beat,
                    progressed=moved,
                    worked_s=attempt.worked_s,
                )

    def _follow(self, run: Run, attempt: Attempt) -> None:
        """The engine started the attempt's job again: it has a number of its own."""
        number = attempt.read_beat["epoch"] if attempt.read_beat else 0
        # Not while its folder is read as that of the attempt before.
        if number <= attempt.number or not self._reading.is_free(run.id):
            return
        if number > attempt.number + queue.MAX_PREEMPTIONS:  # no engine starts a job so often
            return
        if queue.follow(self.store, run.id, attempt.number, number):
            what = f"attempt {attempt.number} was lost; its engine started attempt {number}"
            attempt.restart(number)
            self._note(run, "restarted", what)

    def _advance_if_due(self, run: Run, statuses: Mapping[str, JobStatus]) -> None:
        """Look into the run's folder, or end its attempt, if there is a reason to."""
        attempt = self._attempt_of(run)
        if attempt is None:
            return
        status = statuses.get(attempt.handle.key, JobStatus("unknown"))
        self._note_wait(run, attempt, status)
        is_due = (
            attempt.has_news(status, self.target.read_every_s)
            or run.cancel_requested is not None
            or run.reported_error is not None
            or self._waits_for_secrets(run, attempt)
            or costs.used_up(run, self.base) is not None
            or self._diagnose(run, attempt, status) is not None
        )
        if is_due and self._reading.is_free(run.id):
            act = partial(self._advance, status=status)
            self._reading.do(run.id, lambda: self._guarded("advance", run, act))

    def _waits_for_secrets(self, run: Run, attempt: Attempt) -> bool:
        has_any = bool(run.spec.secrets or run.serves)
        return has_any and attempt.beat is not None and not attempt.has_secrets

    def _advance(self, run: Run, status: JobStatus) -> None:
        """Resolve the run's state from its folder. The status is older: who was gone has written
        its last word.
        """
        attempt = self._attempt_of(run)
        # While an engine took long to answer, another look may have ended the attempt.
        if attempt is None or not queue.is_under_way(self.store, run):
            return
        if self._waits_for_secrets(run, attempt):
            self._hand_over_secrets(run, attempt)
        spent = None if run.cancel_requested else costs.used_up(run, self.base)
        if spent and not final_result(attempt.folder):
            run = queue.request_cancel(self.store, run.id, spent)
        if run.cancel_requested and attempt.cancelled_at is None:
            # Asks the worker to save and end; the time that it has for this begins.
            if not attempt.folder.is_cancelled():
                attempt.folder.request_cancel(run.cancel_reason or "")
            attempt.cancelled_at = attempt.watched_s
        result = retryable = None
        if attempt.has_news(status, self.target.read_every_s):
            with attempt.folder.listed():
                self._read(run, attempt)
                result = final_result(attempt.folder)
                retryable = None if result else self._retryable_error(run, attempt)
        if result:
            self._settle(run, attempt, result, status)
            return
        if retryable and self._may_be_restarted(attempt, retryable, status):
            return
        error = retryable
        if error is None and run.reported_error:
            error = FlashError.from_dict(run.reported_error)
        elif error is None and (diagnosis := self._diagnose(run, attempt, status)):
            error = self._error(*diagnosis, run, attempt)
        if error:
            if run.serves or not status.is_by_hand or not attempt.was_under_way:
                held = None
            else:
                what = f"somebody ended it on the target: {status.detail}"
                fix = f"train(resume={run.id!r}) lets it go on, and cancel ends it"
                held = FlashError("held", what, fix=fix)
            self._replace(run, attempt, held or error)

    def _hand_over_secrets(self, run: Run, attempt: Attempt) -> None:
        """Seal the secrets for an attempt on another machine, once it asks for them."""
        if run.cancel_requested or self.vault.lacking(run.id, run.spec.secrets):
            return
        if offer := attempt.folder.offer(attempt.number):
            if sealed := self.target.seal(run, offer, self._secrets_of(run)):
                attempt.folder.put_sealed(attempt.number, sealed)
            attempt.has_secrets = True

    def _retryable_error(self, run: Run, attempt: Attempt) -> FlashError | None:
        """The error of an attempt that gave up in a way that another attempt may cure."""
        result = attempt.folder.result()
        if result is None or result["epoch"] != attempt.number:
            return None
        if result["error"]:
            return FlashError.from_dict(result["error"])
        return FlashError("worker_failed", f"attempt {attempt.number} gave up", run_id=run.id)

    def _may_be_restarted(self, attempt: Attempt, error: FlashError, status: JobStatus) -> bool:
        """Whether the engine, which took the attempt's machine away, may start its job again. Other
        errors may come of that too: an engine says later how the job ended.
        """
        if status.state == "gone" or (error.code != "preempted" and self.target.shares_disk):
            return False
        if attempt.left_at is None:
            attempt.left_at = attempt.watched_s
        has_left = attempt.watched_s - attempt.left_at > RESTART_S
        return status.state == "pending" or not has_left

    def _read(self, run: Run, attempt: Attempt) -> None:
        # Where each read is due by its news, the reader need not hold back.
        self._take_in(run, attempt, now=self.target.read_every_s > 0)
        # Say once of each damaged file what is wrong with it
        for name, what in attempt.folder.damaged.items():
            if name in attempt.damaged or len(attempt.damaged) == MAX_DAMAGED:
                continue
            attempt.damaged.add(name)
            log.warning("%s: %s is damaged: %s", run.id, name, what)
            message = f"{name} is damaged and counts as absent: {what}"
            self._note(run, f"damaged-{len(attempt.damaged)}", message, kind="warning")
        attempt.read_at = attempt.watched_s
        attempt.writes_read = (attempt.beat or {}).get("writes")

    def _take_in(self, run: Run, attempt: Attempt, *, now: bool = True) -> None:
        if attempt.reader.read(now=now):
            prune_checkpoints(self.store, run)
        # Keep the end of its output, if nobody else reads the folder
        if self.target.shares_disk:
            return
        if tail := attempt.folder.log_tail(attempt.number, LOG_TAIL_BYTES):
            self.store.put_log(run.id, attempt.number, tail)

    def _secrets_of(self, run: Run) -> dict[str, str]:
        if run.serves:  # imported only if there is something to serve
            from flash_mcp.supervisor.server import keys_of  # noqa: PLC0415

            return keys_of(self.base, run)
        return self.vault.values(run.id, run.spec.secrets)

    def _note_wait(self, run: Run, attempt: Attempt, status: JobStatus) -> None:
        """Store what the attempt waits for, and hold its clocks meanwhile."""
        if status.state == "unknown":
            return
        attempt.was_under_way |= status.state != "gone"
        # An engine that starts a job again has it wait first.
        is_silent = attempt.beat is None or attempt.asked_at - attempt.beat_at > STALE_S
        is_pending = status.state == "pending" and is_silent
        reason = (status.detail or "a machine") if is_pending else None
        # A store that does not answer stays the reason until it answers.
        if reason != run.pending_reason and attempt.could_be_read:
            queue.record_wait(self.store, run.id, attempt.number, reason)
        if not is_pending:
            attempt.pending_at = None
            return
        attempt.hold_clocks()
        if attempt.pending_at is None:
            attempt.pending_at = attempt.watched_s

    def _diagnose(self, run: Run, attempt: Attempt, status: JobStatus) -> tuple[str, str] | None:
        """(code, what is wrong) if the attempt has to be given up. Its folder is not looked at."""
        now, timeouts = attempt.watched_s, self.timeouts
        # Counted to when it was last asked: with many runs, each is asked less often.
        silent_s = attempt.asked_at - attempt.beat_at
        still_s = attempt.asked_at - attempt.progress_at
        stale_s = timeouts.beat_stale_s + self._beat_every_s(attempt)
        if status.state == "gone" and (
            not attempt.beat or run.cancel_requested or silent_s > stale_s
        ):
            how = f" ({status.detail})" if status.detail else ""
            what = f"attempt {attempt.number} ended without a result{how}"
            if status.is_preempted:
                return "preempted", what
            # The kernel may have ended it: by what its last beat said.
            beat = attempt.beat or {}
            held, left = beat.get("held_bytes", 0), beat.get("available_bytes", 1)
            if left <= SHORT_OF_MEMORY * (held + left):
                rest = f"{left / 2**30:.1f} GiB of the machine's memory were left"
                said = f"its last beat held {held / 2**30:.1f} GiB and {rest}"
                return "out_of_memory", f"{what}; {said}"
            return "worker_failed", what
        if attempt.cancelled_at is not None:
            grace_s = timeouts.cancel_grace_s + 2 * self.store.slowest_step_s(run.id)
            if now - attempt.cancelled_at > grace_s:
                what = f"attempt {attempt.number} did not end within {grace_s:.0f} s of the cancel"
                return "stalled", what
        if attempt.pending_at is not None:
            waited_s = now - attempt.pending_at
            if not run.cancel_requested and waited_s <= timeouts.pending_s:
                return None
            what = f"attempt {attempt.number} waited {waited_s:.0f} s for {status.detail}"
            return "preempted", what
        # On a full disk it can write no beat.
        is_full = self.target.shares_disk and not has_space([self.base], LEAST_FREE_BYTES)
        if status.state != "alive" or is_full:
            return None
        if attempt.beat and silent_s > timeouts.beat_silent_s:
            what = f"attempt {attempt.number} gave no sign for {silent_s:.0f} s"
            return "stalled", what
        if still_s > run.spec.stall_timeout_s:
            what = f"attempt {attempt.number} made no progress for {still_s:.0f} s"
            return "stalled", what
        return None

    def _error(self, code: str, what: str, run: Run, attempt: Attempt) -> FlashError:
        log_path = f"{run.folder}/log.{attempt.number}"
        beat = attempt.beat or {}
        damaged = dict(list(attempt.folder.damaged.items())[:MAX_DAMAGED])
        values: dict[str, Any] = {"damaged": damaged} if damaged else {}
        return FlashError(
            code,
            what,
            fix=f"read the end of its log, and the whole of it in {log_path}",
            run_id=run.id,
            attempt=attempt.number,
            phase=beat.get("phase"),
            step=beat.get("step"),
            **values,
            log=attempt.folder.log_tail(attempt.number, LOG_TAIL_BYTES),
        )

    def _replace(self, run: Run, attempt: Attempt, error: FlashError) -> None:
        """Kill the attempt and let another one start, or end the run where none is left or a cancel
        is wanted.
        """
        self.launcher.cancel(attempt.handle)
        attempt.was_under_way = False  # this end is nobody else's
        result = None
        with self._despite_trouble(run):
            # Asked first: an attempt that still ends writes its result after all else.
            result = final_result(attempt.folder)
        with self._despite_trouble(run):
            self._take_in(run, attempt)
        if result:
            self._finish(run, result["state"], result["step"], result["error"])
            return
        if attempt.is_short_of_space and error.code == "worker_failed":
            # The error of an attempt that ended while the disk was full
            saved = [row.size_bytes for row in self.store.checkpoints(run.id)]
            error = FlashError(
                "disk_full",
                f"the disk was full; {error.what}",
                fix="free space there: the run goes on from its newest checkpoint",
                path=self.base,
                needed_bytes=max(saved, default=0),
            )
        self._note(run, "lost", error.what, error=error.to_dict())
        log.warning("%s: %s", run.id, error.what)
        delay_s = self.timeouts.retry_delay_s * 2 ** min(attempt.number - 1, MOST_DOUBLINGS)
        counts_as = COUNTS_AS.get(error.code, "attempt")
        if error.code == "disk_full" and (not self.target.shares_disk or "quota" in error.values):
            counts_as = "attempt"  # nobody here sees when there is space again
        if run.serves and attempt.watched_s - attempt.waited_s > SERVED_WELL_S:
            counts_as = "nothing"
        if queue.requeue(
            self.store, run.id, attempt.number, error, delay_s=delay_s, counts_as=counts_as
        ):
            return
        # Asked anew: a cancel may have come since the row was read.
        is_cancelled = self.store.server_run(run.id).cancel_requested is not None
        state: queue.EndState = "cancelled" if is_cancelled else "failed"
        cause = None if is_cancelled else error
        step = attempt.beat["step"] if attempt.beat else run.step
        with self._despite_trouble(run):
            # In the worker's stead, as a new owner: no attempt can write any more.
            folder = attempt.folder
            folder.create(self.target.job(run, self.vault.surroundings(run) or {}))
            writer = RunWriter(folder, folder.newest_epoch() + 1)
            writer.commit_result(state, step, cause, retryable=False)
        self._finish(run, state, step, cause and cause.to_dict())

    @contextmanager
    def _despite_trouble(self, run: Run) -> Generator[None]:
        """Log what fails within, unless it is the machine's: then the run waits."""
        try:
            yield
        except Exception as error:
            if is_of_the_machine(error):
                raise
            log.exception("%s: trouble while attempt %s is ended", run.id, run.attempt)

    def _settle(self, run: Run, attempt: Attempt, result: FinalResult, status: JobStatus) -> None:
        """The folder's result ends the run, once the attempt has left or had the time to."""
        if attempt.result_at is None:
            attempt.result_at = attempt.watched_s
        # An engine that is slow, or still calls it pending, does not say that it has left: its node
        # may yet store the end of its log.
        waited_s = attempt.watched_s - attempt.result_at
        if status.state != "gone" and waited_s < self.timeouts.leave_s:
            return
        try:
            self.launcher.cancel(attempt.handle)
        except FlashError as error:  # the engine does not answer: the result counts all the same
            log.warning("%s: attempt %s was not cancelled: %s", run.id, attempt.number, error)
        self._take_in(run, attempt)
        self._finish(run, result["state"], result["step"], result["error"])

    def _finish(
        self, run: Run, state: queue.EndState, step: int, error: Mapping[str, Any] | None
    ) -> None:
        queue.finish(self.store, run.id, run.attempt, state, step=step, error=error)
        if run.serves:  # nobody reads its folder
            add_removed(self.store, run)
        self._attempts.pop(run.id, None)
        for what in ("attach", "look", "heartbeat", "advance"):
            self._troubles.pop((run.id, what), None)
        log.info("%s: %s", run.id, self.store.server_run(run.id).state)

    def _note(self, run: Run, what: str, message: str, **values: object) -> None:
        row: Json = {"time": time.time(), "epoch": run.attempt, "kind": "attempt"}
        row |= {"message": message, **values}
        self.store.put_event(run.id, f"{run.attempt:04d}-{what}", row)


def is_of_the_machine(error: Exception) -> bool:
    """Whether another attempt would meet the same error, until somebody mends the machine."""
    if isinstance(error, FlashError):
        return error.code in OF_THE_MACHINE
    return isinstance(error, OSError) and error.errno in FULL


# -- threads that do what may take long for a target's runs, so that no run waits for another ------


class Crew:
    """Does one thing at a time for each key. Without threads it is done at once."""

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, "crew") if threads else None
        self._under_way: dict[str, Future[None]] = {}

    def is_free(self, key: str) -> bool:
        return key not in self._under_way or self._under_way[key].done()

    def do(self, key: str, act: Callable[[], object]) -> None:
        if self._pool:
            self._under_way[key] = self._pool.submit(self._do, key, act)
        else:
            act()

    def _do(self, key: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            log.warning("%s: %r", key, error)
        finally:
            self._store.close()  # this thread's connection

    def wait(self, seconds: float) -> None:
        """Until all is done, but no longer."""
        wait(self._under_way.values(), seconds)
        self._under_way = {key: job for key, job in self._under_way.items() if not job.done()}

    def close(self) -> None:
        """Start nothing more. What is under way is not waited for: it may never end."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
