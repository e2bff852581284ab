"""From an aerial image to the pattern in the resist: diffusion, then a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Resist:
    """A resist that clears where its latent image is above a threshold.

    The latent image is the dose times the aerial image, blurred by a Gaussian that models the diffusion of
    acid during the bake (Mack, Fundamental Principles of Optical Lithography, 2007).

    Attributes:
        threshold: the threshold of the latent image, in units of the clear field at dose 1.
        diffusion_nm: the standard deviation of the blur; 0 for none.
        steepness: the steepness of the smooth threshold, per unit of the latent image; infinity for a hard
            threshold.
    """

    threshold: float = 0.3
    diffusion_nm: float = 0.0
    steepness: float = math.inf

    def latent(self, aerial: Tensor, pixel_nm: float, dose: float = 1.0) -> Tensor:
        """Return the blurred image times the dose: (..., H, W) -> (..., H, W). The field is periodic."""
        return dose * blurred(aerial, self.diffusion_nm / pixel_nm)

    def printed(self, aerial: Tensor, pixel_nm: float, dose: float = 1.0) -> Tensor:
        """Return where the resist clears, 0 to 1: 1 / (1 + exp(-steepness (latent - threshold))), or a
        step."""
        above = self.latent(aerial, pixel_nm, dose) - self.threshold
        if math.isinf(self.steepness):
            return (above > 0).to(aerial.dtype)
        return torch.sigmoid(self.steepness * above)


def blurred(image: Tensor, sigma_pixels: float) -> Tensor:
    """Convolve an image with a Gaussian, exactly and periodically: multiply its spectrum by
    exp(-2 pi^2 sigma^2 f^2)."""
    if sigma_pixels == 0:
        return image
    height, width = image.shape[-2:]
    fy = torch.fft.fftfreq(height, dtype=image.dtype, device=image.device)[:, None]
    fx = torch.fft.rfftfreq(width, dtype=image.dtype, device=image.device)
    passes = torch.exp(-2 * (math.pi * sigma_pixels) ** 2 * (fx.square() + fy.square()))
    result: Tensor = torch.fft.irfft2(torch.fft.rfft2(image) * passes, s=(height, width))
    return result
