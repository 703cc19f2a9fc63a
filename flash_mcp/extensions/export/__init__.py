"""A checkpoint as files that other programs read: the command, and what a tool call starts."""
