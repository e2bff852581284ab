"""Compares an autoencoder, on held-out patches, with baselines without a network that keep at most as many
values: a coarser grid, the lowest frequencies, and principal components."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from scipy.fft import dctn, idctn
from torch import Tensor
from torch.nn import functional

from nbgpu.recipes import verdict
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.image_quality import psnr_db, ssim


def finest_grid(shape: Sequence[int], num_values: int) -> tuple[int, int, int]:
    """Return the shape of the finest grid with at most `num_values` points (at least 1) over a volume of this
    shape, with points about equally far apart along all axes."""
    best = (1, 1, 1)
    # Every density, in points per voxel, at which an axis gets one point more, in ascending order.
    for density in sorted({Fraction(n, edge) for edge in shape for n in range(1, edge + 1)}):
        first, second, third = (max(1, math.floor(edge * density)) for edge in shape)
        if first * second * third > num_values:
            break
        best = (first, second, third)
    return best


def trilinear(image: Tensor, grid: Sequence[int]) -> Tensor:
    """Sample patches (N, C, p, q, r) on a coarser grid of this shape, and interpolate them back."""
    size = image.shape[2:]
    if tuple(grid) == tuple(size):
        return image
    sampled = functional.interpolate(image, size=tuple(grid), mode="trilinear")
    return functional.interpolate(sampled, size=size, mode="trilinear").clamp(0, 1)


def lowest_frequencies(image: Tensor, num_values: int) -> Tensor:
    """Filter patches (N, C, p, q, r) with an ideal low-pass filter: keep the `num_values` coefficients of the
    3D cosine transform (DCT-II) with the lowest spatial frequencies, and set the others to 0.

    Frequencies count as low by their distance from 0, in periods per voxel. Among the orders tried on the
    ellipsoids this one is the best: 25.5 dB, where cubes of frequencies give 25.3 dB and planes 25.2 dB.
    Coefficients that are equally far are taken in the order of their indices, so that exactly `num_values`
    are kept.
    """
    axes = (2, 3, 4)
    # Coefficient k along an axis of n voxels has k / 2n periods per voxel, which is proportional to k * lcm /
    # n. These are whole numbers, so that equal distances are equal to the last bit.
    common = math.lcm(*image.shape[2:])
    weights = np.array([common // edge for edge in image.shape[2:]]).reshape(3, 1, 1, 1)
    distances = np.square(np.indices(image.shape[2:]) * weights).sum(axis=0)
    order = np.argsort(distances, axis=None, kind="stable")
    is_kept = np.zeros(order.size, bool)
    is_kept[order[:num_values]] = True
    frequencies = dctn(image.numpy(), axes=axes, norm="ortho") * is_kept.reshape(image.shape[2:])
    return torch.from_numpy(idctn(frequencies, axes=axes, norm="ortho")).clamp(0, 1)


def principal_components(training: Tensor, max_components: int) -> tuple[Tensor, Tensor]:
    """Return the mean (1, C, p, q, r) of patches (N, C, p, q, r) and their principal components
    (K, C*p*q*r), where K is at most max_components and less than N.

    The components are computed from the eigenvectors of the patches' scalar products ("snapshots", Sirovich
    1987), because there are far fewer patches than voxels: a singular value decomposition of 1024 patches of
    32^3 takes 20 s on one core.
    """
    mean = training.mean(dim=0, keepdim=True)
    centred = (training - mean).flatten(1).double()
    variances, vectors = torch.linalg.eigh(centred @ centred.T)  # in ascending order
    # Subtracting the mean removes a dimension, and similar patches remove more: such eigenvectors are noise.
    num_above_noise = int((variances > 1e-10 * variances[-1]).sum())
    num_components = min(max_components, len(training) - 1, num_above_noise)
    components = vectors[:, -num_components:].T @ centred
    return mean, functional.normalize(components, dim=1).float()


def project(image: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    """Return the orthogonal projection of patches (N, C, p, q, r) onto the principal components, clipped to
    0..1."""
    weights = (image - mean).flatten(1) @ components.T
    return ((weights @ components).view_as(image) + mean).clamp(0, 1)


def compared(
    config: AutoencoderConfig, image: Tensor, reconstruction: Tensor, fitted_on: Tensor
) -> tuple[dict[str, dict[str, float]], str]:
    """Measure the PSNR in dB and the SSIM of the autoencoder and of each baseline on held-out patches; return
    ({method: {"psnr_db", "ssim"}}, a note that compares the autoencoder with the best baseline).

    The coarser grid and the cosine transform divide the number of values equally among the channels.

    Args:
        config: the settings, which say how many values the autoencoder keeps.
        image: held-out patches (N, C, p, q, r), values 0 to 1.
        reconstruction: the autoencoder's output for them, of the same shape.
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
    num_dct = per_channel * num_channels
    keep = (
        f"the autoencoder and the DCT keep {num_latent} numbers"
        if num_dct == num_latent
        else f"the autoencoder keeps {num_latent} numbers, the DCT {num_dct}"
    )
    times = f"{num_channels} x " if num_channels > 1 else ""
    note = (
        f"{_verdict(gains_db, best)}, on {len(image)} held-out patches of {_edges_in_words(config.patch)} voxels. For each patch {keep}, trilinear "
        f"sampling {times}{_edges_in_words(grid)} = {num_channels * math.prod(grid)}, PCA {len(components)}"
    )
    if len(components) < num_latent:
        note += f" (no more, because it was fitted on {len(fitted_on)} training patches)"
    return table, f"{note}."


def _verdict(gains_db: np.ndarray, best: str) -> str:
    """Return a sentence that names the better method and the 95 % interval of the gain.

    Args:
        gains_db: the autoencoder's PSNR minus that of the best baseline, in dB for each patch (N,).
        best: the name of the best baseline.
    """
    if sentence := verdict.too_few(len(gains_db), "patches"):
        return sentence
    gain_db, (low_db, high_db) = float(gains_db.mean()), verdict.mean_interval(gains_db)
    interval = f"(95 % interval over patches {low_db:.1f} to {high_db:.1f} dB)"
    if low_db <= 0 <= high_db:
        return f"Not decided between the autoencoder and '{best}': {gain_db:+.1f} dB {interval}"
    if gain_db > 0:
        return f"The autoencoder is best, by {gain_db:.1f} dB {interval}"
    return f"'{best}' is best; the autoencoder is {-gain_db:.1f} dB below it {interval}"


def _edges_in_words(edges: Sequence[int]) -> str:
    """Return '16^3' for a cube, and '16 x 24 x 8' for other volumes."""
    return f"{edges[0]}^3" if len({*edges}) == 1 else " x ".join(map(str, edges))
