"""Sweeps: many runs with different settings, handled as one."""
