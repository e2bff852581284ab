"""Faults of ranks as the notebook sees them: deaths, hangs, mismatched collectives, and the recovery."""
