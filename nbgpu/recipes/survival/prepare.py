"""The transform from a patient's file to the tensors that the network is trained on; with the setting
`spacing`, volumes are first resampled to one voxel size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from monai.transforms import Resize, ResizeWithPadOrCrop, ScaleIntensityRange, Transform
from monai.utils import convert_to_tensor
from nibabel.affines import voxel_sizes
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.spacing import affine_of, resampled, shape_of
from nbgpu.engine.data.volumes import load_volume, shape_in_words
from nbgpu.errors import DataError
from nbgpu.recipes.survival import cohort
from nbgpu.recipes.survival.config import SurvivalConfig

_MAX_READ = 200
"""The most headers of files that are read to say how large the volumes are."""


@dataclass(eq=False)
class Prepare(Transform):
    """Converts an Item to the tensors that `Survival.example` lists, without the batch dimension."""

    size: tuple[int, ...]
    """The shape of the result (D, H, W), in voxels."""
    hu_min: float
    """The Hounsfield units that become 0."""
    hu_max: float
    """The Hounsfield units that become 1."""
    seed: int
    """The family of generated patients."""
    spacing_mm: tuple[float, ...] = ()
    """The voxel size along each axis to which volumes are resampled; empty for no resampling."""

    def __call__(self, item: Item) -> dict[str, Tensor]:
        """Load or generate a volume, map its Hounsfield units to 0..1, and resample it to `size`.

        Returns:
            `image` (1, D, H, W), `features` (F,), and scalars: `order` in time, `event` and `number`.

        Raises:
            DataError: voxels are NaN or infinite, or the volume has no contrast in the window of Hounsfield
                units.
        """
        image = (
            cohort.image(self.seed, item["generated"]) if "generated" in item else load_volume(item["image"])
        )
        if num_bad := int((~image.isfinite()).sum()):
            raise DataError(f"{item['name']}: {num_bad} of {image.numel()} voxels are NaN or infinite")
        # Built for each call, because these transforms are stateful and volumes are decoded in several
        # threads.
        window = ScaleIntensityRange(self.hu_min, self.hu_max, 0.0, 1.0, clip=True)
        image = convert_to_tensor(window(image), track_meta=False)
        if image.min() == image.max():
            raise DataError(
                f"{item['name']}: every voxel is at or beyond the same end of {self.hu_min:g} to {self.hu_max:g} "
                "Hounsfield units, or all are equal. Change hu_min and hu_max, or leave the file out"
            )
        # A generated patient has no voxel size.
        if self.spacing_mm and "image" in item:
            image = at_voxel_size(image, item["image"], self.spacing_mm, self.size)
            if image.min() == image.max():
                raise DataError(
                    f"{item['name']}: its middle of image_size voxels has no contrast. Take a larger image_size or spacing, or "
                    "leave the file out"
                )
        if tuple(image.shape[1:]) != self.size:
            image = convert_to_tensor(
                Resize(self.size, mode="trilinear", anti_aliasing=True)(image), track_meta=False
            )
        return {
            "image": image,
            "features": torch.tensor(item["features"], dtype=torch.float32),
            "order": torch.tensor(item["order"]),
            "event": torch.tensor(int(item["event"])),
            "number": torch.tensor(item["number"]),
        }


def at_voxel_size(image: Tensor, path: Path, spacing_mm: Sequence[float], size: Sequence[int]) -> Tensor:
    """Return the middle of a volume at this voxel size, filled up with zeros where it is smaller.

    Args:
        image: (1, D, H, W) of `load_volume(path)`, with values of 0 where there is air.
        path: the file, whose header has the size of its voxels.
        spacing_mm: the new size in mm along each axis.
        size: the number of voxels of the result along each axis.
    """
    at_spacing, _ = resampled(image, affine_of(path), spacing_mm)
    middle = ResizeWithPadOrCrop(tuple(size), mode="constant", value=0)(at_spacing)
    plain: Tensor = convert_to_tensor(middle, track_meta=False)
    return plain


def cut_in_words(items: Sequence[Item], config: SurvivalConfig) -> str:
    """Return a sentence on how many volumes are larger than the middle that is cut out of them, from the
    headers of at most `_MAX_READ` files."""
    looked_at = items[:: math.ceil(len(items) / _MAX_READ)]
    kept_mm = np.multiply(config.volume_shape, config.spacing_mm)
    extents_mm = np.array(
        [np.multiply(shape_of(item["image"]), voxel_sizes(affine_of(item["image"]))) for item in looked_at]
    )
    # A difference of one voxel may be due to rounding.
    num_cut = int((extents_mm > kept_mm + config.spacing_mm).any(axis=1).sum())
    sentence = f"voxels of {shape_in_words(config.spacing_mm)} mm: the middle {shape_in_words(kept_mm)} mm of each volume"
    if not num_cut:
        return f"{sentence}, and none of the {len(looked_at)} that were looked at is larger"
    return (
        f"{sentence}. {num_cut} of the {len(looked_at)} that were looked at lose their edges: they are up to "
        f"{shape_in_words(extents_mm.max(axis=0).round())} mm"
    )
