"""What goes wrong on ranks, as the notebook sees it: deaths, hangs, mismatched collectives, stacks."""
