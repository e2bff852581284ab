"""Conclusions from the settings, drawn before anything starts and without torch: epochs, workers, trials,
suitability."""
