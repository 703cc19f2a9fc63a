"""flash-mcp: tools with which a coding agent trains language models on its user's own hardware."""

__version__ = "0.1.0"
