"""Measurements on the ranks of how a cluster scales."""
