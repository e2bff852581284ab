"""The commands of a notebook: magics and completion, and the way of a cell to the ranks."""
