"""Middle slices side by side, as PNG data URIs."""

from __future__ import annotations

import base64
import io
import math

import matplotlib.image
from torch import Tensor
from torch.nn import functional

_MIN_TILE_PX = 96


def slices(volumes: Tensor, lowest: float, highest: float) -> str:
    """(N, D, H, W) as one row: the middle slice of each across its last axis, with the second axis upwards."""
    middle = volumes[..., volumes.shape[-1] // 2]
    times = max(1, math.ceil(_MIN_TILE_PX / middle.shape[-1]))
    tiles = middle.transpose(1, 2).flip(1).repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    row = functional.pad(tiles, (0, 4), value=highest).permute(1, 0, 2).flatten(1)[:, :-4]
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, row.numpy(), cmap="gray", vmin=lowest, vmax=highest, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
