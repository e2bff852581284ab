"""One modality of a brain from the others by diffusion in a few steps, as Fast-DDPM does it (Jiang et al.,
arXiv 2405.14802)."""
