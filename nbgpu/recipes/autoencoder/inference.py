"""Passes whole volumes through a trained autoencoder in overlapping windows, which the ranks share."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal, cast

import nibabel
import numpy as np
import torch
import torch.distributed as dist
from monai.inferers.utils import sliding_window_inference
from monai.networks.nets import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.volumes import READ_ERRORS, check_headers, first_line
from nbgpu.engine.group.consensus import together
from nbgpu.engine.workload.recipe import file_stems
from nbgpu.errors import ConfigError, DataError
from nbgpu.planning.volume_files import SUFFIXES, find_volumes
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.reading import VolumeReader, mni152, scaled, source_affine, volume_item
from nbgpu.recipes.image_quality import psnr_db
from nbgpu.recipes.phantoms import phantom
from nbgpu.recipes.trained import load_trained
from nbgpu.run_folder import folder as runs

INDEX = "latents.json"
_WINDOWS_PER_BATCH = 4


@dataclass(frozen=True)
class Encoded:
    """The files and the quality of one encoded volume."""

    name: str
    """The volume's file, 'mni152' or 'phantom N'."""
    latent: str
    """File in the output folder: float32, (channels, right, front, top), the means and not samples."""
    reconstruction: str
    """File in the output folder: NIfTI in the volume's place; its values are those of `intensities`."""
    psnr_db: float
    """The PSNR of the reconstruction, over all voxels."""


@dataclass(frozen=True)
class Latents:
    """The content of `latents.json`."""

    run: str
    scale_factor: float
    """1 / the standard deviation of all latent values. Latents multiplied by this factor have variance 1,
    which diffusion models expect (Rombach et al., CVPR 2022)."""
    voxels_per_latent: int
    """The number of voxels per latent voxel along each axis. A volume is padded with 0 at its far ends to a
    multiple of it."""
    volumes: tuple[Encoded, ...]
    intensities: Literal["unit", "own"] = "unit"
    """The values of the reconstructions: 0 to 1, on axes to the right, front and top; or those of the
    volumes, on the volumes' own grids, as `nbgpu predict` writes them."""
    spacing_mm: tuple[float, ...] = ()
    """The size of the voxels that were encoded, to the right, front and top; empty for those of each
    volume."""


