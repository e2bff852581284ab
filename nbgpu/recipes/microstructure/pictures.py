"""Pictures of microstructures and their correlations, as PNG data URIs."""

from __future__ import annotations

import base64
import io
import math

import matplotlib.image
import torch
from torch import Tensor
from torch.nn.functional import pad

_LEAST_WIDTH = 160
_GAP = 4


def slices_of(phases: Tensor) -> list[Tensor]:
    """A picture itself, or the middle slices of a volume across its three directions."""
    if phases.ndim == 2:
        return [phases]
    return [phases.select(direction, phases.shape[direction] // 2) for direction in range(3)]


def png(tiles: list[Tensor], lowest: float, highest: float, colours: str = "viridis") -> str:
    """Pictures (H, W) side by side, each enlarged to at least 160 pixels."""
    height = max(tile.shape[0] * _enlarged(tile) for tile in tiles)
    row = []
    for tile in tiles:
        enlarge = _enlarged(tile)
        big = tile.double().repeat_interleave(enlarge, dim=0).repeat_interleave(enlarge, dim=1)
        row.append(pad(big, (0, _GAP, 0, height - len(big)), value=highest))
    buffer = io.BytesIO()
    image = torch.cat(row, dim=1)[:, :-_GAP].numpy()
    matplotlib.image.imsave(buffer, image, cmap=colours, vmin=lowest, vmax=highest, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _enlarged(tile: Tensor) -> int:
    return max(1, math.ceil(_LEAST_WIDTH / tile.shape[1]))
