"""gateway: the rollouts of a run, played by a program of the user's."""

from __future__ import annotations

from contextlib import nullcontext

from flash_mcp.cli import follow
from flash_mcp.cli.output import answer
from flash_mcp.cli.parsing import JSON, RUN_ID, Arguments, Command, option
from flash_mcp.supervisor.process import supervised


def gateway(arguments: Arguments) -> int:
    """Play the rollouts of a run with a program of yours, outside the sandbox.

    The run's environment.toml says gateway = true: the environment has the tasks and scores
    answers, and a training run or an evaluation waits until somebody plays them. This command does
    it until the run has ended: it asks for a task, starts PROGRAM in this folder, and sends back
    what comes of it.

    PROGRAM finds the model in OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, and its name in MODEL. {prompt} in its arguments becomes the task's last
    message. Its standard input is the task as JSON: {"task_id", "split", "messages"}. What it
    prints is the answer, which the environment scores. If it writes {"score": NUMBER} to the file
    that FLASH_REWARD_FILE names, that is the reward; "success": true or false may be with it.

    A program that fails, or takes longer than call_timeout_s of environment.toml, drops its
    rollout, which status counts. Without --url the run is one of this machine. With it, the run is
    one of a server that `flash-mcp serve --http` started there. The exit code says how the run
    ended, as that of wait."""
    from flash_mcp.extensions.gateway.player import Player  # noqa: PLC0415

    run_id = arguments.run_id
    player = Player(run_id, arguments.program, arguments.at_once, arguments.url, arguments.token)
    # The run of another machine has its supervisor there.
    with nullcontext() if arguments.url else supervised():
        follow.run(player.play)
    body = {"run_id": run_id, "state": player.state}
    body |= {"played": player.played, "dropped": player.dropped}
    words = f"{player.played} rollouts played, {player.dropped} dropped"
    answer(arguments, body, f"{run_id} {player.state}: {words}")
    return follow.ENDED[player.state]


COMMAND = Command(
    gateway,
    (
        "flash-mcp gateway run-2f9k1c8d -- python agent.py {prompt}",
        "FLASH_TOKEN=... flash-mcp gateway run-2f9k1c8d --url https://box -- ./agent.sh",
    ),
    (
        RUN_ID,
        option("program", "the program and its arguments, after --", "PROGRAM", nargs="+"),
        option("--at-once", "programs at the same time (default 4)", "N", type=int, default=4),
        option("--url", "the run is one of the server that listens there", "URL"),
        option("--token", "a token of that server (default: that in FLASH_TOKEN)", "TOKEN"),
        JSON,
    ),
)
