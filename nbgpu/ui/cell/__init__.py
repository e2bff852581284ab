"""The views of a distributed cell: its live text, and the button that stops it."""
