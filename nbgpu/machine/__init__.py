"""The host: its devices, processes, sockets, signals and files, and the transports between its ranks."""
