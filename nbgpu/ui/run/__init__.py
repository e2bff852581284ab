"""The views of a run: the live panel and its charts, the snapshot that stays in the notebook, the report, the
terminal."""
