"""The memory of a rank: its use, its limit, and how it is given back."""
