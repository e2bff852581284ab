"""The GPUs of this host: the setting that chooses them, their links, their present state, and who has
them."""
