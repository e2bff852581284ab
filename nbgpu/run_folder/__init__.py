"""The folder of a run: its files, how they are written, and how they are read without torch."""
