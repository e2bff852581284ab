"""The engines of a cluster: how they are started, assigned to ranks, reached and replaced."""
