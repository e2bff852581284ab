"""The two loops, one that trains a model and one that minimises over a tensor, and the work of each step."""
