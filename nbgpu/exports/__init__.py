"""Files with which a run or a notebook leaves nbgpu's own processes: for torchrun, Slurm and Kubernetes."""
