"""Who gives an attempt a machine."""
