"""Slices of inputs, reconstructions and errors."""

from __future__ import annotations

import torch
from torch import Tensor

from nbgpu.recipes import data_uri


def pictures(image: Tensor, reconstruction: Tensor, num_samples: int = 6) -> dict[str, str]:
    """Return {caption: PNG as a data URI}: the middle slices of some samples side by side, in three rows.

    The channels of a sample come one after another.
    """
    chosen = torch.linspace(0, len(image) - 1, min(num_samples, len(image))).round().long()
    original, output = image[chosen].flatten(0, 1), reconstruction[chosen].flatten(0, 1)
    error = (output - original).abs()
    return {
        "original": data_uri.middle_slices(original, 0, 1),
        "reconstruction": data_uri.middle_slices(output, 0, 1),
        "absolute error, black is 0 and white 0.5": data_uri.middle_slices(error, 0, 0.5),
    }
