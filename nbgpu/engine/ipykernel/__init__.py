"""Changes to the kernel of a rank that need private names of ipykernel and IPython."""
