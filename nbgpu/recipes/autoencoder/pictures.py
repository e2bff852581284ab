"""Slices of inputs, reconstructions and errors, as PNG data URIs."""

from __future__ import annotations

import base64
import io
import math

import matplotlib.image
import torch
from torch import Tensor
from torch.nn import functional


def pictures(image: Tensor, reconstruction: Tensor, num_samples: int = 6) -> dict[str, str]:
    """{caption: PNG as a data URI}: the middle slices of some samples side by side, in three rows."""
    chosen = torch.linspace(0, len(image) - 1, min(num_samples, len(image))).round().long()
    original, output = (
        volumes[chosen, 0, :, :, volumes.shape[-1] // 2] for volumes in (image, reconstruction)
    )
    error = (output - original).abs()
    return {
        "original": _png(original, "gray", vmax=1.0),
        "reconstruction": _png(output, "gray", vmax=1.0),
        "absolute error, black is 0 and white 0.5": _png(error, "gray", vmax=0.5),
    }


def _png(slices: Tensor, colours: str, vmax: float) -> str:
    """(N, H, W) as one row of tiles, with the second axis upwards, each tile at least 96 pixels wide."""
    enlarge = max(1, math.ceil(96 / slices.shape[-1]))
    tiles = slices.transpose(1, 2).flip(1).repeat_interleave(enlarge, dim=1).repeat_interleave(enlarge, dim=2)
    row = functional.pad(tiles, (0, 4), value=vmax).permute(1, 0, 2).flatten(1)[:, :-4]
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, row.numpy(), cmap=colours, vmin=0.0, vmax=vmax, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
