"""What is known of this host: the clusters that run on it, and what `nbgpu doctor` finds."""
