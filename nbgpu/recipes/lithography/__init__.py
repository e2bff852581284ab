"""Projection lithography: from a mask to the image in the resist, by its physics and by a network that
learned it."""
