"""How numbers and lists are put into words, in the same way everywhere."""
