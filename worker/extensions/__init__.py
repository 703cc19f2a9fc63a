"""What can be taken out of the worker: each room is found by an entry point."""
