"""How hosts are had from what gives them: Slurm's jobs, and ssh. Nothing here knows of ranks."""
