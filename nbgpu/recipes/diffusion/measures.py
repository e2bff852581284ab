"""Measures of how close a sampled modality is to the true one: over the brain, over the tumour, and in its
frequencies.

Squared error and SSIM are taken over the voxels of a mask and not over the whole volume, most of which is air
that every method gets right. That is what BraSyn, the challenge of BraTS for missing modalities, does
(arXiv 2305.09011; `ssim.py` in github.com/hongweilibran/BraSyn): both images are set to 0 outside the mask,
and the map of SSIM is averaged inside it. Two things differ. BraSyn cuts and scales each image by its own
percentiles 0.5 and 99.5, which hides errors of brightness; here both stay in the scale of the data, where -1
and 1 are the percentiles 1 and 99 of the true image. And `ssim.py` indexes the map with a mask of integers,
which picks whole slices, where a mask of truth values was meant.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.metrics.regression import compute_ssim_and_cs
from monai.transforms.utils import generate_spatial_bounding_box
from torch import Tensor
from torch.nn import functional

from nbgpu.recipes.image_quality import psnr_db

MEASURES = ("psnr_db", "ssim", "spectrum_db", "tumour_psnr_db", "tumour_ssim")
_FLOOR = 1e-12
"""The least power of a frequency, so that its logarithm is finite."""


def unit(image: Tensor) -> Tensor:
    """Return an image from -1..1 scaled to 0..1, in which air is 0."""
    return (image + 1) / 2


def quality(
    output: Tensor, target: Tensor, brain: Tensor, label: Tensor | None = None
) -> list[dict[str, float]]:
    """Return the measures of each volume: `psnr_db`, `ssim` and `spectrum_db` over the brain, and, if the
    case has a tumour, `tumour_psnr_db` and `tumour_ssim` over the tumour.

    Args:
        output: the sampled volumes, (N, 1, e, e, e), from -1 to 1.
        target: the true volumes, of the same shape and range.
        brain: 1 in the brain and 0 outside, (N, 1, e, e, e).
        label: the classes of the tumour's voxels, 0 outside, (N, 1, e, e, e).
    """
    output, target = unit(output), unit(target)
    rows = []
    for index, (image, true) in enumerate(zip(output, target, strict=True)):
        inside = brain[index] > 0
        row = {
            "psnr_db": round(float(masked_psnr_db(image, true, inside)), 3),
            "ssim": round(masked_ssim(image, true, inside), 4),
            "spectrum_db": round(spectrum_distance_db(image * inside, true * inside), 3),
        }
        if label is not None and (tumour := label[index] > 0).any():
            row["tumour_psnr_db"] = round(float(masked_psnr_db(image, true, tumour)), 3)
            row["tumour_ssim"] = round(masked_ssim(image, true, tumour), 4)
        rows.append(row)
    return rows


def mean_over_cases(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over the cases that have it."""
    means = {}
    for name in MEASURES:
        if values := [row[name] for row in rows if name in row]:
            means[name] = round(sum(values) / len(values), 4)
    return means


def masked_psnr_db(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the PSNR over the voxels of a mask that is not empty, a scalar, for a data range of 1; all
    three have the shape (1, D, H, W)."""
    return psnr_db(output[mask][None], target[mask][None])[0]


def masked_ssim(output: Tensor, target: Tensor, mask: Tensor) -> float:
    """Return the mean structural similarity inside a mask, for volumes (1, D, H, W) with a data range of 1.

    As in BraSyn, both volumes are set to 0 outside the mask and padded with 0. The window is Wang's Gaussian
    one of 11 voxels, or of 7 for volumes smaller than 11.
    """
    window = 11 if output.shape[-1] >= 11 else 7
    # Both are cropped to the mask's bounding box, to save time. All voxels outside are 0, so that padding
    # with half a window of zeros gives the same values.
    box = generate_spatial_bounding_box(mask)
    crop = (slice(None), *(slice(start, end) for start, end in zip(*box, strict=True)))
    inside = mask[crop]
    padding = (window // 2,) * 6
    masked_output, masked_target = (
        functional.pad((volume[crop] * inside)[None], padding) for volume in (output, target)
    )
    similarity, _ = compute_ssim_and_cs(
        masked_output,
        masked_target,
        spatial_dims=3,
        kernel_size=(window,) * 3,
        kernel_sigma=(1.5,) * 3,
        data_range=1.0,
    )
    return float(similarity[0][inside].mean())


def spectrum_distance_db(output: Tensor, target: Tensor) -> float:
    """Return the distance in dB between the power spectra of two images (1, e, e, e): 0 if both are equally
    sharp.

    The power is averaged over shells of frequencies, one index wide, from 1 up to Nyquist's frequency. The
    distance is the root mean square over shells of the difference in dB (the log-spectral distance of Gray &
    Markel 1976). Phases have no effect. An image that is too smooth has a large distance even if its squared
    error is small.
    """
    difference = _shells_db(output) - _shells_db(target)
    return float(difference.square().mean().sqrt())


def _shells_db(image: Tensor) -> Tensor:
    """Return the mean power in dB in each shell of frequencies 1 to e / 2, of an image (1, e, e, e)."""
    edge = image.shape[-1]
    power = torch.fft.fftn(image[0].double()).abs().square()
    index = torch.fft.fftfreq(edge, 1 / edge, dtype=torch.float64)
    radius = sum(axis.square() for axis in torch.meshgrid(index, index, index, indexing="ij"))
    assert isinstance(radius, Tensor)
    shell = radius.sqrt().round().long().flatten()
    counted = torch.bincount(shell)
    means = torch.bincount(shell, weights=power.flatten()) / counted
    return 10 * means[1 : edge // 2 + 1].clamp_min(_FLOOR).log10()
