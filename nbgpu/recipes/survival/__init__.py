"""Survival analysis: predict from a volume how soon an event is to be expected, with Cox's proportional
hazards model."""
