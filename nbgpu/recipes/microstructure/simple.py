"""Scalar descriptors: the volume fraction of a phase, and the amount of its boundary."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from nbgpu.recipes.microstructure.measure import Descriptor, Measure


def _volume_fractions(x: Tensor, measure: Measure) -> Tensor:
    """Return the share of the slice that is in the phase, as (N,)."""
    return x.mean(dim=(1, 2))


def _variation(x: Tensor, measure: Measure) -> Tensor:
    """Compute the total variation per pixel, as (N, 1): the sum of the absolute differences between
    neighbours.

    If the field is periodic, its first row and first column are repeated after the last ones, and differences
    along them count twice, as in the reference.
    """
    num_pixels = x.shape[1] * x.shape[2]
    if measure.periodic:
        x = pad(x[:, None], (0, 1, 0, 1), mode="circular")[:, 0]
    down = (x[:, 1:] - x[:, :-1]).abs().sum(dim=(1, 2))
    across = (x[:, :, 1:] - x[:, :, :-1]).abs().sum(dim=(1, 2))
    return ((down + across) / num_pixels)[:, None]


SIMPLE = (
    Descriptor("VolumeFractions", _volume_fractions),
    Descriptor("Variation", _variation, weight=100.0),
)