@torch.no_grad()
def reconstruct_volume(
    network: AutoencoderKL,
    volume: Tensor,
    window: int | Sequence[int],
    *,
    overlap: float = 0.25,
    rank: int = 0,
    world_size: int = 1,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (reconstruction, latent) of a whole volume, the same on every rank. With several ranks this is
    a collective.

    Windows of the size that the network was trained on are blended by MONAI's `sliding_window_inference`,
    with weights that fall off towards their borders. Each rank computes its share of the windows, and the
    results are added up.

    Args:
        network: the network on the volume's device and with its dtype, in `eval` mode.
        volume: (C, D, H, W), values 0 to 1.
        window: edge of the windows in voxels, or one for each axis; multiples of the edge of a latent voxel.
        overlap: the overlap of two windows, as a share of their edges, from 0 to below 1.
        rank, world_size: this rank, and the number of ranks that share the windows.
        first: the rank that computes the first window.

    Returns:
        The reconstruction (C, D, H, W), clipped to 0..1, and the latent (channels, d, h, w) of the volume,
        which is padded at its ends to whole latent voxels and to at least one window.
    """
    shrink = 2 ** (len(cast("Sequence[int]", network.decoder.channels)) - 1)
    shape = volume.shape[1:]
    edges = (window,) * 3 if isinstance(window, int) else tuple(window)
    # Each axis must hold a whole number of latent voxels and at least one window.
    padding = [
        max(edge, math.ceil(size / shrink) * shrink) - size for size, edge in zip(shape, edges, strict=True)
    ]
    # torch takes the padding before and after, of the last axis first.
    padded = functional.pad(volume, [n for after in reversed(padding) for n in (0, after)])
    # A window must begin at the beginning of a latent voxel, so strides are multiples of `shrink`. 1e-6
    # allows for rounding: 80 * (1 - 0.8) is a little below 16.
    strides = [max(shrink, int(edge * (1 - overlap) + 1e-6) // shrink * shrink) for edge in edges]
    batch_numbers = count(first)

    def predict(windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return (reconstruction, mean latent) of a batch of windows (N, C, p, q, r); zeros if the batch is
        another rank's."""
        # The ranks take the batches in turn. MONAI blends windows with weights that are the same on every
        # rank, so the sum over the ranks, with zeros for the batches of others, is the whole result.
        if next(batch_numbers) % world_size == rank:
            mean, _ = network.encode(windows)
            return network.decode(mean).clamp(0, 1), mean
        latent_shape = (len(windows), network.latent_channels, *(edge // shrink for edge in edges))
        return torch.zeros_like(windows), windows.new_zeros(latent_shape)

    blended = sliding_window_inference(
        padded[None],
        edges,
        # With several ranks a batch has one window, so that the ranks get equal numbers of windows.
        1 if world_size > 1 else _WINDOWS_PER_BATCH,
        predict,
        # MONAI computes the stride as edge * (1 - overlap), rounded down. Half a voxel more keeps
        # floating-point errors from making it one voxel shorter.
        overlap=[
            1 - (stride + 0.5) / edge if stride < edge else 0.0
            for stride, edge in zip(strides, edges, strict=True)
        ],
        mode="gaussian",
    )
    assert isinstance(blended, tuple)
    if world_size > 1:
        for tensor in blended:
            dist.all_reduce(tensor)
    reconstruction, latent = blended
    return reconstruction[0, :, : shape[0], : shape[1], : shape[2]], latent[0]


def encode_volumes(
    run_folder: str | Path,
    out: str | Path,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    *,
    data: str | None = None,
    which: Literal["newest", "best"] = "newest",
    window: int | Sequence[int] | None = None,
    overlap: float = 0.25,
    max_volumes: int | None = None,
) -> Latents:
    """Write latents and reconstructions of whole volumes.

    All ranks call this function with the same arguments, in a distributed cell; a single process needs no
    process group.

    Args:
        run_folder: the folder of a run of the recipe `autoencoder`.
        out: the output folder, which is created. All ranks share the windows of each volume, and take turns
            writing.
        rank, world_size, device: this rank, the number of ranks, and this rank's device.
        data: data as in the recipe's setting; by default the data of the run. Files are not cropped.
        which: the checkpoint: the newest intact one, or the one with the best validation result.
        window: edge of the windows in voxels, or one for each axis; by default the run's `patch_size`.
        overlap: the overlap of two windows, as a share of their edge.
        max_volumes: the largest number of volumes; the first ones are taken.

    Raises:
        ConfigError: the run is of another recipe, `window` does not fit the network, or `max_volumes` is
            below 1.
        DataError: on every rank; the message names all files with a bad header before the first is encoded,
            or one file with bad voxels.
        RunError: the run has no such checkpoint.
    """
    folder, out = Path(run_folder).absolute(), Path(out).absolute()
    _, config = runs.read_settings(folder)
    if not isinstance(config, AutoencoderConfig):
        raise ConfigError(f"{folder} is a run of the recipe {config.recipe!r}, and 'autoencoder' is needed")
    shrink = config.voxels_per_latent
    window = config.patch if window is None else window
    edges = (window,) * 3 if isinstance(window, int) else tuple(window)
    if len(edges) != 3 or any(n < shrink or n % shrink for n in edges) or not 0 <= overlap < 1:
        raise ConfigError(
            f"window={window} must be a multiple of {shrink} (one number, or three), and overlap={overlap} from 0 to "
            "below 1"
        )
    if max_volumes is not None and max_volumes < 1:
        raise ConfigError(f"max_volumes={max_volumes} must be 1 or more")
    network = load_trained(folder, which).to(device)
    assert isinstance(network, AutoencoderKL)
    dtype = next(network.parameters()).dtype
    items = _items(config, data)[:max_volumes]
    stems = file_stems([str(item["name"]) for item in items], SUFFIXES)
    out.mkdir(parents=True, exist_ok=True)
    encoded, num_values, total, squares = [], 0, 0.0, 0.0
    # Every rank reads every volume, because the windows of a volume are shared among all ranks. `first` gives
    # the first window to another rank for each volume, which balances the ranks if volumes have few windows.
    for index, (item, stem) in enumerate(zip(items, stems, strict=True)):
        read = partial(_volume, item, config)
        # If one rank fails to read, all raise: the others would wait in the next collective for ever.
        volume = together(read) if world_size > 1 else read()
        reconstruction, latent = reconstruct_volume(
            network,
            volume.to(device, dtype),
            window,
            overlap=overlap,
            rank=rank,
            world_size=world_size,
            first=index,
        )
        reconstruction, latent = reconstruction.float().cpu(), latent.float().cpu()
        values = latent.double()
        num_values += values.numel()
        total += float(values.sum())
        squares += float(values.square().sum())
        record = Encoded(
            name=str(item["name"]),
            latent=f"{stem}.latent.npy",
            reconstruction=f"{stem}.reconstruction.nii.gz",
            psnr_db=round(float(psnr_db(reconstruction[None], volume[None])), 3),
        )
        encoded.append(record)
        if index % world_size == rank:
            np.save(out / record.latent, latent.numpy())
            if "image" in item:
                reconstruction = VolumeReader.of(config).onto_own_grid(reconstruction, item["image"])
            # NIfTI has the channels last.
            voxels = reconstruction[0] if len(reconstruction) == 1 else reconstruction.movedim(0, -1)
            image = nibabel.Nifti1Image(voxels.numpy(), source_affine(item.get("image")))
            nibabel.save(image, out / record.reconstruction)
    # The variance over all volumes from sums, without keeping their latents.
    variance = squares / num_values - (total / num_values) ** 2
    scale_factor = 1 / math.sqrt(max(variance, 1e-12))
    latents = Latents(str(folder), scale_factor, shrink, tuple(encoded), spacing_mm=config.spacing_mm)
    if rank == 0:
        (out / INDEX).write_text(json.dumps(asdict(latents), indent=2) + "\n")
    return latents


def _items(config: AutoencoderConfig, data: str | None) -> list[Item]:
    """Return an Item for each volume that `data` names, by default that of the run. Headers of files are
    checked here, so that all bad ones are reported before the first volume is encoded."""
    source = config.data if data is None else data
    if source == "phantoms":
        return [{"name": f"phantom {i}", "phantom": i} for i in range(config.num_phantoms)]
    if source == "mni152":
        return [{"name": "mni152", "image": mni152()}]
    paths = find_volumes(source).everything
    check_headers(paths, 1, spacing_mm=config.spacing_mm, channels=config.image_channels)
    return [volume_item(path) for path in paths]


def _volume(item: Item, config: AutoencoderConfig) -> Tensor:
    """Generate a phantom or read a file and scale each channel to 0..1: (C, right, front, top). Empty margins
    are kept, because the latent has to cover the whole file."""
    if "phantom" in item:
        return phantom(config.patch, config.split_seed, item["phantom"])
    name = str(item["name"])
    try:
        image = VolumeReader.of(config).read(item["image"], name)
    except READ_ERRORS as error:
        raise DataError(f"{name}: cannot be read: {first_line(error)}") from None
    return scaled(image, name)
