"""Crops and augments decoded volumes: a visit to a volume gives random patches of it, or all of it.

Each visit has a seed of its own, so that it gives the same samples wherever and whenever it is made: in the
rank's thread or in any of its worker processes, with or without a cache. The transforms are MONAI's for
dictionaries, which change all images of a sample alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from monai.transforms import (
    Compose,
    OneOf,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandRotate90d,
    RandScaleIntensityd,
    RandShiftIntensityd,
    ToDeviced,
)
from monai.utils import convert_to_tensor
from torch import Tensor

from nbgpu.config import DataSettings


def augmentation(
    config: DataSettings, keys: Sequence[str], spatial_size: Sequence[int], intensity_keys: Sequence[str] = ()
) -> Compose:
    """Return the random transforms that the settings choose; an empty Compose if they choose none.

    Args:
        config: its `rotate90_prob`, `flip_prob`, `intensity_prob` and `intensity_strength`.
        keys: images of one sample that are turned and mirrored together, such as an image and its label.
        spatial_size: the size of each image, (D, H, W) or (H, W). Rotations are only in planes with equal
            edges, so that samples keep their shape.
        intensity_keys: the keys whose intensities may be changed, which a label's may not. None by default.
    """
    steps: list[RandFlipd | OneOf | RandScaleIntensityd | RandShiftIntensityd] = []
    planes = [
        (a, b) for a, b in combinations(range(len(spatial_size)), 2) if spatial_size[a] == spatial_size[b]
    ]
    if config.rotate90_prob > 0 and planes:
        prob = config.rotate90_prob
        # At most one of these rotations is done, so that `rotate90_prob` is the probability of a rotation.
        steps.append(OneOf([RandRotate90d(keys, prob=prob, spatial_axes=plane) for plane in planes]))
    if config.flip_prob > 0:
        steps += [
            RandFlipd(keys, prob=config.flip_prob, spatial_axis=axis) for axis in range(len(spatial_size))
        ]
    if config.intensity_prob > 0 and intensity_keys:
        strength, prob = config.intensity_strength, config.intensity_prob
        steps.append(RandScaleIntensityd(intensity_keys, factors=strength, prob=prob))
        steps.append(RandShiftIntensityd(intensity_keys, offsets=strength, prob=prob))
    return Compose(steps)


Sample = dict[str, Tensor]
"""Tensors by name, without the batch dimension."""

FOREGROUND = "foreground"
"""The key of a decoded volume's flat indices of voxels on which patches may be centred."""


class Draw:
    """Draws the samples of a decoded volume.

    With a `patch_size` they are `samples_per_volume` patches of `keys`, all cut out at the same places:
    centred on random voxels of FOREGROUND, and moved inside the volume. A volume without such indices is a
    single sample. Other tensors of the volume (a label, a time) are added to each sample unchanged.

    Args:
        keys: the volume's images, each (C, D, H, W) or (C, H, W), all of the same size.
        patch_size: edge in voxels, or one for each axis; None takes the whole volume.
        samples_per_volume: the number of patches; used with a `patch_size`.
        augment: the random changes of a sample, see `augmentation`.
    """

    def __init__(
        self,
        keys: Sequence[str] = ("image",),
        *,
        patch_size: int | Sequence[int] | None = None,
        samples_per_volume: int = 1,
        augment: Compose | None = None,
    ) -> None:
        assert samples_per_volume == 1 or patch_size is not None, "a whole volume is one sample"
        self.keys = tuple(keys)
        self.samples_per_volume = samples_per_volume
        self._augment = augment or Compose([])
        self._to_device: ToDeviced | None = None
        self._crop = None
        if patch_size is not None:
            # The label only gives the shape; with neg=0 no patch is centred on the background.
            self._crop = RandCropByPosNegLabeld(
                self.keys,
                label_key=self.keys[0],
                spatial_size=patch_size,
                pos=1,
                neg=0,
                num_samples=samples_per_volume,
                fg_indices_key=FOREGROUND,
                bg_indices_key="background",
            )

    def on(self, device: torch.device) -> None:
        """Crop and augment images on this device from now on."""
        self._to_device = ToDeviced(self.keys, device=device)

    def __call__(self, volume: Mapping[str, Any], seed: np.random.SeedSequence) -> list[Sample]:
        """Return the samples of one visit: `samples_per_volume` patches or the whole volume."""
        crop_seed, augment_seed = (int(number) for number in seed.generate_state(2))
        tensors: dict[Hashable, Tensor] = {
            n: value for n, value in volume.items() if isinstance(value, Tensor)
        }
        if self._to_device is not None:
            tensors = self._to_device(tensors)
        foreground = tensors.pop(FOREGROUND, None)
        samples = [tensors]
        if self._crop is not None and foreground is not None:
            self._crop.set_random_state(crop_seed)
            # MONAI computes both lists of indices from the label if one of them is missing.
            samples = self._crop({**tensors, FOREGROUND: foreground, "background": foreground})
        if self._augment.transforms:
            self._augment.set_random_state(augment_seed)
            samples = [self._augment(sample) for sample in samples]
        return [
            {str(name): convert_to_tensor(value, track_meta=False) for name, value in sample.items()}
            for sample in samples
        ]
