"""The recipe `autoencoder`: a 3D variational autoencoder on patches of volumes, and whole volumes through
it."""
