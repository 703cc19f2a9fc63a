"""The tools that agents call."""
