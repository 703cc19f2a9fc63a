"""The MCP server, over stdio and HTTP."""
