"""Which of several policies, or ways to train, is best: played in rounds."""
