"""One attempt of one run, top to bottom.

    python -m worker.main RUN_FOLDER --attempt N

Reads job.json, claims epoch N, trains or evaluates, and ends the run with result.N.json. Exit code
0 means that this file was written. After any other end, the supervisor starts attempt N + 1, which
resumes from the last good checkpoint, or from the recorded attempts of an evaluation."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from environments.process.host import EnvironmentFault
from environments.sandbox.scratch import lock_folder, sweep
from environments.settings import machine_directory
from flash_mcp.protocol import surroundings
from flash_mcp.protocol.artifacts import Artifacts, placed, trim
from flash_mcp.protocol.errors import FlashError, disk_error, first_of
from flash_mcp.protocol.packages import engine_missing
from flash_mcp.protocol.paths import ANY_SCRATCH, scratch_prefix
from flash_mcp.protocol.records import Json
from flash_mcp.protocol.run_folder import RunFolder, RunWriter
from flash_mcp.protocol.sealing import TOKEN, Receiver
from flash_mcp.protocol.spec import EvalSpec, RunSpec, stored_spec
from flash_mcp.protocol.storage import RETRY_S
from worker import exam
from worker.heartbeat import Cancelled, Heartbeat
from worker.process import CARDS, is_memory_error, memory_state, prepare_process, quick_imports
from worker.ranks import Ranks, serve_rank, started, variables

log = logging.getLogger("worker")
ANOTHER_MAY_CURE = ("artifact_damaged", "disk_full", "preempted", "secret_missing")
"""Errors after which another attempt of the run may succeed."""
SECRETS_EVERY_S = 1.0
LEFTOVER_S = 86_400.0
"""Younger folders of other runs stay: another node that shares the temporary folder may not see
our locks.
"""


def main() -> int:
    token = os.environ.pop(TOKEN, "")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the run folder: a path or any fsspec URL")
    attempt_help = "number of this attempt, from 1; the fencing epoch"
    parser.add_argument("--attempt", type=int, required=True, help=attempt_help)
    parser.add_argument("--rank", type=int, default=0, help="of the processes, one for each GPU")
    parser.add_argument("--scratch", type=Path, help="the folder that these processes share")
    args = parser.parse_args()
    is_first = args.rank == 0
    where = "" if is_first else f" rank {args.rank}"
    line = f"%(asctime)s %(levelname)s %(name)s{where}: %(message)s"
    level = logging.INFO if is_first else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format=line)

    folder = RunFolder(args.folder)
    if not is_first:
        prepare_process()
        return serve_rank(folder, args.attempt, args.rank, args.scratch, _train, _explained)
    job = folder.job()
    surroundings.restrict(job)
    try:
        writer = exam.writer_of(job, folder, args.attempt)
    except FlashError as error:
        log.error("%s", error)
        return 3
    writer.beat(0, "start")
    heartbeat = Heartbeat(writer)

    def on_term(_: int, __: FrameType | None) -> None:
        heartbeat.preempt()

    signal.signal(signal.SIGTERM, on_term)
    heartbeat.start()
    started = time.monotonic()
    error = None
    try:
        if token:
            # Wait for the run's secrets, and put them where an attempt on the server's machine has
            # them: into variables of this process, from where the environment's process takes them
            run_id = job["run_id"]
            heartbeat.enter("secrets")
            receiver = Receiver(f"{run_id}-{writer.epoch}", token)
            writer.offer(receiver.offer)
            while (sealed := writer.take_sealed()) is None:
                if heartbeat.cancelled.wait(SECRETS_EVERY_S):
                    raise Cancelled
            os.environ |= receiver.open(sealed)
        step = _work(job, writer, heartbeat)
        state = "cancelled" if heartbeat.cancelled.is_set() else "succeeded"
    except Cancelled:
        state, step = "cancelled", heartbeat.step
    except BaseException as raised:  # the last place where an attempt can say why it ended
        error = _explained(raised, heartbeat.phase)
        state, step = "failed", heartbeat.step
        if error.code == "fenced":
            return 3
    heartbeat.stop()
    if state == "cancelled" and heartbeat.is_preempted and not folder.is_cancelled():
        what = "the attempt was told to end: its machine is taken away"
        state = "failed"
        error = FlashError("preempted", what, step=step, fix="nothing: the run goes on by itself")
    seconds = round(time.monotonic() - started, 1)
    retryable = error is not None and (_was_killed(error) or error.code in ANOTHER_MAY_CURE)
    return _commit(writer, state, step, error, retryable=retryable, seconds=seconds)


def _commit(
    writer: RunWriter, state: str, step: int, error: FlashError | None, **values: Any
) -> int:
    try:
        if error:
            writer.event("error", str(error))
        writer.commit_result(state, step, error, **values)
    except FlashError as failed:  # on a full disk; the supervisor sees how full it is
        log.error("the result cannot be written: %s", failed)
        return 4
    return 0


def leave(code: int) -> NoReturn:
    """End the process. Engine threads and environment hosts may outlive main; everything worth
    keeping is on disk by now.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _work(job: Json, writer: RunWriter, heartbeat: Heartbeat) -> int:
    if "serve" in job:
        from worker.serving import serve  # noqa: PLC0415

        job = _with_artifacts(job, heartbeat)
        with _scratch_folder(writer.folder.url) as scratch:
            serve(job, writer, heartbeat, scratch)
        return 0
    spec = stored_spec(job["spec"])
    arguments = variables(spec.gpus)
    own, *others = arguments
    os.environ.update(own)
    prepare_process()
    job = _with_artifacts(job, heartbeat)
    spec = stored_spec(job["spec"])
    # These imports come after prepare_process: torch and vLLM read the environment on import.
    with _scratch_folder(writer.folder.url) as scratch:
        if isinstance(spec, EvalSpec):
            with quick_imports():
                from worker.evaluate import evaluate  # noqa: PLC0415

            cards = [item[CARDS] for item in arguments]
            with exam.opened(job, writer, scratch) as opened:
                return evaluate(opened, spec, writer, heartbeat, cards)

        def lost(error: FlashError, is_retryable: bool) -> None:
            log.error("%s", error)
            if heartbeat.cancelled.is_set():  # the main thread saves and ends
                return
            retryable = is_retryable or error.code in ANOTHER_MAY_CURE
            leave(_commit(writer, "failed", heartbeat.step, error, retryable=retryable))

        with started(job, others, heartbeat, scratch, lost) as ranks:
            return _train(job, writer, heartbeat, scratch, ranks)


