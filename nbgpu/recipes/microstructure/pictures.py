"""Pictures of microstructures and of their correlations."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from nbgpu.recipes import data_uri

_LEAST_WIDTH = 160
_GAP = 4


def slices_of(phases: Tensor) -> list[Tensor]:
    """Return a picture itself, or the middle slices of a volume perpendicular to its three directions."""
    if phases.ndim == 2:
        return [phases]
    return [phases.select(direction, phases.shape[direction] // 2) for direction in range(3)]


def png(tiles: list[Tensor], lowest: float, highest: float, colours: str = "viridis") -> str:
    """Render pictures (H, W) side by side, each enlarged to a width of at least 160 pixels."""
    height = max(tile.shape[0] * _enlarged(tile) for tile in tiles)
    row = []
    for tile in tiles:
        enlarge = _enlarged(tile)
        big = tile.double().repeat_interleave(enlarge, dim=0).repeat_interleave(enlarge, dim=1)
        # NaN is drawn transparent.
        row.append(pad(big, (0, _GAP, 0, height - len(big)), value=math.nan))
    image = torch.cat(row, dim=1)[:, :-_GAP].numpy()
    return data_uri.of_pixels(image, cmap=colours, vmin=lowest, vmax=highest)


def block(volume: Tensor, lowest: float, highest: float, colours: str = "viridis", width: int = 320) -> str:
    """Render a volume (D, H, W) as a block seen from above one of its edges: three faces, each in a different
    shade."""
    across, down = math.cos(math.pi / 6), math.sin(math.pi / 6)
    height = round(width / (2 * across) * (1 + 2 * down))
    x = np.linspace(-across, across, width)[None, :].repeat(height, axis=0)
    y = np.linspace(-1, 2 * down, height)[:, None].repeat(width, axis=1)
    colour_of = matplotlib.colormaps[colours]
    image = np.zeros((height, width, 4))
    # The point (a, b, c) of a block of edge 1, with c upwards, appears at ((a - b) across, (a + b) down - c).
    total, difference = (y + 1) / down, x / across
    faces = [
        ((total + difference) / 2, (total - difference) / 2, np.ones_like(x), 1.0),
        (np.ones_like(x), 1 - difference, (2 - difference) * down - y, 0.8),
        (1 + difference, np.ones_like(x), (2 + difference) * down - y, 0.6),
    ]
    voxels = volume.double().numpy()
    for a, b, c, light in faces:
        seen = (np.minimum(np.minimum(a, b), c) >= 0) & (np.maximum(np.maximum(a, b), c) <= 1)
        # The first axis points down, the others along the edges of the top face.
        at = [
            np.minimum((position[seen] * length).astype(int), length - 1)
            for position, length in zip((1 - c, a, b), voxels.shape, strict=True)
        ]
        shares = (voxels[tuple(at)] - lowest) / (highest - lowest)
        image[seen] = colour_of(shares) * np.array([light, light, light, 1.0])
    return data_uri.of_pixels(image.clip(0, 1))


def _enlarged(tile: Tensor) -> int:
    return max(1, math.ceil(_LEAST_WIDTH / tile.shape[1]))
