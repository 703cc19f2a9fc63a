"""Checks of an environment before it is trained on."""
