"""Checkpoints: their files, and when they are written."""
