"""The variables of the ranks: their table, their transfer, the definitions of functions and classes, reloading."""
