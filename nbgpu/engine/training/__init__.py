"""The two loops, and what they do at each step."""
