"""The consequences of the settings, computed before anything starts and without torch: epochs, workers,
trials, suitability."""
