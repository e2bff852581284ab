"""This host: its devices, processes, sockets and signals, and the ways in which its ranks may talk."""
