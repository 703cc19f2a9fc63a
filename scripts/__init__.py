"""What people and CI run, and what those share."""
