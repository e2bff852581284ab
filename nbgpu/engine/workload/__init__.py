"""What a recipe and a problem are to the engine, and how one is found by its name."""
