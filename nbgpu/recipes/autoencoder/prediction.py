"""Encodes and reconstructs a person's volumes, each on its own grid and in its own intensities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from monai.networks.nets import AutoencoderKL
from torch import Tensor

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.volumes import READ_ERRORS, first_line, intensity_range, save_like
from nbgpu.engine.workload.recipe import Predicted
from nbgpu.errors import DataError
from nbgpu.planning.volume_files import find_volumes
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.inference import INDEX, Encoded, Latents, reconstruct_volume
from nbgpu.recipes.autoencoder.reading import VolumeReader, channel_labels, mni152, scaled, volume_item
from nbgpu.recipes.image_quality import psnr_db
from nbgpu.recipes.phantoms import phantom
from nbgpu.run_folder.predictions import Job, Row

_NUM_GENERATED = 8


def new_volumes(config: AutoencoderConfig, data: str) -> tuple[list[Item], list[str]]:
    """Return the volumes that `data` names, and a line for each file that is bad by its name or header."""
    if data == "phantoms":
        numbers = range(config.num_phantoms, config.num_phantoms + _NUM_GENERATED)
        return [{"name": f"phantom {number}", "phantom": number} for number in numbers], []
    if data == "mni152":
        return [{"name": "mni152", "image": mni152()}], []
    paths = find_volumes(data).everything
    reader = VolumeReader.of(config)
    problems = {path: problem for path in paths if (problem := reader.problem(path)) is not None}
    items = [volume_item(path) for path in paths if path not in problems]
    return items, [f"{path}: {problem}" for path, problem in problems.items()]


def encoded(
    network: AutoencoderKL, device: torch.device, config: AutoencoderConfig, item: Item, stem: Path
) -> Predicted:
    """Encode a volume; write its latent as .npy and its reconstruction as NIfTI, and return the PSNR in dB.

    The latent has the voxel size of the setting `spacing`, and `psnr_db` compares volumes of that voxel size.
    The reconstruction is resampled to the grid of the file and scaled to its intensities; values above their
    99.5th percentile are clipped.

    Raises:
        DataError: the file cannot be decoded, or has no contrast.
    """
    name, source, reader = str(item["name"]), item.get("image"), VolumeReader.of(config)
    image = volume = _voxels(item, config, reader)
    # The intensities of each channel that are scaled to 0 and 1; phantoms have values from 0 to 1 already.
    ranges = [(0.0, 1.0)]
    if source is not None:
        labels = channel_labels(image, name)
        ranges = [intensity_range(channel, label) for channel, label in zip(image, labels, strict=True)]
        volume = scaled(image, name)
    dtype = next(network.parameters()).dtype
    reconstruction, latent = reconstruct_volume(network, volume.to(device, dtype), config.patch)
    reconstruction, latent = reconstruction.float().cpu(), latent.float().cpu()
    paths = [stem.with_name(stem.name + end) for end in (".latent.npy", ".reconstruction.nii.gz")]
    np.save(paths[0], latent.numpy())
    # Undo the scaling to 0..1, separately for each channel.
    low, high = (torch.tensor(ends).reshape(-1, 1, 1, 1) for ends in zip(*ranges, strict=True))
    unscaled = reconstruction * (high - low) + low
    if source is not None:
        unscaled = reader.onto_own_grid(unscaled, source)
    save_like(unscaled, source if isinstance(source, Path) else None, paths[1])
    values = latent.double()
    return Predicted(
        {"psnr_db": round(float(psnr_db(reconstruction[None], volume[None])), 3)},
        paths,
        {
            "num_latents": values.numel(),
            "sum": float(values.sum()),
            "sum_of_squares": float(values.square().sum()),
        },
    )


def write_index(config: AutoencoderConfig, rows: Sequence[Row], job: Job) -> list[str]:
    """Write `latents.json`, with all volumes and the factor that scales their latents to variance 1, and
    return a sentence about this factor.

    The variance is computed from the sums that `encoded` stored with each row, so no latent is read again.
    """
    num_values, total, squares = (
        sum(row.aside[name] for row in rows) for name in ("num_latents", "sum", "sum_of_squares")
    )
    scale_factor = 1 / math.sqrt(max(squares / num_values - (total / num_values) ** 2, 1e-12))
    volumes = tuple(Encoded(row.name, row.files[0], row.files[1], row.values["psnr_db"]) for row in rows)
    latents = Latents(
        job.run_folder,
        scale_factor,
        config.voxels_per_latent,
        volumes,
        intensities="own",
        spacing_mm=config.spacing_mm,
    )
    (Path(job.out) / INDEX).write_text(json.dumps(asdict(latents), indent=2) + "\n")
    return [
        f"{INDEX} has the latents' scale factor, {scale_factor:.4g}: multiplied by it they have variance 1, as a diffusion "
        "model wants them"
    ]


def _voxels(item: Item, config: AutoencoderConfig, reader: VolumeReader) -> Tensor:
    """Generate a phantom or read a file, as (C, right, front, top) with the intensities of the file."""
    if "phantom" in item:
        return phantom(config.patch, config.split_seed, item["phantom"])
    try:
        return reader.read(item["image"], str(item["name"]))
    except READ_ERRORS as error:
        raise DataError(f"{item['name']}: cannot be read: {first_line(error)}. Copy it again") from None
