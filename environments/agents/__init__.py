"""The API of a model that agents call, and programs that are agents."""
