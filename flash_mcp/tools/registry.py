"""Every tool, in the order of use. To add one, write its function in a file here and add a line."""

from __future__ import annotations

from environments import doors
from flash_mcp.tools.catalog import catalog
from flash_mcp.tools.checkpoints import cancel, checkpoints
from flash_mcp.tools.compare import compare
from flash_mcp.tools.curate import curate
from flash_mcp.tools.deploy import chat, deploy, undeploy
from flash_mcp.tools.environments import env_push, env_test
from flash_mcp.tools.evaluate import evaluate
from flash_mcp.tools.rollouts import rollouts
from flash_mcp.tools.shared.tool_base import Tool
from flash_mcp.tools.starters import env_setup
from flash_mcp.tools.status import status
from flash_mcp.tools.train import RARE, train

_TOOLS = (
    Tool(catalog, title="Browse the catalog", example="catalog --kind models", read_only=True),
    Tool(
        env_setup,
        title="Write a starter environment",
        example="env-setup ./calculator --template calculator",
        words=("folder",),
    ),
    Tool(
        env_push,
        title="Publish an environment",
        example="env-push ./calculator --name calculator",
        words=("folder",),
        idempotent=True,
    ),
    # env_test is not read-only: with model it queues an evaluation.
    Tool(
        env_test,
        title="Check an environment",
        example="env-test ./calculator",
        words=("folder",),
        idempotent=True,
    ),
    Tool(
        train,
        title="Start a training run",
        example="train configs/rl.toml --set steps=300 --follow",
        words=("config",),
        open_world=True,
        unlisted=RARE,
    ),
    Tool(
        cancel,
        title="Cancel a run",
        example="cancel run-2f9k1c8d --reason 'wrong data'",
        destructive=True,
        idempotent=True,
    ),
    Tool(
        checkpoints,
        title="List and export checkpoints",
        example="checkpoints run-2f9k1c8d",
        idempotent=True,
        open_world=True,
        changes_with=("export",),
    ),
    Tool(
        status,
        title="Status of runs",
        example="status run-2f9k1c8d --follow",
        words=("run_id",),
        read_only=True,
    ),
    Tool(
        rollouts,
        title="Read transcripts",
        example="rollouts run-2f9k1c8d --worst 3",
        read_only=True,
    ),
    Tool(
        evaluate,
        title="Evaluate a model",
        example="evaluate calculator --model run-2f9k1c8d@100 --follow",
        words=("environment",),
        open_world=True,
    ),
    Tool(
        compare,
        title="Compare evaluations",
        example="compare run-2f9k1c8d@0 run-2f9k1c8d --more run-8d1c9k2f",
        words=("base", "other"),
        read_only=True,
    ),
    Tool(
        curate,
        title="Make a dataset from attempts",
        example="curate run-2f9k1c8d,run-8d1c9k2f --name solved --filter 'avg < 0.9'",
        idempotent=True,
        unlisted=("question", "answer"),
    ),
    Tool(
        deploy,
        title="Serve a checkpoint",
        example="deploy run-2f9k1c8d --step 100",
        idempotent=True,
    ),
    Tool(
        undeploy,
        title="Stop serving",
        example="undeploy dep-2f9k1c8d",
        words=("deployment",),
        destructive=True,
        idempotent=True,
    ),
    Tool(
        chat,
        title="Talk to a deployment",
        example="chat 'What is 12 * 7?' --side-by-side",
        words=("message",),
        read_only=True,
    ),
)
DOOR = "flash_mcp.tools"
TOOLS: dict[str, Tool] = doors.each(DOOR, {tool.name: tool for tool in _TOOLS})
