"""What runs in the notebook's kernel. It never imports torch, nor the engine."""
