"""`scripts/scale`: a cluster on this machine, what it must show, and its table."""
