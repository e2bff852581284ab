"""Random changes of samples, as MONAI's dictionary transforms: the same change for all images of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from monai.transforms import (
    Compose,
    OneOf,
    RandFlipd,
    RandRotate90d,
    RandScaleIntensityd,
    RandShiftIntensityd,
)

from nbgpu.config import DataSettings


def augmentation(
    config: DataSettings, keys: Sequence[str], spatial_size: Sequence[int], intensity_keys: Sequence[str] = ()
) -> Compose:
    """Return the augmentation that the settings ask for; an empty Compose if they ask for none.

    Args:
        config: the settings, of which `rotate90_prob`, `flip_prob`, `intensity_prob` and `intensity_strength`
            are used.
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
