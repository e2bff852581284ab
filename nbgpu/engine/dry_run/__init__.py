"""Dry runs: steps on generated batches, or on shapes alone, which show how much memory a run will need."""
