"""The notebook's side: the code in the notebook's kernel. It imports neither torch nor the engine."""
