"""Steps on generated batches, or on shapes alone, that tell what a run will take of the memory."""
