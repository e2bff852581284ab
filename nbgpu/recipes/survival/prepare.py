"""The way from a patient's file to the tensors that the network is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.transforms import Resize, ScaleIntensityRange, Transform
from monai.utils import convert_to_tensor
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.volumes import load_volume
from nbgpu.errors import DataError
from nbgpu.recipes.survival import cohort
from nbgpu.recipes.survival.voxel_size import at_voxel_size


class Prepare(Transform):
    """Converts an Item to the tensors that `Survival.example` lists, without the batch dimension."""

    def __init__(
        self, size: Sequence[int], hu_min: float, hu_max: float, seed: int, spacing_mm: Sequence[float] = ()
    ) -> None:
        """Keep what the volumes are brought to.

        Args:
            size: the shape of the result (D, H, W), in voxels.
            hu_min, hu_max: the Hounsfield units that become 0 and 1.
            seed: the family of generated patients.
            spacing_mm: the voxel size along each axis; empty for volumes that are resized whatever theirs is.
        """
        self.size = tuple(size)
        self.spacing_mm = tuple(spacing_mm)
        self.hu_min = hu_min
        self.hu_max = hu_max
        self.seed = seed

    def __call__(self, item: Item) -> dict[str, Tensor]:
        image = (
            cohort.image(self.seed, item["generated"]) if "generated" in item else load_volume(item["image"])
        )
        num_bad = int((~image.isfinite()).sum())
        if num_bad:
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
