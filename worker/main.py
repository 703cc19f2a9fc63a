"""One attempt of one run, top to bottom.

    python -m worker.main RUN_FOLDER --attempt N

Reads job.json, claims epoch N, trains or evaluates, and ends the run with result.json. Exit code 0
says that result.json was written; after anything else the supervisor starts attempt N + 1, which
goes on from the last good checkpoint, or from the attempts at tasks that were recorded."""

from __future__ import annotations

import argparse
import errno
import hashlib
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import psutil

from environments.process.host import EnvironmentFault
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, disk_error
from worker.heartbeat import Cancelled, Pulse
from worker.settings import Settings

log = logging.getLogger("worker")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the run folder: a path or any fsspec URL")
    parser.add_argument(
        "--attempt",
        type=int,
        required=True,
        help="number of this attempt, from 1; the fencing epoch",
    )
    args = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )

    folder = RunFolder(args.folder)
    job = folder.job()
    try:
        writer = folder.claim(args.attempt)
    except FlashError as error:
        log.error("%s", error)
        return 3
    spec = Settings(**job["spec"])
    writer.beat(0, "start")
    pulse = Pulse(writer)
    pulse.start()
    started = time.monotonic()
    try:
        prepare_process()
        # Only now: torch and vLLM read the environment that was just prepared.
        if spec.algorithm == "eval":
            from worker.evaluate import evaluate as work  # noqa: PLC0415
        else:
            from worker.train import train as work  # noqa: PLC0415

        with tempfile.TemporaryDirectory(prefix=_sweep_scratch(folder.url)) as scratch:
            step = work(job, spec, writer, pulse, Path(scratch))
        state, error = "cancelled" if pulse.cancelled.is_set() else "succeeded", None
    except Cancelled:
        state, error, step = "cancelled", None, pulse.step
    except BaseException as raised:  # the last place where an attempt can say why it ended
        error, step = _explain(raised, pulse.phase), pulse.step
        state = "failed"
        log.error("%s\n%s", error, "".join(traceback.format_exception(raised)))
        if error.code == "fenced":
            return 3
    pulse.stop()
    if error:
        writer.event("error", str(error))
    seconds = round(time.monotonic() - started, 1)
    writer.commit_result(
        state, step, error, seconds=seconds, retryable=bool(error and _was_struck(error))
    )
    return 0


def _sweep_scratch(url: str) -> str:
    """Remove what killed attempts of this run left in the temporary folder; the prefix for this
    one's.
    """
    prefix = f"flash-{hashlib.sha256(url.encode()).hexdigest()[:12]}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    return prefix


def prepare_process() -> None:
    """Settings that torch and vLLM read when they are imported."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault(
        "VLLM_CPU_OMP_THREADS_BIND", "nobind"
    )  # vLLM would pin the trainer's threads too
    # One card: over several the trainer would spread its batch, and ask for as many times the
    # rollouts.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("vllm").setLevel(logging.ERROR)


def _explain(error: BaseException, phase: str) -> FlashError:
    """What ended the attempt, as something that an agent can act on."""
    if isinstance(error, ExceptionGroup):
        return _explain(error.exceptions[0], phase)
    if isinstance(error, FlashError):
        return error
    if isinstance(error, EnvironmentFault):
        return FlashError(
            error.code, error.what, fix="run env_test on the environment, mend it and push it again"
        )
    if any(words in str(error) for words in _NO_SPACE):
        error = OSError(errno.ENOSPC, str(error))
    if isinstance(error, OSError) and isinstance(
        full := disk_error(error, Path(tempfile.gettempdir())), FlashError
    ):
        return full
    if isinstance(error, ModuleNotFoundError):
        return FlashError(
            "engine_missing",
            f"the training packages are not installed: {error}",
            fix="install flash-mcp with the extra cpu or gpu",
        )
    if _is_memory(error):
        return FlashError(
            "out_of_memory",
            f"memory ran out during {phase}: {error or type(error).__name__}",
            held_gib=round(psutil.Process().memory_info().rss / 2**30, 2),
            peak_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            available_gib=round(psutil.virtual_memory().available / 2**30, 2),
            fix="lower max_tokens, group_size or max_length, or use a smaller model; the event `memory` says what "
            "needs most",
        )
    return FlashError(
        "worker_failed",
        f"{type(error).__name__} during {phase}: {error}",
        fix="read the end of the attempt's log in status; report it if it is not your environment's",
    )


def _was_struck(error: FlashError) -> bool:
    """Whether the environment's process was killed: that may be no fault of its code, and another
    attempt may live.
    """
    return error.code.startswith("environment_") and "killed by SIG" in error.what


_NO_SPACE = ("No space left on device", "PytorchStreamWriter failed writing")
"""What safetensors and torch.save say of a full disk, in errors of their own."""
_NO_MEMORY = (
    "out of memory", "not allocate memory", "'t allocate memory", "not enough memory", "bad_alloc",
    "cublas_status_alloc_failed", "no available memory", "available kv cache memory", "less than desired gpu memory",
)  # fmt: skip
"""What allocators say, and vLLM where its engine finds no room."""
_NO_KERNEL_MEMORY = "could not create a primitive"
"""All that oneDNN says where a kernel finds no memory for its code; of an unknown operation it says
more.
"""
_NO_THREAD = "can't start new thread"
"""Python's words where a thread finds no memory for its stack, and where the system allows no more
threads.
"""


def _is_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of the device: each allocator has its own words for
    it.
    """
    said = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or said == _NO_KERNEL_MEMORY
        or (
            said == _NO_THREAD
            and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        )
        or any(words in said for words in _NO_MEMORY)
    )


if __name__ == "__main__":
    # Engine threads and environment hosts may outlive main; everything worth keeping is on disk by
    # now.
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
