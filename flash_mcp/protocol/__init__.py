"""What the control plane and the worker both speak: all that the worker imports of flash_mcp."""
