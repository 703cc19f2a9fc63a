"""Rollouts: the scheduler, transcripts, metrics."""
