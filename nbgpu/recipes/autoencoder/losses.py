"""The terms of an autoencoder's loss other than the reconstruction error."""

from __future__ import annotations

from torch import Tensor

from nbgpu.engine.model.precision import at_least_float32

LOG_VARIANCE_BOUNDS = (-30.0, 20.0)
"""The bounds to which AutoencoderKL clamps the logarithm of the latent variance. At 20, the largest, a
latent value adds 2.4e8 to the divergence, and beyond it the gradient is 0: neither can overflow."""


def kl_divergence(mean: Tensor, sigma: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from the standard normal distribution, summed over a sample's
    latents and averaged over the batch, a scalar (Kingma & Welling 2014, appendix B).

    Args:
        mean, sigma: mean and standard deviation of the latent values, (N, C, ...).
    """
    mean, variance = at_least_float32(mean), at_least_float32(sigma).square()
    return 0.5 * (mean.square() + variance - variance.log() - 1).flatten(1).sum(dim=1).mean()


def deceived(logits: Tensor) -> Tensor:
    """Return the least-squares loss (Mao et al., ICCV 2017) of a discriminator's logits for reconstructions,
    with target 1."""
    return (at_least_float32(logits) - 1).square().mean()


def discrimination_loss(of_reconstructions: Tensor, of_images: Tensor) -> Tensor:
    """Return the discriminator's loss, a scalar: its targets are 0 for reconstructions and 1 for images."""
    return (at_least_float32(of_reconstructions).square().mean() + deceived(of_images)) / 2
