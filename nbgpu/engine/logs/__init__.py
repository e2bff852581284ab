"""What a run leaves behind to look at: metrics, profiles, timelines, TensorBoard and W&B."""
