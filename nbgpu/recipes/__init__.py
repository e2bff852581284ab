"""The workloads: one folder for each, and what they share."""
