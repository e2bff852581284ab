"""The types, names and limits that the notebook's side and the ranks agree on."""
