"""Slices of inputs, reconstructions and errors."""

from __future__ import annotations

import torch
from torch import Tensor

from nbgpu.recipes import side_by_side
from nbgpu.recipes.side_by_side import Colours

_INTENSITY = Colours("intensity, scaled", 0, 1)
_ERROR = Colours("absolute error", 0, 0.5)


def pictures(image: Tensor, reconstruction: Tensor, num_samples: int = 6) -> dict[str, str]:
    """Return {caption: PNG as a data URI}: the middle slices of some samples side by side, in three rows.

    The channels of a sample come one after another.
    """
    chosen = torch.linspace(0, len(image) - 1, min(num_samples, len(image))).round().long()
    original, output = image[chosen].flatten(0, 1), reconstruction[chosen].flatten(0, 1)
    error = (output - original).abs()
    return {
        "original": side_by_side.middle_slices_uri(original, _INTENSITY),
        "reconstruction": side_by_side.middle_slices_uri(output, _INTENSITY),
        "absolute error of the reconstruction": side_by_side.middle_slices_uri(error, _ERROR),
    }
