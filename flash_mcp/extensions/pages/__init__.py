"""The report of a run, and the live pages."""
