"""The model and what trains it: strategy, optimizer, schedule, precision, averages, random numbers."""
