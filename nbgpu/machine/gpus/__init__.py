"""The GPUs of this host: which there are to take, how they are linked, what they do now, and who has them."""
