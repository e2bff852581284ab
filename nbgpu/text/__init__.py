"""Format numbers, lists and tables as text, in the same way everywhere."""
