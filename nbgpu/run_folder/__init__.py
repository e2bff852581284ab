"""A run's folder: who writes what into it, and how it is read. No torch."""
