"""The recipe `autoencoder`: a 3D variational autoencoder on patches of volumes, and whole volumes through it."""

from nbgpu.recipes.image_quality import psnr_db as psnr_db
from nbgpu.recipes.image_quality import ssim as ssim
