"""How the process of a rank comes to be: the server that forks it, and what is set up in it."""
