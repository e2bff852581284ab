"""Reads volumes as the settings ask for: which of a file's channels, and with which voxel size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nbgpu.engine.data.spacing import affine_of, resampled, resampled_grid, resampled_onto, shape_of
from nbgpu.engine.data.volumes import header_problem, load_volume, require_finite, scale_intensity
from nbgpu.recipes.autoencoder.config import AutoencoderConfig

Source = Path | Tensor
"""A NIfTI file, or a volume (1, right, front, top) with voxels of 1 mm."""


class VolumeReader:
    """Reads volumes from files, and brings results back onto the grids of the files.

    Args:
        channels: the numbers of the channels to read, from 0; none for files that have one.
        spacing_mm: the voxel size along the axes right, front and top; none for that of each file.
    """

    def __init__(self, channels: Sequence[int] = (), spacing_mm: Sequence[float] = ()) -> None:
        self.channels = tuple(channels)
        self.spacing_mm = tuple(spacing_mm)

    @classmethod
    def of(cls, config: AutoencoderConfig) -> VolumeReader:
        """Return the reader that the settings describe."""
        return cls(config.image_channels, config.spacing_mm)

    def problem(self, path: Path, patch: Sequence[int] = (1, 1, 1)) -> str | None:
        """Return the problem of a file, see `header_problem`; None if there is none."""
        return header_problem(path, patch, spacing_mm=self.spacing_mm, channels=self.channels)

    def read(self, source: Source, name: str) -> Tensor:
        """Return the volume as float32 (C, right, front, top), with its own intensities.

        Raises:
            DataError: voxels are NaN or infinite. Errors of `load_volume` are raised unchanged.
        """
        image = load_volume(source, self.channels) if isinstance(source, Path) else source
        if not self.spacing_mm:
            return image
        # Interpolation would spread them.
        require_finite(image, name)
        return resampled(image, _affine(source), self.spacing_mm)[0]

    def onto_own_grid(self, volume: Tensor, source: Source) -> Tensor:
        """Return a volume (C, right, front, top) like those of `read` with the voxels of its source."""
        if not self.spacing_mm:
            return volume
        shape = shape_of(source) if isinstance(source, Path) else tuple(source.shape[1:])
        _, affine = resampled_grid(shape, _affine(source), self.spacing_mm)
        return resampled_onto(volume, affine, shape, _affine(source))


def scaled(image: Tensor, name: str) -> Tensor:
    """Scale each channel of an image (C, D, H, W) to 0..1; see `scale_intensity`."""
    return torch.cat(
        [scale_intensity(one[None], label) for one, label in zip(image, labels(image, name), strict=True)]
    )


def labels(image: Tensor, name: str) -> list[str]:
    """Return what messages call each channel of an image (C, D, H, W)."""
    return [name] if len(image) == 1 else [f"{name}, image channel {index}" for index in range(len(image))]


def _affine(source: Source) -> np.ndarray:
    return affine_of(source) if isinstance(source, Path) else np.eye(4)
