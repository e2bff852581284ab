"""Generated volumes of known difficulty: ellipsoids of random position, size, tilt and brightness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MIN_ELLIPSOIDS = 6
MAX_ELLIPSOIDS = 11
SEMI_AXES = (0.10, 0.28)
"""The shortest and the longest semi-axis, as a share of the volume's edge along each axis: in a volume that
is not a cube, ellipsoids are stretched."""
INTENSITIES = (0.2, 0.9)
EDGE_WIDTH_VOXELS = 0.11
"""The scale of the logistic function with which an ellipsoid's surface fades into its surroundings."""


def phantom(size: int | Sequence[int], seed: int, index: int) -> Tensor:
    """Generate a volume of ellipsoids, which follows from `size`, `seed` and `index` alone.

    Later ellipsoids cover earlier ones. Surfaces fade over about half a voxel, so that values vary smoothly,
    and still have more detail than a coarser grid can represent.

    Args:
        size: the edge of the volume in voxels, or one for each axis.
        seed, index: the family of phantoms, and the number in it.

    Returns:
        The volume (1, size, size, size) in float32, from 0 (background) to 1.
    """
    rng = np.random.default_rng((seed, index))
    shape = (size,) * 3 if isinstance(size, int) else tuple(size)
    positions = [(np.arange(edge) + 0.5) / edge for edge in shape]
    points = np.stack(np.meshgrid(*positions, indexing="ij"), axis=-1)
    mean_edge = sum(shape) / 3
    volume = np.zeros(shape)
    for _ in range(rng.integers(MIN_ELLIPSOIDS, MAX_ELLIPSOIDS + 1)):
        centre = rng.uniform(0.15, 0.85, size=3)
        semi_axes = rng.uniform(*SEMI_AXES, size=3)
        tilt, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        radius = np.linalg.norm((points - centre) @ tilt / semi_axes, axis=-1)
        depth_voxels = (1 - radius) * semi_axes.mean() * mean_edge
        # Farther than 50 scales from the surface the logistic function is flat, and exp might overflow.
        inside = 1 / (1 + np.exp(-np.clip(depth_voxels / EDGE_WIDTH_VOXELS, -50, 50)))
        volume += inside * (rng.uniform(*INTENSITIES) - volume)
    return torch.from_numpy(volume.astype(np.float32))[None]
