"""What an autoencoder is trained by, beside the error of its reconstruction."""

from __future__ import annotations

from torch import Tensor

from nbgpu.engine.model.precision import at_least_float32

LOG_VARIANCE_BOUNDS = (-30.0, 20.0)
"""Where AutoencoderKL clamps the logarithm of the latent variance. With 20, the largest, a latent value adds 2.4e8 to the
divergence, and its gradient to the logarithm is 0 beyond: neither can overflow."""


def kl_divergence(mean: Tensor, sigma: Tensor) -> Tensor:
    """From the standard normal, summed over a sample's latent volume and averaged over the batch, a scalar.

    Kingma & Welling 2014, appendix B.

    Args:
        mean, sigma: of the latent values, (N, C, ...).
    """
    mean, variance = at_least_float32(mean), at_least_float32(sigma).square()
    return 0.5 * (mean.square() + variance - variance.log() - 1).flatten(1).sum(dim=1).mean()


def deceived(logits: Tensor) -> Tensor:
    """Least squares (Mao et al., ICCV 2017): how far what a discriminator says of reconstructions is from 1, true. A scalar."""
    return (at_least_float32(logits) - 1).square().mean()


def told_apart(of_reconstructions: Tensor, of_images: Tensor) -> Tensor:
    """What the discriminator is trained by: 0 for reconstructions, 1 for images. A scalar."""
    return (at_least_float32(of_reconstructions).square().mean() + deceived(of_images)) / 2
