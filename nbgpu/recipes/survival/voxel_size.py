"""Brings volumes to one voxel size, and from there to one shape without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from monai.transforms import ResizeWithPadOrCrop
from monai.utils import convert_to_tensor
from nibabel.affines import voxel_sizes
from numpy.typing import NDArray
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.spacing import affine_of, resampled, shape_of
from nbgpu.recipes.survival.config import SurvivalConfig

_MAX_READ = 200
"""The number of headers that are read to say how large volumes are."""


def at_voxel_size(image: Tensor, path: Path, spacing_mm: Sequence[float], size: Sequence[int]) -> Tensor:
    """Return the middle of a volume at this voxel size, filled up with zeros where it is smaller.

    Args:
        image: (1, D, H, W) of `load_volume(path)`, with values of 0 where there is air.
        path: the file, whose header has the size of its voxels.
        spacing_mm: the new size in mm along each axis.
        size: the number of voxels of the result along each axis.
    """
    found, _ = resampled(image, affine_of(path), spacing_mm)
    middle = ResizeWithPadOrCrop(tuple(size), mode="constant", value=0)(found)
    made: Tensor = convert_to_tensor(middle, track_meta=False)
    return made


def cut_in_words(items: Sequence[Item], config: SurvivalConfig) -> str:
    """Say how many of the files lose what is beyond the middle, from the headers of at most `_MAX_READ`."""
    looked_at = items[:: -(-len(items) // _MAX_READ)]
    kept_mm = np.multiply(config.volume_shape, config.spacing_mm)
    own_mm = np.array([_extent_mm(item["image"]) for item in looked_at])
    # A voxel more or less is a matter of rounding.
    num_cut = int((own_mm > kept_mm + config.spacing_mm).any(axis=1).sum())
    words = f"voxels of {_by(config.spacing_mm)} mm: the middle {_by(kept_mm)} mm of each volume"
    if not num_cut:
        return f"{words}, and none of the {len(looked_at)} that were looked at is larger"
    return (
        f"{words}. {num_cut} of the {len(looked_at)} that were looked at lose their edges: they are up to "
        f"{_by(own_mm.max(axis=0).round())} mm"
    )


def _extent_mm(path: Path) -> NDArray[np.float64]:
    return np.asarray(np.multiply(shape_of(path), voxel_sizes(affine_of(path))), np.float64)


def _by(numbers: Iterable[float]) -> str:
    return " x ".join(f"{number:g}" for number in numbers)
