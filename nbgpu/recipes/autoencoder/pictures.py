"""Slices of inputs, reconstructions and errors."""

from __future__ import annotations

import torch
from torch import Tensor

from nbgpu.recipes import data_uri
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
        "original": data_uri.of_middle_slices(original, _INTENSITY),
        "reconstruction": data_uri.of_middle_slices(output, _INTENSITY),
        "absolute error of the reconstruction": data_uri.of_middle_slices(error, _ERROR),
    }
