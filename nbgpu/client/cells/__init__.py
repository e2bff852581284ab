"""Distributed cells: how a cell is sent to all ranks, and how their outputs are merged into one."""
