"""Measures of how close images are to the true images, per sample."""

from __future__ import annotations

from monai.metrics import SSIMMetric
from torch import Tensor


def psnr_db(output: Tensor, image: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each sample in dB, at most 100, for a data range of 1:
    (N, ...) -> (N,)."""
    mse = (output - image).square().flatten(1).mean(dim=1)
    return -10 * mse.clamp_min(1e-10).log10()


def ssim(output: Tensor, image: Tensor) -> Tensor:
    """Return the structural similarity of each sample for a data range of 1: (N, C, p, q, r) -> (N,).

    The measure is that of Wang et al. 2004 with their Gaussian window of 11 voxels, or of 7 for patches
    smaller than 11.
    """
    metric = SSIMMetric(spatial_dims=3, data_range=1.0, win_size=11 if min(image.shape[2:]) >= 11 else 7)
    value = metric(output, image)
    assert isinstance(value, Tensor)
    return value.flatten()
