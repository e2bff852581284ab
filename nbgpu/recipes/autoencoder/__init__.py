"""The recipe `autoencoder`: a 3D variational autoencoder on patches of volumes, and its application to whole
volumes."""
