"""Dry runs: steps on generated batches, or on shapes alone, which tell how much memory a run will take."""
