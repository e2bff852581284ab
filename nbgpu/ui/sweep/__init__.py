"""The views of a sweep: the live table, the report, and the lines in a terminal."""
