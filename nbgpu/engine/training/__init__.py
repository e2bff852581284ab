"""The two loops, one that trains a model and one that searches for a tensor, and the work of each step."""
