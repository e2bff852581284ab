"""Measurements of how a cluster scales."""
