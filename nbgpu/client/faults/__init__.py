"""Faults of ranks as the notebook sees them: deaths, hangs and mismatched collectives, and what is done then."""
