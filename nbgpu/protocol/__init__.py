"""What the notebook's side and the ranks agree on."""
