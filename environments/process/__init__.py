"""The process that runs environment code: its host, its child, and its packages."""
