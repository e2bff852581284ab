"""What follows from the settings before anything starts, worked out without torch."""
