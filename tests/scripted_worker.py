"""A worker that speaks the run-folder protocol and misbehaves on cue; run as worker.main is: FOLDER
--attempt N.

The run's environment_args say what it does: {"steps": n, "ATTEMPT": {"at": step, "do": MISDEED}}. At a step with "hold"
it beats without moving on until the file `go` appears in the folder. With {"climbs": share} it makes the steps that it
is asked for, and each solves so many more of 60 tasks.

Of an evaluation they say which tasks are what: {"solved": [places], "often": [every second attempt is a success],
"failing": [environment code raises], "endless": [cut off]}; all others are failures. {"hold": true} holds it,
"climbing" with ever more attempts done; {"constant": share} is what the best constant answer, "Yes", reaches."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_folder import RunFolder, RunWriter

ROLLOUTS_PER_STEP = 3


def main() -> None:
    folder, attempt = RunFolder(sys.argv[1]), int(sys.argv[3])
    plan = folder.job()["spec"]["environment_args"]
    cue = plan.get(str(attempt), {})
    sys.stderr.write(f"attempt {attempt} as pid {os.getpid()}\n")
    if cue.get("do") == "die_at_start":
        sys.exit("no such module: torch")
    writer = RunWriter(folder, attempt)
    resumed = folder.checkpoints.newest_good() or 0
    if folder.job()["spec"]["algorithm"] == "eval":
        evaluate(folder, writer, plan)
        return
    writer.event("phase", f"starting from step {resumed}", resumed=resumed)
    try:
        make_steps(folder, writer, plan, cue, resumed)
    except FlashError as error:
        if error.code == "disk_full":
            writer.commit_result("failed", resumed, error, retryable=True)
        raise


def make_steps(folder: RunFolder, writer: RunWriter, plan: dict[str, Any], cue: dict[str, Any], resumed: int) -> None:
    step = resumed
    size_bytes = plan.get("size_bytes", 64)
    steps = folder.job()["spec"]["steps"] if "climbs" in plan else plan.get("steps", 4)
    for step in range(resumed + 1, steps + 1):
        writer.beat(step, "train")
        if cue.get("at") == step:
            misbehave(cue["do"], folder, writer, step)
        if folder.is_cancelled():
            save(writer, step, size_bytes)
            writer.commit_result("cancelled", step)
            return
        report(writer, step)
        save(writer, step, size_bytes)
    writer.evaluation(step, {"n": 1, "success": 1.0}, [rollout(step, 0)])
    writer.commit_result("succeeded", step)


def evaluate(folder: RunFolder, writer: RunWriter, plan: dict[str, Any]) -> None:
    spec = folder.job()["spec"]
    writer.beat(0, "eval")
    writer.event("precision", "as asked", precision=spec["precision"] or "bfloat16")
    writer.event("sampling", "0 attempts are done", step=0)
    done = 1
    while plan.get("hold") and not Path(folder.path("go")).exists() and not folder.is_cancelled():
        writer.beat(done, "eval")
        time.sleep(0.02)
        done += plan["hold"] == "climbing"
    if folder.is_cancelled():
        writer.commit_result("cancelled", 1)
        return
    rows = [
        attempt_at(task, number * spec["attempts"] + attempt, attempt, spec, plan)
        for number, task in enumerate(spec["tasks"])
        for attempt in range(spec["attempts"])
    ]
    valid = [row for row in rows if not row["error"]]
    success = sum(row["success"] for row in valid) / len(valid) if valid else None
    share = 1 - len(valid) / len(rows)
    summary = {"n": len(valid), "success": success, "error_share": share, "tokens_per_s": 100.0}
    if level := plan.get("constant"):
        summary |= {"constant_success": level, "constant_n": 40}
        writer.event("constant", "the best constant", answer="Yes")
    writer.evaluation(spec["step"], summary, rows)
    writer.commit_result("succeeded", len(rows))


def attempt_at(task: int, index: int, attempt: int, spec: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    success = task in plan.get("solved", ()) or (task in plan.get("often", ()) and attempt % 2 == 0)
    success = success or task * 7 % 60 < 60 * plan.get("climbs", 0) * spec["step"]
    failed = task in plan.get("failing", ())
    said = plan.get("say", "It is") + f" {task if success else 'unknown'}"
    return {
        "index": index, "task_id": f"{spec['split']}-{task}", "split": spec["split"], "attempt": attempt,
        "messages": [{"role": "user", "content": f"say {task}"}, {"role": "assistant", "content": said}],
        "reward": float(success and not failed), "success": success and not failed,
        "error": {"code": "environment_error", "what": "the scorer raised"} if failed else None, "metrics": {},
        "turns": 1, "completion_tokens": 20, "truncated": task in plan.get("endless", ()), "finish": "done",
    }  # fmt: skip


def misbehave(deed: str, folder: RunFolder, writer: RunWriter, step: int) -> None:
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "fail":
        writer.commit_result("failed", step, FlashError("environment_error", "the scorer raised"), retryable=False)
        sys.exit(1)
    elif deed == "give_up":
        writer.commit_result("failed", step, FlashError("out_of_memory", "no memory"), retryable=True)
        sys.exit(1)
    elif deed == "linger":
        writer.commit_result("succeeded", step)
        signal.pause()
    while deed == "stall" or (deed == "hold" and not Path(folder.path("go")).exists() and not folder.is_cancelled()):
        writer.beat(step, "train")
        time.sleep(0.02)


def report(writer: RunWriter, step: int) -> None:
    writer.rollouts(step, [rollout(step, index) for index in range(ROLLOUTS_PER_STEP)])
    writer.metrics(step, {"reward/mean": step / 10, "loss": None})


def rollout(step: int, index: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"step {step}"}, {"role": "assistant", "content": f"answer {index}"}]
    return {"step": step, "index": index, "reward": index / 2, "success": index > 0, "messages": messages}


def save(writer: RunWriter, step: int, size_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "adapter.bin").write_bytes(bytes([step % 256]) * size_bytes)
        writer.commit_checkpoint(step, Path(scratch), {"reward/mean": step / 10})


if __name__ == "__main__":
    main()
