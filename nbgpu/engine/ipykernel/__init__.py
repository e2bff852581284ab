"""What a rank does to its own kernel, by the private names of ipykernel and IPython."""
