"""Sweeps: many runs with different settings, held as one."""
