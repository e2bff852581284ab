"""What a person sees of a sweep: its live table, its report, its lines in a terminal."""
