"""A run on the ranks: its plan, its handle, its watch and its end."""
