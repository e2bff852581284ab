"""A distributed cell: how it is sent to all ranks, and how their outputs become one text."""
