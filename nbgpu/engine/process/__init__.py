"""The process of a rank: the server that forks it, and the setting up of its kernel."""
