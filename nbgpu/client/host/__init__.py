"""The host: the clusters that run on it, and the checks of `nbgpu doctor`."""
