"""Programs outside the sandbox play the rollouts of a run."""
