"""The variables of the ranks: the table of them, transfer, definitions, reloading."""
