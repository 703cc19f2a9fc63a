"""What can be taken out: each room is found by an entry point, and nothing imports it."""
