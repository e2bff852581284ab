"""Changes to the notebook's own kernel, and to the page in front of it, that need private names of
ipykernel."""
