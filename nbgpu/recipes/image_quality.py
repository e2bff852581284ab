"""How near an image comes to the true one, sample by sample."""

from __future__ import annotations

from monai.metrics import SSIMMetric
from torch import Tensor


def psnr_db(output: Tensor, image: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each sample for a data range of 1, in dB: (N, ...) -> (N,). At most
    100."""
    mse = (output - image).square().flatten(1).mean(dim=1)
    return -10 * mse.clamp_min(1e-10).log10()


def ssim(output: Tensor, image: Tensor) -> Tensor:
    """Structural similarity of each sample for a data range of 1: (N, 1, p, p, p) -> (N,).

    Wang et al. 2004 with their Gaussian window of 11 voxels, or 7 for patches smaller than that.
    """
    metric = SSIMMetric(spatial_dims=3, data_range=1.0, win_size=11 if image.shape[-1] >= 11 else 7)
    value = metric(output, image)
    assert isinstance(value, Tensor)
    return value.flatten()
