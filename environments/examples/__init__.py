"""Environments to start from."""
