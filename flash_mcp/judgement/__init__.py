"""What the numbers mean: pure functions of records."""
