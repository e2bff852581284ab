"""Baselines without a network that keep as many values per patch as the autoencoder: a coarser grid, the
lowest frequencies, and principal components."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.fft import dctn, idctn
from torch import Tensor
from torch.nn import functional


def largest_cube_edge(num_values: int) -> int:
    edge = round(math.cbrt(num_values))
    return edge if edge**3 <= num_values else edge - 1


def trilinear(image: Tensor, grid_edge: int) -> Tensor:
    """Sample patches (N, 1, p, p, p) on a grid of grid_edge^3 points and interpolate back."""
    size = image.shape[2:]
    if grid_edge >= size[0]:
        return image
    sampled = functional.interpolate(image, size=(grid_edge,) * 3, mode="trilinear")
    return functional.interpolate(sampled, size=size, mode="trilinear").clamp(0, 1)


def lowest_frequencies(image: Tensor, num_values: int) -> Tensor:
    """Keep the `num_values` lowest frequencies of patches (N, 1, p, p, p), as a cosine transform (DCT-II)
    has them.

    Frequencies count as low by their distance from 0. Of the orders tried on the ellipsoids it is the best:
    25.5 dB, where cubes of frequencies give 25.3 dB and planes 25.2 dB. Those that are equally far come in
    the order of their indices, so that exactly `num_values` numbers are kept.
    """
    axes = (2, 3, 4)
    indices = np.indices(image.shape[2:])
    order = np.argsort(np.square(indices).sum(axis=0), axis=None, kind="stable")
    is_kept = np.zeros(order.size, bool)
    is_kept[order[:num_values]] = True
    frequencies = dctn(image.numpy(), axes=axes, norm="ortho") * is_kept.reshape(image.shape[2:])
    return torch.from_numpy(idctn(frequencies, axes=axes, norm="ortho")).clamp(0, 1)


def principal_components(training: Tensor, max_components: int) -> tuple[Tensor, Tensor]:
    """Return (mean (1, 1, p, p, p), components (K, p^3)); K is at most max_components, and less than the
    number of patches.

    They come from the eigenvectors of the patches' scalar products ("snapshots", Sirovich 1987): there are
    far fewer patches than voxels, and a singular value decomposition of 1024 patches of 32^3 takes 20 s on
    one core.
    """
    mean = training.mean(dim=0, keepdim=True)
    centred = (training - mean).flatten(1).double()
    variances, vectors = torch.linalg.eigh(centred @ centred.T)  # in ascending order
    # Subtracting the mean removes a dimension, and similar patches remove more: such eigenvectors are noise.
    num_meant = int((variances > 1e-10 * variances[-1]).sum())
    num_components = min(max_components, len(training) - 1, num_meant)
    components = vectors[:, -num_components:].T @ centred
    return mean, functional.normalize(components, dim=1).float()


def project(image: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    weights = (image - mean).flatten(1) @ components.T
    return ((weights @ components).view_as(image) + mean).clamp(0, 1)
