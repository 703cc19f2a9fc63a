"""A search for cheap answers that pay."""
