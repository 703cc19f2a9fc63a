"""Every tool, in the order of use. To add one, write its function in a file here and add a line."""

from __future__ import annotations

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
from flash_mcp.tools.tournament import tournament
from flash_mcp.tools.train import RARE, train

_TOOLS = (
    Tool(catalog, title="Browse the catalog", read_only=True),
    Tool(env_setup, title="Write a starter environment"),
    Tool(env_push, title="Publish an environment", idempotent=True),
    # env_test is not read-only: with model it queues an evaluation.
    Tool(env_test, title="Check an environment", idempotent=True),
    Tool(train, title="Start a training run", open_world=True, unlisted=RARE),
    Tool(cancel, title="Cancel a run", destructive=True, idempotent=True),
    Tool(
        checkpoints,
        title="List and export checkpoints",
        idempotent=True,
        open_world=True,
        changes_with=("export",),
    ),
    Tool(status, title="Status of runs", read_only=True),
    Tool(rollouts, title="Read transcripts", read_only=True),
    Tool(evaluate, title="Evaluate a model", open_world=True),
    Tool(compare, title="Compare evaluations", read_only=True),
    Tool(
        tournament,
        title="Find the best of several",
        open_world=True,
        changes_with=("arms",),
        unlisted=("seed", "secrets", "target", "idempotency_key"),
    ),
    Tool(
        curate,
        title="Make a dataset from attempts",
        idempotent=True,
        unlisted=("question", "answer"),
    ),
    Tool(deploy, title="Serve a checkpoint", idempotent=True),
    Tool(undeploy, title="Stop serving", destructive=True, idempotent=True),
    Tool(chat, title="Talk to a deployment", read_only=True),
)
TOOLS: dict[str, Tool] = {tool.name: tool for tool in _TOOLS}
