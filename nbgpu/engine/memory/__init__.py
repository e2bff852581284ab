"""Memory of a rank: who has it, how much it may have, and how it is given back."""
