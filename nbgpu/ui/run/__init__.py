"""What a person sees of a run: the live panel, its charts, the snapshot that stays, the report, the terminal."""
