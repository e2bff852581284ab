"""Projection lithography: from a mask to its image in the resist, by optical simulation and by a network
trained on that simulation."""
