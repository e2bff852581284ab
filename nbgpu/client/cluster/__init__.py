"""The cluster that a person holds: start, status, restart, release and stop."""
