"""The two-point correlation of orientations, for fields that hold a rotation for each pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from nbgpu.recipes.microstructure.correlations import two_point
from nbgpu.recipes.microstructure.measure import Descriptor, Measure


def _rotations(vectors: Tensor) -> Tensor:
    """Return the matrices (N, 9, H, W) of rotation vectors (N, 3, H, W), whose length is the angle in radians
    (Rodrigues)."""
    x, y, z = vectors.unbind(dim=1)
    nothing = torch.zeros_like(x)
    cross = torch.stack([nothing, -z, y, z, nothing, -x, -y, x, nothing], dim=-1).unflatten(-1, (3, 3))
    matrices: Tensor = torch.linalg.matrix_exp(cross)
    return matrices.flatten(-2).movedim(-1, 1)


def _orientation(vectors: Tensor, measure: Measure) -> Tensor:
    """Compute the mean of trace(R(x)^T R(x + r)) / 3 as (N, 2L - 1, 2L - 1): 1 at r = 0, and 0 at long
    distances if there is no texture.

    The reference leaves this open: its OrientationDescriptor is an empty class for others to fill. trace(A^T
    B) is the natural inner product of two rotations, and equals 1 + 2 cos angle of the rotation between them.
    Crystal symmetry is not taken into account.
    """
    matrices = _rotations(vectors)
    return two_point(matrices, matrices, measure).sum(dim=1) / 3


ORIENTATIONS = (Descriptor("OrientationDescriptor", _orientation, differentiable=False, of="orientations"),)
