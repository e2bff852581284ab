"""The process group: how it is formed and cut, small messages over it, and what can be read from it."""
