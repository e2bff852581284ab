"""One distributed cell: sent to all ranks, its output merged, its questions asked."""
