"""The memory of a rank: its use, its limit, and its release."""
