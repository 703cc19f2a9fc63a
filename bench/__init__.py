"""Our rollouts, training step and whole run, timed beside those of peers on the same machine."""
