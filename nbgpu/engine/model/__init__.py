"""The model and everything that trains it: strategy, optimizer, schedule, precision, averages, random
numbers."""
