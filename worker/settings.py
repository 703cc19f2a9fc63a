"""What a worker reads of job.json: the fields of flash_mcp.protocol.spec.RunSpec, every one filled
in by `resolve`.
"""

from types import SimpleNamespace


class Settings(SimpleNamespace):
    """Attribute access to `job["spec"]`."""
