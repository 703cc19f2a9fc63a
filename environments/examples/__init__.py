"""Two environments to start from."""
