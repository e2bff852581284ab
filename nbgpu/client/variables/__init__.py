"""The variables of the ranks: their table, their transfer, definitions of functions and classes, and
reloading."""
