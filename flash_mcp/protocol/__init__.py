"""What the control plane and the worker both speak. The worker imports this folder of flash_mcp
alone.
"""
