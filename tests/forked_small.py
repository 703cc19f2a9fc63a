"""What tests/forked.py imports for servers, supervisors and workers that are scripts."""

import gc

import flash_mcp.cli.main
import flash_mcp.protocol.run_folder
import flash_mcp.server.http_server
import flash_mcp.server.mcp_server
import flash_mcp.supervisor.loop
import flash_mcp.supervisor.process
import worker.main
import worker.serving

gc.freeze()

__all__ = ["flash_mcp", "worker"]
