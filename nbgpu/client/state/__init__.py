"""What the parts of a cluster share, and how its ranks change in number."""
