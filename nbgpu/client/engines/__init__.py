"""The engines of a cluster: how they are started, seated, reached and replaced."""
