"""The process group: forming it, cutting it, talking over it, and looking into it."""
