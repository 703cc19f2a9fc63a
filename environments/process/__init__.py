"""The processes that run environment code, and their sandbox."""
