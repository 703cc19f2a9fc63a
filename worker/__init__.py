"""The GPU side: one attempt of one run. Needs the `cpu` or the `gpu` extra."""
