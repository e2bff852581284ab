"""The views of a distributed cell: its text as it comes, and the button that stops it."""
