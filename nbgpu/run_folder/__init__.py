"""The folder of a run: its files, and the code that writes and reads them without torch."""
