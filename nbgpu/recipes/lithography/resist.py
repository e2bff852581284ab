"""From an aerial image to the pattern in the resist: diffusion, then a threshold; and a made-up resist, which
does more than that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_DILL_C = 2.5
"""Saturation of the exposure, per unit of the clear field's dose."""
_ALONG_NM, _ACROSS_NM = 18.0, 40.0
"""Standard deviations of the blur along x and y."""
_DRIFT, _DRIFT_NM, _TURN_NM = 0.3, 60.0, 30.0
"""The share of the acid that drifts towards one corner, how far, and how sharply it prefers that side."""
_LOADING, _LOADING_NM = 0.4, 220.0
"""How much less reacts where everything nearby is exposed, and the standard deviation of 'nearby'."""


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


def in_resist(aerial: Tensor, pixel_nm: float) -> Tensor:
    """Return the latent images in a made-up resist of aerial images: (..., H, W) -> (..., H, W).

    The model stands for a resist whose response nobody has measured: the network learns the response from
    pairs alone, and is compared with models that an expert would fit by hand (baselines.py). Its parts are
    those of real resists and scanners (Mack, Fundamental Principles of Optical Lithography, 2007): the
    exposure saturates (Dill's C), acid diffuses, the stage's motion blurs one axis more than the other, a
    drift takes a part of the acid to one side, and where much is exposed nearby less is left to react
    (loading). Their sizes are made up.

    The field is periodic, a clear field gives 1, and a dark one 0.
    """
    acid = (1 - torch.exp(-_DILL_C * aerial)) / (1 - math.exp(-_DILL_C))
    blur, drift, nearby = (spectrum.to(acid.device) for spectrum in _spectra(*acid.shape[-2:], pixel_nm))
    of_acid = torch.fft.rfft2(acid)
    height, width = acid.shape[-2:]
    diffused = torch.fft.irfft2(of_acid * ((1 - _DRIFT) * blur + _DRIFT * drift), s=(height, width))
    loading = torch.fft.irfft2(of_acid * nearby, s=(height, width))
    result: Tensor = diffused * (1 - _LOADING * loading) / (1 - _LOADING)
    return result


@lru_cache(maxsize=4)
def _spectra(height: int, width: int, pixel_nm: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the spectra (H, W / 2 + 1) of three kernels of sum 1: of the blur, of the drift, and of the mean
    over what is nearby."""
    y, x = torch.meshgrid(_offsets_nm(height, pixel_nm), _offsets_nm(width, pixel_nm), indexing="ij")
    squared = x.square() + y.square()
    kernels = (
        torch.exp(-0.5 * ((x / _ALONG_NM).square() + (y / _ACROSS_NM).square())),
        torch.exp(-squared.sqrt() / _DRIFT_NM) * (1 + torch.tanh((x + y) / _TURN_NM)),
        torch.exp(-0.5 * squared / _LOADING_NM**2),
    )
    blur, drift, nearby = (torch.fft.rfft2((kernel / kernel.sum()).float()) for kernel in kernels)
    return blur, drift, nearby


def _offsets_nm(count: int, pixel_nm: float) -> Tensor:
    """Return the signed distances in nm of the pixels of a periodic row from its first pixel, (count,)."""
    offsets: Tensor = torch.fft.fftfreq(count, 1 / count, dtype=torch.float64) * pixel_nm
    return offsets
