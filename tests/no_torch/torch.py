"""Stands in for torch while a fast test runs: its processes find this folder first."""

raise ImportError("a test that is not marked slow may not import torch")
