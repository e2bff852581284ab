"""Generated micrographs: a field of Gaussian noise, smoothed and cut at thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def gaussian_field(shape: Sequence[int], correlation_length: float, seed: int) -> Tensor:
    """Generate smooth periodic noise with mean 0 and variance 1, float64, with the autocorrelation exp(-r^2 /
    (4 correlation_length^2)).

    Args:
        shape: the lengths of two or three axes.
        correlation_length: the standard deviation of the Gaussian that smooths the white noise, in pixels.
        seed: the seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    squared = torch.zeros(1, dtype=torch.float64)
    for axis, length in enumerate(shape):
        frequencies = torch.fft.fftfreq(length, dtype=torch.float64).square()
        squared = squared + frequencies.view([-1 if a == axis else 1 for a in range(len(shape))])
    transfer = torch.exp(-2 * (math.pi * correlation_length) ** 2 * squared)
    dims = tuple(range(len(shape)))
    smooth: Tensor = torch.fft.ifftn(torch.fft.fftn(noise, dim=dims) * transfer, dim=dims).real
    return (smooth - smooth.mean()) / smooth.std()


def micrograph(
    shape: Sequence[int], correlation_length: float, fractions: Sequence[float], seed: int
) -> Tensor:
    """Generate phases 0 to n - 1, int64, with these shares of the pixels: each phase is the field between two
    successive thresholds.

    Args:
        fractions: the shares of all phases but the first; they add up to less than 1.
    """
    field = gaussian_field(shape, correlation_length, seed)
    bounds = [1 - sum(fractions[index:]) for index in range(len(fractions))]
    thresholds = torch.quantile(field.flatten(), torch.tensor(bounds, dtype=torch.float64))
    return torch.bucketize(field, thresholds)
