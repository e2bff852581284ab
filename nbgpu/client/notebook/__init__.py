"""The commands of a notebook: the magics, completion, and the transformation of distributed cells."""
