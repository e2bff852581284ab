"""The devices of this host, on a terminal and for a page."""
