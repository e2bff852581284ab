"""Survival analysis: from a volume to how soon an event is to be expected, by Cox's proportional hazards."""
