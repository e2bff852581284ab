"""The progress of a prediction, in a notebook and in a terminal."""
