"""The control panel: a module for each of its parts, and the one that puts them together."""
