"""Reads volumes with the channels and the voxel size of the settings, and prepares them for the drawing of
patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from monai.transforms import Compose, CropForeground, SpatialPad, Transform
from monai.utils import convert_to_tensor
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.sampling import FOREGROUND
from nbgpu.engine.data.spacing import affine_of, resampled, resampled_grid, resampled_onto, shape_of
from nbgpu.engine.data.volumes import header_problem, load_volume, require_finite, scale_intensity
from nbgpu.errors import DataError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.phantoms import phantom

Source = Path | Tensor
"""A NIfTI file, or a volume (1, right, front, top) with voxels of 1 mm."""


@dataclass(frozen=True)
class VolumeReader:
    """Reads volumes from files, and brings results back onto the grids of the files."""

    channels: tuple[int, ...] = ()
    """The numbers of the channels to read, from 0; none for files that have one."""
    spacing_mm: tuple[float, ...] = ()
    """The voxel size along the axes right, front and top; none for that of each file."""

    @classmethod
    def of(cls, config: AutoencoderConfig) -> VolumeReader:
        """Return the reader that the settings describe."""
        return cls(config.image_channels, config.spacing_mm)

    def problem(self, path: Path, patch: Sequence[int] = (1, 1, 1)) -> str | None:
        """Return why a file cannot be used, judged by its name, header and size; None if it can."""
        return header_problem(path, patch, spacing_mm=self.spacing_mm, channels=self.channels)

    def read(self, source: Source, name: str) -> Tensor:
        """Return the volume as float32 (C, right, front, top), with its own intensities.

        Raises:
            DataError: voxels are NaN or infinite. Errors of `load_volume` are raised unchanged.
        """
        image = load_volume(source, self.channels) if isinstance(source, Path) else source
        if not self.spacing_mm:
            return image
        # Interpolation would spread NaN and infinite voxels to their neighbours.
        require_finite(image, name)
        return resampled(image, source_affine(source), self.spacing_mm)[0]

    def onto_own_grid(self, volume: Tensor, source: Source) -> Tensor:
        """Resample a volume (C, right, front, top) from the voxel size of the settings back to the grid of
        its source."""
        if not self.spacing_mm:
            return volume
        shape = shape_of(source) if isinstance(source, Path) else tuple(source.shape[1:])
        _, affine = resampled_grid(shape, source_affine(source), self.spacing_mm)
        return resampled_onto(volume, affine, shape, source_affine(source))


def scaled(image: Tensor, name: str) -> Tensor:
    """Scale each channel of an image (C, D, H, W) to 0..1: its smallest value becomes 0, its 99.5th
    percentile 1, and larger values are clipped."""
    labels = channel_labels(image, name)
    return torch.cat(
        [scale_intensity(channel[None], label) for channel, label in zip(image, labels, strict=True)]
    )


def channel_labels(image: Tensor, name: str) -> list[str]:
    """Return the name of each channel of an image (C, D, H, W), for messages."""
    return [name] if len(image) == 1 else [f"{name}, image channel {index}" for index in range(len(image))]


def source_affine(source: Source | None) -> np.ndarray:
    """Return the affine matrix (4, 4) from voxel indices to mm, for axes to the right, front and top; the
    identity for a volume without a file."""
    return affine_of(source) if isinstance(source, Path) else np.eye(4)


@dataclass(eq=False)
class Prepare(Transform):
    """The deterministic transform from an Item to {"image": (C, D, H, W), FOREGROUND}, whose results are
    cached."""

    reader: VolumeReader
    patch_size: tuple[int, ...]
    seed: int
    val_fraction: float
    test_fraction: float = 0.0

    def __call__(self, item: Item) -> dict[str, Tensor]:
        """Generate a phantom; or read a volume, scale it to 0..1, crop its empty margins, and cut out the
        part that the Item names.

        Returns:
            `image`, (C, D, H, W), at least as large as a patch. For a volume that is read also FOREGROUND:
            the flat indices (K,) of the voxels that are brighter than the mean in at least one channel.
            Patches are drawn around them.
        """
        if "phantom" in item:
            return {"image": phantom(self.patch_size, self.seed, item["phantom"])}
        image = self.reader.read(item["image"], item["name"])
        # Built for each call, because these transforms have state and volumes are decoded in several threads.
        crop = Compose([CropForeground(), SpatialPad(self.patch_size)])
        image = convert_to_tensor(crop(scaled(image, item["name"])), track_meta=False)
        if "part" in item:
            image = self._cut(image, item)
        is_bright = (image > image.mean(dim=(1, 2, 3), keepdim=True)).any(dim=0)
        return {"image": image, FOREGROUND: is_bright.flatten().nonzero().flatten().int()}

    def _cut(self, image: Tensor, item: Item) -> Tensor:
        """Return one part of a single volume, so that training and held-out patches share no voxel. The parts
        for training, validation and test follow each other along the longest axis; each part is at least as
        long as a patch."""
        axis = max((1, 2, 3), key=lambda a: image.shape[a])
        edge = self.patch_size[axis - 1]
        length = image.shape[axis]
        shares = {"validation": self.val_fraction, "test": self.test_fraction}
        setting_of = {"validation": "val_fraction", "test": "test_fraction"}
        no_parts = " and ".join(f"{setting_of[name]}=0" for name, share in shares.items() if share)
        held_out = {name: max(edge, round(share * length)) if share else 0 for name, share in shares.items()}
        num_parts = 1 + sum(share > 0 for share in shares.values())
        if length < num_parts * edge:
            raise DataError(
                f"{item['name']}: is one volume of {length} voxels along its longest axis (without empty margins), "
                f"too short for {num_parts} parts of {edge} voxels each. Lower patch_size, give a second volume, or set {no_parts}"
            )
        # Shorten the larger held-out part until at least one patch is left to train on.
        while sum(held_out.values()) > length - edge:
            held_out[max(held_out, key=lambda name: held_out[name])] -= 1
        sizes = {"training": length - sum(held_out.values()), **held_out}
        part = dict(zip(sizes, torch.split(image, list(sizes.values()), dim=axis), strict=True))[item["part"]]
        if part.min() == part.max():
            raise DataError(
                f"{item['name']}: is one volume, and its {item['part']} part is empty. Give a second volume, or set {no_parts}"
            )
        return part.contiguous()


def volume_item(path: Path) -> Item:
    """Return the Item of a file, which is named by its path."""
    return {"name": str(path), "image": path}


def mni152() -> Tensor:
    """Return nilearn's T1 template at 1 mm, without the skull: (1, 197, 233, 189), axes to the right, front
    and top."""
    try:
        from nilearn.datasets import load_mni152_template
    except ModuleNotFoundError:
        raise DataError(
            "mni152: the template comes with nilearn, which is not installed. Run: pip install 'nbgpu[samples]', "
            "or set data to 'phantoms' or to a path"
        ) from None
    return torch.from_numpy(load_mni152_template(resolution=1).get_fdata(dtype=np.float32))[None]
