"""One run on the ranks: its plan, its handle, its watch, its end."""