def _with_artifacts(job: Json, heartbeat: Heartbeat) -> Json:
    """The job with the folders that it names on this machine."""
    storage = job.get("storage")
    if storage is None:
        return job
    heartbeat.enter("artifacts")
    cache = machine_directory() / "artifacts"
    try:
        job = placed(job, Artifacts(storage["url"], retry_s=RETRY_S), cache)
    except OSError as error:
        raise disk_error(error, cache) from error
    trim(cache, storage["cache_bytes"])
    return job


def _train(job: Json, writer: RunWriter, heartbeat: Heartbeat, scratch: Path, ranks: Ranks) -> int:
    with quick_imports():
        from worker.train import train  # noqa: PLC0415

    spec = stored_spec(job["spec"])
    assert isinstance(spec, RunSpec)
    return train(job, spec, writer, heartbeat, scratch, ranks)


@contextmanager
def _scratch_folder(url: str) -> Generator[Path]:
    """The attempt's own folder for all its temporary files. What killed attempts left on this
    machine is removed: of this run at once; of others, which may go on elsewhere, after a day.
    """
    temporary, prefix = _temporary_folder(), scratch_prefix(url)
    for left in temporary.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    sweep(temporary, ANY_SCRATCH, LEFTOVER_S)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=temporary) as folder, ExitStack() as stack:
        with suppress(OSError):  # without locks, only the run's own attempts remove it
            lock_folder(Path(folder), stack)
        stack.enter_context(_temporary_files_in(folder))
        yield Path(folder)


@contextmanager
def _temporary_files_in(folder: str) -> Generator[None]:
    """Let this process and those that it starts make temporary files there: vLLM leaves some."""
    before = os.environ.get("TMPDIR", "")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        os.environ["TMPDIR"], tempfile.tempdir = before, None


def _temporary_folder() -> Path:
    """TMPDIR, also if its disk is full: Python would silently fill another one, where no attempt
    looks for what this one leaves.
    """
    own = os.environ.get("TMPDIR", "")
    return Path(own if os.access(own, os.W_OK) else tempfile.gettempdir())


def _explained(raised: BaseException, phase: str) -> FlashError:
    """`_explain`, with the traceback in the log."""
    error = _explain(raised, phase)
    log.error("%s\n%s", error, "".join(traceback.format_exception(raised)))
    return error


def _explain(error: BaseException, phase: str) -> FlashError:
    """What ended the attempt, as an error that an agent can act on."""
    error = first_of(error)
    if isinstance(error, FlashError):
        return error
    if isinstance(error, EnvironmentFault):
        fix = "run env_test on the environment, fix it and push it again"
        return FlashError.of_fault(error, fix=fix)
    if any(words in str(error) for words in _NO_SPACE):
        error = OSError(errno.ENOSPC, str(error))
    if isinstance(error, OSError):
        full = disk_error(error, error.filename or _temporary_folder())
        if isinstance(full, FlashError):
            return full
    if isinstance(error, ModuleNotFoundError):
        return engine_missing(str(error))
    if is_memory_error(error):
        state: Json = memory_state(error)
        return FlashError(
            "out_of_memory",
            f"memory ran out during {phase}: {error or type(error).__name__}",
            **state,
            fix="lower max_tokens, group_size or max_length, or use a smaller model; the event "
            "`memory` says what needs most",
        )
    return FlashError(
        "worker_failed",
        f"{type(error).__name__} during {phase}: {error}",
        fix="read the end of the attempt's log in status; report it if it is not your "
        "environment's",
    )


def _was_killed(error: FlashError) -> bool:
    """Whether the environment's process was killed, or one of an engine on several cards. That may
    be no fault of its code, and another attempt may succeed.
    """
    if error.code == "worker_failed":
        return "of the engine ended with signal" in error.what
    # Where most rollouts failed, the first one's words are what others wrote.
    killed = "the environment's process ended: killed by SIG"
    return error.code.startswith("environment_") and killed in error.account


_NO_SPACE = ("No space left on device", "PytorchStreamWriter failed writing")
"""How safetensors and torch.save report a full disk, in errors of their own."""

if __name__ == "__main__":
    leave(main())
