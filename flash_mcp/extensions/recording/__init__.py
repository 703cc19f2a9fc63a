"""The command that lists and deletes what deployments recorded."""
