"""The inference engine: vLLM."""
