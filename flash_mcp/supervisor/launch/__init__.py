"""Launchers: they start attempts on a machine."""
