"""The host as the notebook's side knows it: the clusters that run on it, and the findings of `nbgpu doctor`."""
