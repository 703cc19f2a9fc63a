"""Certificates of environments: made, signed, checked and shown."""
