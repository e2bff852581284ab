"""What the notebook's side does to its own kernel and page, by ipykernel's private names."""
