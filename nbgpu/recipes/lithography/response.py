"""A made-up resist: what it makes of an aerial image is more than a blur and a threshold.

It stands for a resist whose response nobody has measured. The network learns it from pairs alone, and the
models that an expert would fit by hand are held against it, see `baselines`. Its parts are those of real
resists and scanners (Mack, Fundamental Principles of Optical Lithography, 2007): the exposure saturates
(Dill's C), acid diffuses, the stage's motion blurs one axis more than the other, a drift takes a part of the
acid to one side, and where much is exposed nearby less is left to react (loading). Their sizes are made up.
"""

from __future__ import annotations

import math
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


def in_resist(aerial: Tensor, pixel_nm: float) -> Tensor:
    """Return the image in the resist of aerial images: (..., H, W) -> (..., H, W).

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
    """Return the spectra (H, W / 2 + 1) of the blur, of the drift and of 'nearby', each of a kernel whose sum
    is 1."""
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
    """Return the distances of a row's pixels from its first one, the shorter way round, with signs."""
    offsets: Tensor = torch.fft.fftfreq(count, 1 / count, dtype=torch.float64) * pixel_nm
    return offsets
