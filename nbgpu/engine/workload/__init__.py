"""The protocols of recipes and problems, and how one of them is found by its name."""
