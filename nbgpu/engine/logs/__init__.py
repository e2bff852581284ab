"""The logs of a run: metrics, profiles, timelines, TensorBoard and W&B."""
