"""The workloads: one folder for each, and the modules that several of them share."""
