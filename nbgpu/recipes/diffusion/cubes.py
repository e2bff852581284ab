"""The cube that the network sees of a case's volume, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from monai.transforms import ResizeWithPadOrCrop, SpatialPad
from monai.transforms.utils import generate_spatial_bounding_box
from monai.utils import convert_to_tensor
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Cube:
    """Where the cube lies in a case's volume.

    Args:
        shape: the shape of the volume, (right, front, top).
        box: the part of the volume that has the brain, one slice for each axis.
        edge: the edge of the cube in voxels.
        fit: 'resize' where the box is resampled to the cube, 'crop' where its middle is cut or padded.
    """

    shape: tuple[int, ...]
    box: tuple[slice, ...]
    edge: int
    fit: str

    @classmethod
    def around(cls, images: Tensor, edge: int, fit: str) -> Self:
        """Return the cube around what is not background, -1, in one of the images (C, D, H, W)."""
        box = generate_spatial_bounding_box(images, select_fn=lambda values: values > -1)
        slices = tuple(slice(start, end) for start, end in zip(*box, strict=True))
        return cls(tuple(images.shape[1:]), slices, edge, fit)

    def cut(self, volume: Tensor, background: float, mode: str) -> Tensor:
        """Return the cube (C, e, e, e) of a volume (C, D, H, W), resampled in torch's interpolation
        `mode`."""
        within = volume[(slice(None), *self.box)]
        if self.fit == "crop":
            return _plain(ResizeWithPadOrCrop(self.edge, constant_values=background)(within))
        cube = _plain(SpatialPad(max(within.shape[1:]), value=background)(within))
        return functional.interpolate(cube[None], size=(self.edge,) * 3, mode=mode)[0]

    def placed(self, cube: Tensor, background: float) -> Tensor:
        """Return the volume (1, D, H, W) of a cube (1, e, e, e), with the background where the cube has
        nothing. What was resampled is resampled back trilinearly."""
        volume = torch.full((1, *self.shape), background, dtype=cube.dtype)
        within = volume[(slice(None), *self.box)]
        # The numbers of the voxels take the same way as the voxels did, so that it need not be known here how
        # MONAI rounds. float64 has every number up to 2^53.
        numbers = torch.arange(within.numel(), dtype=torch.float64).reshape(within.shape)
        if self.fit == "crop":
            moved, values = ResizeWithPadOrCrop(self.edge, constant_values=-1)(numbers), cube
        else:
            longest = max(within.shape[1:])
            moved = SpatialPad(longest, value=-1)(numbers)
            values = functional.interpolate(cube[None], size=(longest,) * 3, mode="trilinear")[0]
        source = _plain(moved).long()
        filled = within.flatten()
        filled[source[source >= 0]] = values[source >= 0]
        volume[(slice(None), *self.box)] = filled.reshape(within.shape)
        return volume


def _plain(image: Any) -> Tensor:
    tensor: Tensor = convert_to_tensor(image, track_meta=False)
    return tensor
