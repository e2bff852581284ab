"""Many runs with different settings, as one thing."""
