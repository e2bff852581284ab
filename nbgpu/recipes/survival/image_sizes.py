"""Proposes the size to which a cohort's volumes are resized, where the settings leave it out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nbgpu.engine.data.volumes import Shape, shape_in_words, shapes_of
from nbgpu.engine.workload.recipe import Proposal

_MAX_VOXELS_ON_GPU = 256 * 256 * 64
"""The size that MACE's guide trains with."""
_MAX_VOXELS_ON_CPU = 64 * 64 * 32
_MULTIPLE = 8
_SCALES = (1.0, 0.75, 0.5, 0.375, 0.25)


def propose_sizes(volumes: Sequence[Path], spacing_mm: Sequence[float], on_gpu: bool) -> list[Proposal]:
    """Propose sizes in the proportions of the median volume, the largest first.

    The median is taken for each axis separately. The largest size is the median, made smaller if it has more
    voxels than a step on these ranks can have. Edges are multiples of 8, because the network halves them
    several times.

    Args:
        volumes: the files.
        spacing_mm: the voxel size in mm to which the volumes are resampled; empty for no resampling.
        on_gpu: whether the ranks have GPUs.

    Raises:
        DataError: none of the files can be used.
    """
    shapes = shapes_of(volumes, spacing_mm=spacing_mm)
    median = np.median(np.array(shapes), axis=0)
    max_voxels = _MAX_VOXELS_ON_GPU if on_gpu else _MAX_VOXELS_ON_CPU
    largest = median * min(1.0, (max_voxels / median.prod()) ** (1 / 3))
    sizes = dict.fromkeys(_rounded(largest * scale) for scale in _SCALES)
    reason = f"the median of {len(shapes)} volumes is {shape_in_words([round(n) for n in median])}"
    if spacing_mm:
        reason += f" at {shape_in_words(spacing_mm)} mm"
    return [Proposal({"image_size": size}, reason) for size in sizes]


def _rounded(size: NDArray[np.float64]) -> Shape:
    """Return a size in voxels (3,) with its edges rounded to multiples of _MULTIPLE, but not to 0."""
    first, second, third = (max(1, round(n / _MULTIPLE)) * _MULTIPLE for n in size)
    return first, second, third
