"""Compares an autoencoder, on held-out patches, with baselines that keep at most as many values per patch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from nbgpu.config import AutoencoderConfig
from nbgpu.recipes import verdict
from nbgpu.recipes.autoencoder.baselines import (
    finest_grid,
    lowest_frequencies,
    principal_components,
    project,
    trilinear,
)
from nbgpu.recipes.image_quality import psnr_db, ssim


def compared(
    config: AutoencoderConfig, image: Tensor, reconstruction: Tensor, fitted_on: Tensor
) -> tuple[dict[str, dict[str, float]], str]:
    """Return ({method: {"psnr_db", "ssim"}}, what they say, in words).

    The coarser grid and the cosine transform keep as many values of each channel.

    Args:
        config: the settings, which say how many values the autoencoder keeps.
        image: held-out patches (N, C, p, q, r), values 0 to 1.
        reconstruction: the autoencoder's, of the same shape.
        fitted_on: training patches (M, C, p, q, r), to which the mean and PCA are fitted.
    """
    num_latent = config.latent_channels * math.prod(config.latent_shape)
    num_channels = image.shape[1]
    per_channel = max(1, num_latent // num_channels)
    grid = finest_grid(config.patch, per_channel)
    mean_image, components = principal_components(fitted_on, num_latent)
    baselines = {
        "trilinear, same number of values": trilinear(image, grid),
        "DCT, same number of values": lowest_frequencies(image, per_channel),
        "PCA, same number of values": project(image, mean_image, components),
        "mean image": mean_image.expand_as(image),
    }
    methods = {"autoencoder": reconstruction, **baselines}
    psnrs_db = {name: psnr_db(output, image).numpy() for name, output in methods.items()}
    table = {
        name: {
            "psnr_db": round(float(psnrs_db[name].mean()), 3),
            "ssim": round(float(ssim(output, image).mean()), 4),
        }
        for name, output in methods.items()
    }
    best = max(baselines, key=lambda name: table[name]["psnr_db"])
    gains_db = psnrs_db["autoencoder"] - psnrs_db[best]
    of_dct = per_channel * num_channels
    keep = (
        f"the autoencoder and the DCT keep {num_latent} numbers"
        if of_dct == num_latent
        else f"the autoencoder keeps {num_latent} numbers, the DCT {of_dct}"
    )
    times = f"{num_channels} x " if num_channels > 1 else ""
    note = (
        f"{_verdict(gains_db, best)}, on {len(image)} held-out patches of {_by(config.patch)} voxels. For each patch {keep}, trilinear "
        f"sampling {times}{_by(grid)} = {num_channels * math.prod(grid)}, PCA {len(components)}"
    )
    if len(components) < num_latent:
        note += f" (no more, because it was fitted on {len(fitted_on)} training patches)"
    return table, f"{note}."


def _verdict(gains_db: np.ndarray, best: str) -> str:
    """Return what the gains over the best baseline say, (N,), one for each patch."""
    if sentence := verdict.too_few(len(gains_db), "patches"):
        return sentence
    gain_db, (low_db, high_db) = float(gains_db.mean()), verdict.mean_interval(gains_db)
    interval = f"(95 % interval over patches {low_db:.1f} to {high_db:.1f} dB)"
    if low_db <= 0 <= high_db:
        return f"Not decided between the autoencoder and '{best}': {gain_db:+.1f} dB {interval}"
    if gain_db > 0:
        return f"The autoencoder is best, by {gain_db:.1f} dB {interval}"
    return f"'{best}' is best; the autoencoder is {-gain_db:.1f} dB below it {interval}"


def _by(edges: Sequence[int]) -> str:
    """Return '16^3' for a cube, and '16 x 24 x 8' for other volumes."""
    return f"{edges[0]}^3" if len({*edges}) == 1 else " x ".join(map(str, edges))
