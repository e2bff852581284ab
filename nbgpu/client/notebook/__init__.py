"""What a person types: magics, completion, and how a cell gets to the ranks."""
