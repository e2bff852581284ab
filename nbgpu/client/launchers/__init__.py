"""What starts hosts: ssh, Slurm, or one of ipyparallel's launchers. Nothing here knows of ranks."""
